"""The `cdc` command: one module a group of commands."""
