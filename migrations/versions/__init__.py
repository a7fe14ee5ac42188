"""One file a revision. Each branch stands alone: its label is the setting that asks for it."""
