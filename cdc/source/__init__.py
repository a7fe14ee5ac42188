"""The source: the only place that speaks to Postgres, as walsender client and as SQL client."""
