-- Create a generation if it is missing; make it current if there is none. Returns all fields.
--
-- KEYS[1]  the follower's own key
-- ARGV[1]  the generation
-- ARGV[2]  its token
-- ARGV[3]  its builds as JSON
-- ARGV[4]  the token of a cluster's sentinels
local call, main, g = redis.call, KEYS[1], ARGV[1]
if call('HSETNX', main, g .. ':token', ARGV[2]) == 1 then
  call('HSET', main, g .. ':builds', ARGV[3])
end
if call('HSETNX', main, 'current', g) == 1 then
  call('HSET', main, 'generation', g, 'applying', '', 'sentinel', ARGV[4])
end
return call('HGETALL', main)
