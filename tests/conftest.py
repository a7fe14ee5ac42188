"""Load the fixture plugins: every module in tests/fixtures is one, named after its subject."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

_FIXTURES = Path(__file__).parent / "fixtures"

pytest_plugins = [f"tests.fixtures.{path.stem}" for path in sorted(_FIXTURES.glob("[a-z]*.py"))]

# Before any is imported, because one may import another.
# The package itself is imported already, by its entry point.
_REWRITTEN = ("memory", "plugin", "store", "test_contract", "test_generations", "test_parts")
pytest.register_assert_rewrite(
    *pytest_plugins, *(f"lockstep.conformance.{name}" for name in _REWRITTEN)
)


@pytest.fixture(autouse=True)
def _logging_stays_on() -> Iterator[None]:
    """Fail a test that turns logging off for all tests after it, in any order."""
    yield
    level = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    assert level == logging.NOTSET, "this test leaves logging disabled"
