-- How long a companion is kept: a deleted row's until no late write can restore the row, others' as
-- long as the row. `before` is the version that it had; reads `ttl` and `life`.
local function keep(companion, version, before)
  if sub(version, 17) == '0' then call('EXPIRE', companion, life)
  elseif ttl == '' then
    if before and sub(before, 17) == '0' then call('PERSIST', companion) end
  else call('EXPIRE', companion, ttl + life) end
end
