-- Delete a truncated table's rows, with their companions. Returns how many rows were visible.
--
-- In a cluster a writer reads the floor before its calls, so one that was frozen in between still has
-- an older one. There a companion becomes a deleted row's, of the floor's seq, which such a writer's
-- rows do not replace.
--
-- KEYS[1]     the guard
-- KEYS[2..]   companions
-- ARGV[1..3]  the guard's arguments
-- ARGV[4]     the floor: rows with a lower version are deleted
-- ARGV[5]     the table's form
-- ARGV[6..7]  the prefixes of values and of holders
-- ARGV[8]     how rows move: '', `place` or `claims`
-- ARGV[9..10] the bucket's index or '', and where a companion's key begins in its name
-- ARGV[11]    in a cluster, how long a deleted row's companion is kept, in seconds; otherwise ''
-- ARGV[12..]  for `plain` only, the rows' places in the companions' order
-- include parts/guarded
local k, a, applied = 1, 3, 0
local floor, form, values, holders, moves = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local ttl, life = '', ARGV[11]
local index, key_at = ARGV[9], ARGV[10]
-- include parts/keep
-- include parts/indexed
-- include parts/claims
-- include parts/placed
local DELETED = string.rep('0', 17)
local deleted = 0

local function delete_companion(companion, is_text)
  call('DEL', companion)
  if life ~= '' then
    local version = floor .. '0'
    if is_text then call('SET', companion, version) else call('HSET', companion, 'seq', version) end
    keep(companion, version)
  end
end

for at = 2, #KEYS do
  if form == 'plain' then
    local stored = call('GET', KEYS[at])
    if stored and stored < floor then
      if sub(stored, 17) == '1' then deleted = deleted + 1 end
      note(KEYS[at], stored, DELETED)
      call('DEL', values .. ARGV[at + 10])
      delete_companion(KEYS[at], true)
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
      delete_companion(KEYS[at], false)
    end
  end
end
write_index()
return deleted
