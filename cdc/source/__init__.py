"""The source: the only place that connects to Postgres, as walsender client and as SQL client."""
