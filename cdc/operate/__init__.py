"""What an operator uses: health, metrics, logs, the doctor and the status."""
