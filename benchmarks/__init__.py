"""Pinned workloads, each measured in one run together with its floor, its limit and its peer.

`python -m benchmarks [NAME...]` runs them; each prints one line of JSON last and saves it under
`results/`. One file per workload (`drain_inserts`, `latency`), one file per concern: the servers,
the rows, the captures that are compared (ours, the peer), the floor, the measurement, the result.

Everything measured is a separate process against real servers on this machine. A figure counts only
if the events that arrived were checked: each key exactly once, read_committed. Linux only: CPU time
and memory come from /proc.
"""
