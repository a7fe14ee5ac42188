-- Sets and sorted sets whose members are rows.
--
-- A collection's holder has its members' claims, `member NUL version score` in byte order: a
-- member's last claim is of the newest row with that member, and has its score.
--
-- Looking for a claim costs a short sorted set's length, from the end where the server begins. So
-- the last claim is only looked for if the member has another one: it is in the collection before
-- the row came, or in the holder, looked for among the oldest first, when the row has left.
local function score_by_claims(collection, holder, member)
  local claim = call('ZREVRANGEBYLEX', holder, '(' .. member .. '\1', '[' .. member .. '\0',
    'LIMIT', 0, 1)[1]
  call('ZADD', collection, sub(claim, #member + 19), member)
end

local function add_member(form, collection, holder, claim, member, score)
  call('ZADD', holder, 0, claim)
  if form == 'set' then call('SADD', collection, member)
  elseif call('ZADD', collection, 'NX', score, member) == 0 then
    score_by_claims(collection, holder, member)
  end
end

local function remove_member(form, collection, holder, claim)
  local member = sub(claim, 1, string.find(claim, '\0', 1, true) - 1)
  call('ZREM', holder, claim)
  local another = call('ZRANGEBYLEX', holder, '[' .. member .. '\0', '(' .. member .. '\1',
    'LIMIT', 0, 1)[1]
  if not another then call(form == 'set' and 'SREM' or 'ZREM', collection, member)
  elseif form == 'zset' then score_by_claims(collection, holder, member) end
end
