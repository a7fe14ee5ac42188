"""Alembic's scripts: what may live in the source database, all of it optional and removable."""
