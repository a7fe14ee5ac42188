"""What every process of ours needs: background calls, notices while it waits, optional extras."""
