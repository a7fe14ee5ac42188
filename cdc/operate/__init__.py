"""What an operator uses: health, metrics, logs, status and verdict."""
