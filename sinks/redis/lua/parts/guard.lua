-- Checks that this is the data that the caller opened, and sets `main`, `call`, `sub`, `switched`.
--
-- KEYS[1]  the guard: the follower's own key; in a cluster, the sentinel of the keys' slot
-- ARGV[1]  the guard's field with the token; in a cluster ''
-- ARGV[2]  the token; in a cluster, the sentinel's value
-- ARGV[3]  the field `current` as the caller knows it
--
-- `LOST` if the guard is missing or has another token. `switched` is true if readers see another
-- generation, or a switch is at another step.
local TOKEN_LENGTH = 16
local call, sub = redis.call, string.sub
local KEYS, ARGV = KEYS, ARGV
local main = KEYS[1]
local switched
if ARGV[1] == '' then
  local sentinel = call('GET', main)
  if not sentinel or sub(sentinel, 1, TOKEN_LENGTH) ~= sub(ARGV[2], 1, TOKEN_LENGTH) then
    return redis.error_reply('LOST')
  end
  switched = sentinel ~= ARGV[2]
else
  local stored = call('HMGET', main, ARGV[1], 'current')
  if stored[1] ~= ARGV[2] then return redis.error_reply('LOST') end
  switched = stored[2] ~= ARGV[3]
end
