"""Need no sockets and never sleep."""
