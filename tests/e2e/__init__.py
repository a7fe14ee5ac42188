"""Run the full path, from the command line to the topics."""
