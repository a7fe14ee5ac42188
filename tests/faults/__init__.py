"""Break it while it works: kills, cuts and freezes, and one oracle after each."""
