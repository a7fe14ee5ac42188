-- Set fields for the next step of a switch. Does nothing if another copy has already done so.
--
-- KEYS[1]     the guard, here always the follower's own key
-- ARGV[1..3]  the guard's arguments
-- ARGV[4..]   fields and values
-- include parts/guard
if switched then return 0 end
call('HSET', main, unpack(ARGV, 4))
return 1
