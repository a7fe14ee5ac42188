"""Alembic's scripts: what may be created in the source database, all optional and removable."""
