"""Compacted Kafka topics: `sink` applies cuts, each in one Kafka transaction with its frontier."""
