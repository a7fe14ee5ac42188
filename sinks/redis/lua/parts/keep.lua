-- How long a companion is kept: a deleted row's until no late write can restore the row, others' as
-- long as the row. Reads `ttl` and `life`.
local function keep(companion, version)
  if sub(version, 17) == '0' then call('EXPIRE', companion, life)
  elseif ttl == '' then call('PERSIST', companion)
  else call('EXPIRE', companion, ttl + life) end
end
