-- Move values during a switch. Does nothing once a copy has reached the next step: to a late `old`,
-- a new value that is already at its place would look like one that the new build lacks.
--
-- KEYS[1]     the guard
-- KEYS[2..]   for each place, the readers' key, the new build's key, and the key for the old value
-- ARGV[1..3]  the guard's arguments
-- ARGV[4]     `old` moves values that the new build does not have, `new` moves its values to their
--             places
-- include parts/guard
if switched then return 0 end
for at = 2, #KEYS, 3 do
  local seen, new, old = KEYS[at], KEYS[at + 1], KEYS[at + 2]
  local is_built = call('EXISTS', new) == 1
  if ARGV[4] == 'old' then
    if not is_built and call('EXISTS', seen) == 1 then call('RENAME', seen, old) end
  elseif is_built then
    if call('EXISTS', seen) == 1 then call('RENAME', seen, old) end
    call('RENAME', new, seen)
  end
end
return 1
