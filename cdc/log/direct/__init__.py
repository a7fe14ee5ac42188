"""Our own transactional producer, for small batches and brokers with Kafka's transactions V2.

librdkafka adds each partition to a transaction in a round trip of its own and sends each partition
in a request of its own. With transactions V2 (KIP-890, Kafka 4.0) a write adds its partition by
itself, and one request holds all partitions of a broker: two round trips instead of seven.
"""
