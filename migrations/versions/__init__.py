"""One file per revision. Each branch is independent: its label is the setting that enables it."""
