"""Run against real servers."""
