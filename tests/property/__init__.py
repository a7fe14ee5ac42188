"""Claims that must hold for every input that Hypothesis generates."""
