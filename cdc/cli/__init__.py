"""The `cdc` command: one module per group of commands."""
