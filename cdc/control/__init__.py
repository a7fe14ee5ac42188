"""What an operator sees and asks: health, metrics, logs, the doctor and the status."""
