"""Run the whole path, from the command line to the topics."""
