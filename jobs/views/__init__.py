"""Maintained views: SQL over mirrors, whose rows are those that Postgres has at the frontier."""
