-- Sets and sorted sets whose members are rows.
--
-- A collection's holder has its members' claims, `member NUL version score` in byte order: a
-- member's last claim is of the newest row with that member, and has its score.
local function newest_score(holder, member)
  local claim = call('ZREVRANGEBYLEX', holder, '(' .. member .. '\1', '[' .. member .. '\0',
    'LIMIT', 0, 1)[1]
  return claim and sub(claim, #member + 19)
end

local function add_member(form, collection, holder, claim, member)
  call('ZADD', holder, 0, claim)
  if form == 'set' then call('SADD', collection, member)
  else call('ZADD', collection, newest_score(holder, member), member) end
end

local function remove_member(form, collection, holder, claim)
  local member = sub(claim, 1, string.find(claim, '\0', 1, true) - 1)
  call('ZREM', holder, claim)
  local score = newest_score(holder, member)
  if form == 'set' then
    if not score then call('SREM', collection, member) end
  elseif score then call('ZADD', collection, score, member)
  else call('ZREM', collection, member) end
end
