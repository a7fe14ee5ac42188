"""The doctor: one file for each subject; `run` gathers facts and reports."""
