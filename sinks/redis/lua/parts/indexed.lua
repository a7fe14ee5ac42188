-- The index of a bucket: the set of the keys of its existing rows, by which a truncate finds them.
--
-- It has an empty member from its first key on, so it is never empty: one that is missing was
-- evicted. Reads `index` and `key_at`.
local changed = {}

local function exists(version) return not not version and sub(version, 17) ~= '0' end

local function note(companion, before, version)
  if index ~= '' and exists(before) ~= exists(version) then
    changed[sub(companion, key_at)] = exists(version)
  end
end

local function write_index()
  local came, left = {''}, {}
  for key, came_in in pairs(changed) do
    local keys = came_in and came or left
    keys[#keys + 1] = key
  end
  if #came > 1 then call('SADD', index, unpack(came)) end
  if #left > 0 then call('SREM', index, unpack(left)) end
  changed = {}
end
