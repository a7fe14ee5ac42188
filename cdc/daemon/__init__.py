"""The daemon: its process, and the loop that carries changes into the log. See `pipeline`."""
