"""The log: records of changes in Kafka topics, and the records that say where a reader stands."""
