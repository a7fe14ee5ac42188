-- Records an applied frontier. Six arguments: the generation, its frontier (seq and LSN), the same
-- as JSON, and the readers' fields `seq`, `lsn` and `committed_at_us`. Advances `a`.
local function commit()
  local g, frontier, seq = ARGV[a + 1], ARGV[a + 2], sub(ARGV[a + 2], 1, 16)
  local seen = call('HGET', main, 'generation') == g
  if (call('HGET', main, g .. ':stand') or '') <= frontier then
    call('HSET', main, g .. ':stand', frontier, g .. ':applied', ARGV[a + 3])
    if seen then
      call('HSET', main, 'seq', ARGV[a + 4], 'lsn', ARGV[a + 5], 'committed_at_us', ARGV[a + 6])
    end
  end
  if (call('HGET', main, g .. ':reached') or '') < seq then
    call('HSET', main, g .. ':reached', seq)
  end
  if seen and (call('HGET', main, 'applying') or '') <= seq then
    call('HSET', main, 'applying', '')
  end
  a = a + 6
end
