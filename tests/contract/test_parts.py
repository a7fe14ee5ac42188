"""A cut that is written in parts: the public suite, on each of our stores."""

from lockstep.conformance.test_parts import *  # noqa: F403 - tests, which pytest finds here
