"""What every sink guarantees: the public suite, on each of our stores."""

from lockstep.conformance.test_contract import *  # noqa: F403 - tests, which pytest finds here
