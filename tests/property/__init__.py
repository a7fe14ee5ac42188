"""Hold for every input that Hypothesis can think of."""
