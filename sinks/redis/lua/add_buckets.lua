-- Add buckets to those whose index a table may use.
--
-- KEYS[1]     the guard, here always the follower's own key
-- ARGV[1..3]  the guard's arguments
-- ARGV[4]     the field of the table's buckets
-- ARGV[5]     the buckets to add, as a bitmap
-- include parts/guarded
local stored, added, both = call('HGET', main, ARGV[4]) or '', ARGV[5], {}
for at = 1, math.max(#stored, #added) do
  both[at] = string.char(bit.bor(string.byte(stored, at) or 0, string.byte(added, at) or 0))
end
call('HSET', main, ARGV[4], table.concat(both))
return 1
