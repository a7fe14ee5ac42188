"""The log: records of changes in Kafka topics, and the records that give positions in them."""
