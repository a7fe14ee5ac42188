"""The option `--sink` of pytest, which loads the suite's fixtures.

An entry point `pytest11`, so pytest imports this wherever Lockstep is installed. In runs that do
not use the option it adds nothing, because another plugin may have one of that name.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

OPTION: Final = "--sink"
_FIXTURES: Final = "lockstep.conformance.plugin"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the option, if this run uses it."""
    config: pytest.Config = pluginmanager.getplugin("pytestconfig")
    given = [*config.invocation_params.args, *os.environ.get("PYTEST_ADDOPTS", "").split()]
    group = parser.getgroup("lockstep", "conformance of a sink of Lockstep")
    is_there = any(OPTION in each.names() for each in group.options)
    if not is_there and any(str(each).startswith(OPTION) for each in given):
        text = "module:function that returns a store to test, in a folder"
        group.addoption(OPTION, dest="lockstep_sink", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, if this run uses them."""
    if config.getoption("lockstep_sink", None) and not config.pluginmanager.hasplugin(_FIXTURES):
        config.pluginmanager.import_plugin(_FIXTURES)
