-- Delete a truncated table's rows, with their companions. Returns how many rows were visible.
--
-- KEYS[1]     the guard
-- KEYS[2..]   companions
-- ARGV[1..3]  the guard's arguments
-- ARGV[4]     the floor: rows with a lower version are deleted
-- ARGV[5]     the table's form
-- ARGV[6..7]  the prefixes of values and of holders
-- ARGV[8]     how rows move: '', `place` or `claims`
-- ARGV[9..10] the bucket's index or '', and where a companion's key begins in its name
-- ARGV[11..]  for `plain` only, the rows' places in the companions' order
-- include parts/guarded
local k, a, applied = 1, 3, 0
local floor, form, values, holders, moves = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local ttl, life = '', ''
local index, key_at = ARGV[9], ARGV[10]
-- include parts/keep
-- include parts/indexed
-- include parts/claims
-- include parts/placed
local DELETED = string.rep('0', 17)
local deleted = 0
for at = 2, #KEYS do
  if form == 'plain' then
    local stored = call('GET', KEYS[at])
    if stored and stored < floor then
      if sub(stored, 17) == '1' then deleted = deleted + 1 end
      note(KEYS[at], stored, DELETED)
      call('DEL', KEYS[at], values .. ARGV[at + 9])
    end
  else
    local stored = call('HMGET', KEYS[at], 'seq', 'place', 'claim')
    if stored[1] and stored[1] < floor then
      if stored[2] then
        deleted = deleted + 1
        if moves == 'claims' then
          remove_member(form, values .. stored[2], holders .. stored[2], stored[3])
        else leave(stored[2], stored[1]) end
      end
      note(KEYS[at], stored[1], DELETED)
      call('DEL', KEYS[at])
    end
  end
end
write_index()
return deleted
