-- Raise the seq up to which one server of a cluster has a generation's rows.
--
-- KEYS[1]  the key that holds it
-- ARGV[1]  the seq
if (redis.call('GET', KEYS[1]) or '') < ARGV[1] then redis.call('SET', KEYS[1], ARGV[1]) end
return 1
