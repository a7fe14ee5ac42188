-- The guard, and `SWITCHED` unless readers see the caller's generation and no switch has moved on.
-- include parts/guard
if switched then return redis.error_reply('SWITCHED') end
