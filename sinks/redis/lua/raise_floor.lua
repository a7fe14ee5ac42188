-- Raise a table's floor, below which no row is written, and record the key of the rows above it.
--
-- KEYS[1]     the guard, here always the follower's own key
-- ARGV[1..3]  the guard's arguments
-- ARGV[4..5]  the field of the table's floor, and the seq of its truncate
-- ARGV[6..7]  the field of the table's key, and its key
-- include parts/guarded
local floor = call('HGET', main, ARGV[4])
if not floor or floor <= ARGV[5] then call('HSET', main, unpack(ARGV, 4)) end
return 1
