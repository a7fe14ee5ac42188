-- Start a cut: record the seq up to which it may write. Returns the stored applied frontier.
--
-- KEYS[1]     the guard, here always the follower's own key
-- ARGV[1..3]  the guard's arguments
-- ARGV[4]     the generation
-- ARGV[5]     the applied frontier that the caller knows: `OLDER` if the stored one is older
-- ARGV[6]     the cut's last seq
-- ARGV[7]     if the cut is valid only from one seq, that seq, otherwise '': `OVERTAKEN` if the store
--             is at another seq, or another copy has started another cut, or one that replaces all
-- include parts/guarded
local g, known, last, above = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local stored = call('HMGET', main, g .. ':stand', g .. ':reached', g .. ':replacing')
if (stored[1] or '') < known then return redis.error_reply('OLDER') end
if above ~= '' then
  local applied, started = sub(stored[1] or '', 1, 16), stored[2] or ''
  if applied == '' then applied = string.rep('0', 16) end
  local replacing = stored[3] or ''
  if applied ~= above or (started > above and started ~= last) or replacing > above then
    return redis.error_reply('OVERTAKEN')
  end
end
if (stored[2] or '') < last then call('HSET', main, g .. ':reached', last) end
if above == '' and (stored[3] or '') < last then call('HSET', main, g .. ':replacing', last) end
return stored[1]
