"""The embedded stack: real Postgres, Kafka, Redis and OpenSearch as plain processes."""
