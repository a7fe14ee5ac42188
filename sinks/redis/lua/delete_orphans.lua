-- Delete values whose companions were evicted. Returns how many.
--
-- KEYS[1]     the guard
-- KEYS[2..]   values, each followed by the companions of which it should have at least one
-- ARGV[1..3]  the guard's arguments
-- ARGV[4..]   the number of companions of each value
-- include parts/guarded
local at, deleted = 2, 0
for n = 4, #ARGV do
  local count = tonumber(ARGV[n])
  local existing = call('EXISTS', unpack(KEYS, at + 1, at + count))
  if existing == 0 then deleted = deleted + call('DEL', KEYS[at]) end
  at = at + 1 + count
end
return deleted
