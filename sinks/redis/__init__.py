"""Rows and documents under keys of Redis: `sink` applies cuts, `reader` reads at a frontier."""
