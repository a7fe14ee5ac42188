"""A snapshot's ranges as Spark tasks, and tables copied directly into Delta mirrors."""
