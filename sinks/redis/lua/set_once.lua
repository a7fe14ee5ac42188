-- Set a field unless it has a value. Returns the stored value.
--
-- KEYS[1]     the guard, here always the follower's own key
-- ARGV[1..3]  the guard's arguments
-- ARGV[4..5]  the field of a table's layout or key, and its value
-- include parts/guarded
if (call('HGET', main, ARGV[4]) or '') == '' then call('HSET', main, ARGV[4], ARGV[5]) end
return call('HGET', main, ARGV[4])
