"""Load the fixture plugins: every module in tests/fixtures is one, named after its subject."""

from pathlib import Path

import pytest

_FIXTURES = Path(__file__).parent / "fixtures"

pytest_plugins = [f"tests.fixtures.{path.stem}" for path in sorted(_FIXTURES.glob("[a-z]*.py"))]

# Before any is imported, because one may import another.
pytest.register_assert_rewrite(*pytest_plugins)
