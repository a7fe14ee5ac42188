-- Rows that are stored as text at their keys.
--
-- Those without a TTL are stored a few hundred at once, which takes the server two thirds of the
-- time of single writes; no call has more changes than fit on Lua's stack. Reads `floor`, `ttl` and
-- `life`; advances `k`, `a` and `applied`.
local function plain(count)
  local companions = {}
  for at = 1, count do companions[at] = KEYS[k + 2 * at] end
  local stored = call('MGET', unpack(companions))
  local pairs, length = {}, 0
  for at = 1, count do
    local version = ARGV[a + 1]
    if version > floor and (not stored[at] or stored[at] < version) then
      local value, companion = KEYS[k + 1], companions[at]
      applied = applied + 1
      note(companion, stored[at], version)
      if sub(version, 17) ~= '1' then
        call('DEL', value)
        call('SET', companion, version)
        keep(companion, version)
      elseif ttl == '' then
        pairs[length + 1], pairs[length + 2] = value, ARGV[a + 2]
        pairs[length + 3], pairs[length + 4] = companion, version
        length = length + 4
      else
        call('SET', value, ARGV[a + 2], 'EX', ttl)
        call('SET', companion, version, 'EX', ttl + life)
      end
    end
    k, a = k + 2, a + 2
  end
  if length > 0 then call('MSET', unpack(pairs)) end
end
