-- Rows that can move to another place.
--
-- If a table's rows move, a place has a holder: the version of the row that is there, which alone
-- may delete it again. Reads `floor`, `ttl`, `life`, `values`, `holders` and `moves`; advances `k`,
-- `a` and `applied`.
local function leave(place, version)
  if moves ~= '' then
    if call('GET', holders .. place) ~= version then return end
    call('DEL', holders .. place)
  end
  call('DEL', values .. place)
end

local function arrive(form, value, holder, version, first, last)
  if moves ~= '' then
    local holding = call('GET', holder)
    if holding and holding > version then return end
    call('SET', holder, version)
    if ttl ~= '' then call('EXPIRE', holder, ttl) end
  end
  if form == 'hash' then
    call('DEL', value)
    for at = first, last, 2000 do
      call('HSET', value, unpack(ARGV, at, math.min(at + 1999, last)))
    end
  else
    call('SET', value, ARGV[first])
  end
  if ttl ~= '' then call('EXPIRE', value, ttl) end
end

local function placed(count, form)
  for _ = 1, count do
    local companion, version = KEYS[k + 1], ARGV[a + 1]
    local value, holder, place, kept, first, last
    k, a = k + 1, a + 1
    local has_place = sub(version, 17) == '1'
    if has_place then
      value, k = KEYS[k + 1], k + 1
      if moves ~= '' then holder, k = KEYS[k + 1], k + 1 end
      place, kept, first = ARGV[a + 1], ARGV[a + 2], a + 4
      last = a + 3 + ARGV[a + 3]
      a = last
    end
    local stored = call('HMGET', companion, 'seq', 'place', 'claim')
    if version > floor and (not stored[1] or stored[1] < version) then
      applied = applied + 1
      note(companion, stored[1], version)
      local claim = ''
      if moves == 'claims' then
        if has_place then
          local score = form == 'zset' and ARGV[last] or ''
          claim = ARGV[first] .. '\0' .. version .. score
          add_member(form, value, holder, claim, ARGV[first], score)
        end
        if stored[2] then
          remove_member(form, values .. stored[2], holders .. stored[2], stored[3])
        end
      else
        if stored[2] and stored[2] ~= place then leave(stored[2], stored[1]) end
        if has_place then arrive(form, value, holder, version, first, last) end
      end
      if has_place then
        call('HSET', companion, 'seq', version, 'place', place, 'kept', kept, 'claim', claim)
      else
        call('HDEL', companion, 'place', 'kept', 'claim')
        call('HSET', companion, 'seq', version)
      end
      keep(companion, version, stored[1])
    end
  end
end
