"""What processes of ours run with: background calls, notices, optional extras, Java and Spark."""
