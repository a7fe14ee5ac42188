"""What is captured: the publication as it should be, as it is, and what its changes have lost."""
