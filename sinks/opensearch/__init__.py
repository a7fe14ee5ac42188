"""Rows and documents in indices of OpenSearch: `sink` applies cuts, `reader` reads at one."""
