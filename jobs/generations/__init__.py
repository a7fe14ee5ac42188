"""Shadow builds: a follower's new generation, built, compared and switched to."""
