"""The suite's fixtures: loaded by the option `--sink`, which names the store to test.

With `-p lockstep.conformance.plugin` also where Lockstep is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import cast

import pytest

from lockstep.conformance.option import pytest_addoption
from lockstep.conformance.store import StoreUnderTest
from lockstep.sinks.contract import Generations, Sink

__all__ = ["pytest_addoption", "several", "sink", "store"]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreUnderTest:
    """Return an empty store."""
    module, _, name = str(request.config.getoption("lockstep_sink", "")).partition(":")
    if not name:
        raise pytest.UsageError("name the store to test: --sink=module:function")
    return cast("StoreUnderTest", getattr(import_module(module), name)(tmp_path))


@pytest.fixture
def sink(store: StoreUnderTest) -> Iterator[Sink]:
    """Open a sink on it."""
    made = store.sink()
    assert made.open() is None
    yield made
    made.close()


@pytest.fixture
def several(sink: Sink) -> Generations:
    """Return the sink, if its store can hold several generations."""
    if not isinstance(sink, Generations):
        pytest.skip("this store has one generation")
    return sink
