"""The real loop, sequencer, lanes and publisher in a world of our own, thousands of times over.

Only the edges are played: the bytes of the walsender's socket (`slot`), Kafka's producer and what
its broker keeps (`broker`), threads and the clock (`scheduler`). A schedule is a seed: it decides
what arrives when, in which pieces, which answer is late or lost, where the process dies, and what
the next one finds. After every commit, and in the end, the log is held against the history.

Nothing here sleeps, waits or asks the machine for anything, so a schedule is the same every time.
"""
