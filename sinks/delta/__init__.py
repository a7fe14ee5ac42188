"""Tables mirrored in Delta Lake: `sink` applies cuts, by `merge` or by `vectors`.

`layout` defines a mirror's columns; access by delta-rs is in `lake`.
"""
