"""What commands change: set up, tear down, acknowledge, add tables, start snapshots."""
