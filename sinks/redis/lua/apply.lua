-- Write changes, each if it is newer than the stored row. Returns how many were.
--
-- KEYS[1]     the guard
-- ARGV[1..3]  the guard's arguments
-- Then groups of arguments, each starting with its form (`sinks.redis.calls`):
--   `commit`    the six arguments of parts/commit
--   `applying`  the seq up to which rows are being written in this call
--   others      a table's form; the number of changes; the floor (in a cluster its value, otherwise
--               its field), the rows' TTL or '', how long a deleted row's companion is kept, both in
--               seconds; the prefixes of values and of holders; how rows move ('', `place`, `claims`);
--               the bucket's index or '', and where a companion's key begins in its name
--     `plain`   per change, keys: value, companion; arguments: version, row
--     others    per change, keys: companion; if the row has a place, the value's; if rows move, the
--               place's holder. Arguments: version; if the row has a place, the place, the kept
--               columns, the number of parts of the value, and these parts
-- include parts/guarded
local k, a, applied = 1, 3, 0
local floor, ttl, life, values, holders, moves, index, key_at
-- include parts/keep
-- include parts/indexed
-- include parts/plain
-- include parts/claims
-- include parts/placed
-- include parts/commit
while ARGV[a + 1] do
  local form = ARGV[a + 1]
  a = a + 1
  if form == 'commit' then commit()
  elseif form == 'applying' then
    if (call('HGET', main, 'applying') or '') < ARGV[a + 1] then
      call('HSET', main, 'applying', ARGV[a + 1])
    end
    a = a + 1
  else
    local count = tonumber(ARGV[a + 1])
    floor, ttl, life = ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
    values, holders, moves = ARGV[a + 5], ARGV[a + 6], ARGV[a + 7]
    index, key_at = ARGV[a + 8], ARGV[a + 9]
    if ARGV[1] ~= '' then floor = call('HGET', main, floor) or '' end
    a = a + 9
    if form == 'plain' then plain(count) else placed(count, form) end
    write_index()
  end
end
return applied
