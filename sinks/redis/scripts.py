"""Scripts that run inside Redis: compare-and-set by seq, many keys per call, atomically.

Versions are compared as text of fixed width in lower-case hexadecimal, because Lua's numbers are
doubles: sixteen digits of the seq, then `1` if the row has a place, `00` if it exists without a
place, and `0` if it is deleted. Only digits, so that every locale orders them the same way.

Every call has a guard: the follower's own key or, in a cluster, the slot's sentinel. If it is
missing or has another token, this is not the data that was opened: `LOST`. If readers see another
generation, or a switch is at another step: `SWITCHED`.
"""

from __future__ import annotations

from typing import Final

TOKEN_LENGTH: Final = 16  # a sentinel starts with this many characters; its step follows

# KEYS: the guard. ARGV: its field (in a cluster ""), the token, `current` as it must be.
_GUARD: Final = f"""
local call, sub = redis.call, string.sub
local KEYS, ARGV = KEYS, ARGV
local main = KEYS[1]
local switched
if ARGV[1] == '' then
  local found = call('GET', main)
  if not found or sub(found, 1, {TOKEN_LENGTH}) ~= sub(ARGV[2], 1, {TOKEN_LENGTH}) then
    return redis.error_reply('LOST')
  end
  switched = found ~= ARGV[2]
else
  local found = call('HMGET', main, ARGV[1], 'current')
  if found[1] ~= ARGV[2] then return redis.error_reply('LOST') end
  switched = found[2] ~= ARGV[3]
end
"""
_GUARDED: Final = f"""{_GUARD}
if switched then return redis.error_reply('SWITCHED') end
"""

# Then: generation, the applied frontier known to the caller, the cut's last seq, and if the cut is
# valid only from one seq, that seq.
BEGIN: Final = f"""{_GUARDED}
local g = ARGV[4]
local stored = call('HMGET', main, g .. ':stand', g .. ':reached')
if (stored[1] or '') < ARGV[5] then return redis.error_reply('OLDER') end
if ARGV[7] ~= '' then
  local stands, begun = sub(stored[1] or '', 1, 16), stored[2] or ''
  if stands == '' then stands = string.rep('0', 16) end
  if stands ~= ARGV[7] or (begun > ARGV[7] and begun ~= ARGV[6]) then
    return redis.error_reply('OVERTAKEN')
  end
end
if (stored[2] or '') < ARGV[6] then call('HSET', main, g .. ':reached', ARGV[6]) end
return stored[1]
"""

# Then: generation, the seq up to which rows are being written in more than one call.
ANNOUNCE: Final = f"""{_GUARDED}
if call('HGET', main, 'generation') ~= ARGV[4] then return 0 end
if (call('HGET', main, 'applying') or '') < ARGV[5] then call('HSET', main, 'applying', ARGV[5]) end
return 1
"""

# Then: the field of a table's floor, and its truncate's seq; the field of its key, and its key.
FLOOR: Final = f"""{_GUARDED}
local floor = call('HGET', main, ARGV[4])
if not floor or floor <= ARGV[5] then call('HSET', main, unpack(ARGV, 4)) end
return 1
"""

# Then: the field of a table's layout or key, and its value; returns the stored one.
REMEMBER: Final = f"""{_GUARDED}
if (call('HGET', main, ARGV[4]) or '') == '' then call('HSET', main, ARGV[4], ARGV[5]) end
return call('HGET', main, ARGV[4])
"""

# How long a companion is kept: a deleted row's until no late write can restore the row, others' as
# long as the row.
_KEEP: Final = """
local function keep(companion, version)
  if sub(version, 17) == '0' then call('EXPIRE', companion, life)
  elseif ttl == '' then call('PERSIST', companion)
  else call('EXPIRE', companion, ttl + life) end
end
"""

# Rows without a TTL are stored a few hundred at once, which takes the server two thirds of the time
# of single writes; no call has more changes than fit on Lua's stack.
_PLAIN: Final = """
local function plain(count)
  local companions = {}
  for at = 1, count do companions[at] = KEYS[k + 2 * at] end
  local stored = call('MGET', unpack(companions))
  local pairs, many = {}, 0
  for at = 1, count do
    local version = ARGV[a + 1]
    if version > floor and (not stored[at] or stored[at] < version) then
      local value, companion = KEYS[k + 1], companions[at]
      news = news + 1
      if sub(version, 17) ~= '1' then
        call('DEL', value)
        call('SET', companion, version)
        keep(companion, version)
      elseif ttl == '' then
        pairs[many + 1], pairs[many + 2] = value, ARGV[a + 2]
        pairs[many + 3], pairs[many + 4] = companion, version
        many = many + 4
      else
        call('SET', value, ARGV[a + 2], 'EX', ttl)
        call('SET', companion, version, 'EX', ttl + life)
      end
    end
    k, a = k + 2, a + 2
  end
  if many > 0 then call('MSET', unpack(pairs)) end
end
"""

# A row that can move to another place. If a table's rows move, a place has a holder: the version of
# the row that is there, which alone may delete it again.
_PLACED: Final = """
local function leave(place, version)
  if moves ~= '' then
    if call('GET', holders .. place) ~= version then return end
    call('DEL', holders .. place)
  end
  call('DEL', values .. place)
end

local function arrive(form, value, holder, version, first, last)
  if moves ~= '' then
    local held = call('GET', holder)
    if held and held > version then return end
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
    local stands = sub(version, 17) == '1'
    if stands then
      value, k = KEYS[k + 1], k + 1
      if moves ~= '' then holder, k = KEYS[k + 1], k + 1 end
      place, kept, first = ARGV[a + 1], ARGV[a + 2], a + 4
      last = a + 3 + ARGV[a + 3]
      a = last
    end
    local stored = call('HMGET', companion, 'seq', 'place', 'claim')
    if version > floor and (not stored[1] or stored[1] < version) then
      news = news + 1
      local claim = ''
      if moves == 'claims' then
        if stands then
          claim = ARGV[first] .. '\\0' .. version .. (form == 'zset' and ARGV[last] or '')
          join(form, value, holder, claim, ARGV[first])
        end
        if stored[2] then part(form, values .. stored[2], holders .. stored[2], stored[3]) end
      else
        if stored[2] and stored[2] ~= place then leave(stored[2], stored[1]) end
        if stands then arrive(form, value, holder, version, first, last) end
      end
      if stands then
        call('HSET', companion, 'seq', version, 'place', place, 'kept', kept, 'claim', claim)
      else
        call('HDEL', companion, 'place', 'kept', 'claim')
        call('HSET', companion, 'seq', version)
      end
      keep(companion, version)
    end
  end
end
"""

# A collection's holder has its members' claims, `member NUL version score` in byte order: a
# member's last claim is of the newest row with that member, and has its score.
_CLAIMS: Final = """
local function newest(holder, member)
  local found = call('ZREVRANGEBYLEX', holder, '(' .. member .. '\\1', '[' .. member .. '\\0',
    'LIMIT', 0, 1)[1]
  return found and sub(found, #member + 19)
end

local function join(form, collection, holder, claim, member)
  call('ZADD', holder, 0, claim)
  if form == 'set' then call('SADD', collection, member)
  else call('ZADD', collection, newest(holder, member), member) end
end

local function part(form, collection, holder, claim)
  local member = sub(claim, 1, string.find(claim, '\\0', 1, true) - 1)
  call('ZREM', holder, claim)
  local score = newest(holder, member)
  if form == 'set' then
    if not score then call('SREM', collection, member) end
  elseif score then call('ZADD', collection, score, member)
  else call('ZREM', collection, member) end
end
"""

# `commit`: generation, its frontier (seq and LSN), the same as JSON, and the readers' fields.
_COMMIT: Final = """
local function commit()
  local g, stand, seq = ARGV[a + 1], ARGV[a + 2], sub(ARGV[a + 2], 1, 16)
  local seen = call('HGET', main, 'generation') == g
  if (call('HGET', main, g .. ':stand') or '') <= stand then
    call('HSET', main, g .. ':stand', stand, g .. ':applied', ARGV[a + 3])
    if seen then
      call('HSET', main, 'seq', ARGV[a + 4], 'lsn', ARGV[a + 5], 'committed_at_us', ARGV[a + 6])
    end
  end
  if (call('HGET', main, g .. ':reached') or '') < seq then
    call('HSET', main, g .. ':reached', seq)
  end
  if seen and (call('HGET', main, 'applying') or '') <= seq then
    call('HSET', main, 'applying', '')
  end
  a = a + 6
end
"""

# Then groups, as `sinks.redis.calls` writes them. `plain` takes two keys per change (value,
# companion) and two arguments (version, row). Other forms take as keys the companion, the value's
# key if the row has a place, and the place's holder if rows move; as arguments the version, and if
# the row has a place, the place, the kept columns, the number of parts of the value, and these
# parts.
APPLY: Final = f"""{_GUARDED}
local k, a, news = 1, 3, 0
local floor, ttl, life, values, holders, moves
{_KEEP}{_PLAIN}{_CLAIMS}{_PLACED}{_COMMIT}
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
    if ARGV[1] ~= '' then floor = call('HGET', main, floor) or '' end
    a = a + 7
    if form == 'plain' then plain(count) else placed(count, form) end
  end
end
return news
"""

# KEYS: guard, then companions. Then: floor, form, prefixes of values and holders, moves; the places
# of plain rows in the companions' order.
TAKE: Final = f"""{_GUARDED}
local k, a, news = 1, 3, 0
local floor, form, values, holders, moves = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local ttl, life = '', ''
{_KEEP}{_CLAIMS}{_PLACED}
local gone = 0
for at = 2, #KEYS do
  if form == 'plain' then
    local stored = call('GET', KEYS[at])
    if stored and stored < floor then
      if sub(stored, 17) == '1' then gone = gone + 1 end
      call('DEL', KEYS[at], values .. ARGV[at + 7])
    end
  else
    local stored = call('HMGET', KEYS[at], 'seq', 'place', 'claim')
    if stored[1] and stored[1] < floor then
      if stored[2] then
        gone = gone + 1
        if moves == 'claims' then part(form, values .. stored[2], holders .. stored[2], stored[3])
        else leave(stored[2], stored[1]) end
      end
      call('DEL', KEYS[at])
    end
  end
end
return gone
"""

# KEYS: guard; then values, each followed by the companions of which it should have one. Then the
# number of companions of each. A value without a companion is deleted.
FORGET: Final = f"""{_GUARDED}
local at, gone = 2, 0
for n = 4, #ARGV do
  local many = tonumber(ARGV[n])
  local known = call('EXISTS', unpack(KEYS, at + 1, at + many))
  if known == 0 then gone = gone + call('DEL', KEYS[at]) end
  at = at + 1 + many
end
return gone
"""

# Then fields and values. A step of a switch that another copy has made is not repeated.
TURN: Final = f"""{_GUARD}
if switched then return 0 end
call('HSET', main, unpack(ARGV, 4))
return 1
"""

# KEYS: guard; then for each place the readers' key, the new build's key, and the key for the old
# value. Then: `old` moves values that the new build does not have, `new` moves its values to their
# places. Does nothing once a copy has reached the next step: to a late `old`, a new value that is
# already at its place would look like one that the new build lacks.
MOVE: Final = f"""{_GUARD}
if switched then return 0 end
for at = 2, #KEYS, 3 do
  local seen, new, old = KEYS[at], KEYS[at + 1], KEYS[at + 2]
  local there = call('EXISTS', new) == 1
  if ARGV[4] == 'old' then
    if not there and call('EXISTS', seen) == 1 then call('RENAME', seen, old) end
  elseif there then
    if call('EXISTS', seen) == 1 then call('RENAME', seen, old) end
    call('RENAME', new, seen)
  end
end
return 1
"""

# KEYS: a slot's sentinel. ARGV: its minimum value; `new` if it may be missing. It never moves back
# to an earlier step.
MARK: Final = f"""
local found, sub = redis.call('GET', KEYS[1]), string.sub
local known = found and sub(found, 1, {TOKEN_LENGTH}) == sub(ARGV[1], 1, {TOKEN_LENGTH})
if not known and ARGV[2] ~= 'new' then return redis.error_reply('LOST') end
if not known or found < ARGV[1] then redis.call('SET', KEYS[1], ARGV[1]) end
return 1
"""

# KEYS: the key with the seq up to which a server has a generation. ARGV: the seq.
TELL: Final = """
if (redis.call('GET', KEYS[1]) or '') < ARGV[1] then redis.call('SET', KEYS[1], ARGV[1]) end
return 1
"""
