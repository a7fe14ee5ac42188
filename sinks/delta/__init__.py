"""Tables mirrored in Delta Lake: `sink` applies cuts, `merge` and `vectors` are two ways to.

`layout` says what a mirror's columns are; what concerns delta-rs is in `lake`.
"""
