"""The real loop, sequencer, producer pool and publisher in a simulated world, thousands of times.

Only the edges are simulated: the bytes of the walsender's socket (`slot`), Kafka's producer and the
broker's data (`broker`), threads and the clock (`scheduler`). A schedule is a seed: it decides what
arrives when, in which pieces, which answer is late or lost, where the process dies, and what the
next one finds. After every commit, and at the end, the log is compared with the history.

Nothing here sleeps, waits or depends on the machine, so a schedule is the same every time.
"""
