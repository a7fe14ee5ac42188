"""Tables mirrored in Delta Lake: `sink` commits cuts, `appliers` chooses how each is applied.

`layout` defines a mirror's columns; access by delta-rs is in `lake`.
"""
