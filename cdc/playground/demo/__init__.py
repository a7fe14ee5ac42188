"""A small social network and shop, written to while you watch its changes arrive in Kafka.

`schema` the tables, `actions` and `generator` the writers, `flow` what has arrived, `view` how it
is shown, `chaos` the kills, `proof` the comparison at the end, `stage` the run from start to stop.
"""
