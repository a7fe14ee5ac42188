"""Spark: its session, our data source, its Kafka reader's settings."""
