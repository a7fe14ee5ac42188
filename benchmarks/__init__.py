"""Pinned workloads, each measured in one run beside its floor, its limit and its peer.

`python -m benchmarks [NAME...]` runs them; each prints one line of JSON last and keeps it under
`results/`. One file a workload (`drain_inserts`, `latency`), one file a concern: the servers, the
rows, the captures that are compared (ours, the peer), the floor, the measuring, the result.

Everything measured is a real process of its own against real servers on this machine, and every
figure counts only if what arrived was checked: each key exactly once, read_committed. Linux only:
CPU time and memory come from /proc.
"""
