"""`store` is each store in turn: those with a plugin tests/fixtures/store_<name>.py."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from lockstep.conformance.plugin import several, sink
from lockstep.conformance.store import StoreUnderTest

__all__ = ["several", "sink"]

_FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = sorted(path.stem.removeprefix("store_") for path in _FIXTURES.glob("store_*.py"))


@pytest.fixture(params=NAMES)
def store(request: pytest.FixtureRequest) -> StoreUnderTest:
    """Return an empty store."""
    return cast("StoreUnderTest", request.getfixturevalue(f"{request.param}_store"))
