-- Raise the sentinel of a cluster's slot. It never moves back to an earlier step.
--
-- KEYS[1]  the sentinel
-- ARGV[1]  its minimum value
-- ARGV[2]  `new` if it may be missing, otherwise '': `LOST` if it is missing or has another token
local TOKEN_LENGTH = 16
local stored, sub = redis.call('GET', KEYS[1]), string.sub
local same = stored and sub(stored, 1, TOKEN_LENGTH) == sub(ARGV[1], 1, TOKEN_LENGTH)
if not same and ARGV[2] ~= 'new' then return redis.error_reply('LOST') end
if not same or stored < ARGV[1] then redis.call('SET', KEYS[1], ARGV[1]) end
return 1
