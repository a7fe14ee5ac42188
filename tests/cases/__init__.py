"""Cases that a capture of Postgres must pass, on every major, through the whole path."""
