"""Brings changes to programs: members of a group that acknowledge them, and webhooks."""
