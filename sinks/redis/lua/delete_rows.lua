-- Delete rows of a lost store: companions with their values.
--
-- KEYS[1..]  companions
-- ARGV[1..]  the place of each one's row if the companion is plain text
local call = redis.call
for at = 1, #KEYS do
  local kind = call('TYPE', KEYS[at]).ok
  local place = ARGV[at]
  if kind == 'hash' then place = call('HGET', KEYS[at], 'place') end
  if place and kind ~= 'none' then call('DEL', place) end
  call('DEL', KEYS[at])
end
return 1
