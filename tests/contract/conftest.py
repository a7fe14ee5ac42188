"""`store` is each store in turn: those with a plugin tests/fixtures/store_<name>.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from lockstep.sinks.contract import Sink
from tests.contract.under_test import StoreUnderTest

_FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = sorted(path.stem.removeprefix("store_") for path in _FIXTURES.glob("store_*.py"))


@pytest.fixture(params=NAMES)
def store(request: pytest.FixtureRequest) -> StoreUnderTest:
    """Return an empty store."""
    return cast("StoreUnderTest", request.getfixturevalue(f"{request.param}_store"))


@pytest.fixture
def sink(store: StoreUnderTest) -> Iterator[Sink]:
    """Open a sink on it."""
    made = store.sink()
    assert made.open() is None
    yield made
    made.close()
