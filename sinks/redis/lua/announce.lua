-- Show readers that rows are being written in more than one call.
--
-- KEYS[1]     the guard, here always the follower's own key
-- ARGV[1..3]  the guard's arguments
-- ARGV[4]     the generation; nothing is shown unless readers see it
-- ARGV[5]     the seq up to which rows are being written
-- include parts/guarded
if call('HGET', main, 'generation') ~= ARGV[4] then return 0 end
if (call('HGET', main, 'applying') or '') < ARGV[5] then call('HSET', main, 'applying', ARGV[5]) end
return 1
