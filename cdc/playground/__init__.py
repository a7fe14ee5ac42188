"""Real servers as plain processes, and the demo on them. Nothing else imports it."""
