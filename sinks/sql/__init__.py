"""Tables in Postgres or SQLite, by SQLAlchemy: `sink` applies cuts, each in one transaction."""
