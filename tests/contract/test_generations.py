"""Stores that hold several generations: the public suite, on each of our stores."""

from lockstep.conformance.test_generations import *  # noqa: F403 - tests, which pytest finds here
