"""Each extra is identified by the modules that it brings, and by the pip line that installs it."""

from __future__ import annotations

import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cdc.runtime import extras
from cdc.runtime.extras import MissingExtraError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def test_every_extra_is_known() -> None:
    # `dev` is for a checkout.
    assert set(extras.MODULES) == set(EXTRAS) - {"dev"}


@pytest.mark.parametrize("extra", sorted(set(extras.MODULES) - {"java"}))
def test_an_extra_brings_the_modules_that_are_looked_for(extra: str) -> None:
    named = {Requirement(each).name.replace("-", "_").lower() for each in EXTRAS[extra]}
    owners = packages_distributions()
    for module in extras.MODULES[extra]:
        assert {each.replace("-", "_").lower() for each in owners[module]} & named, module


def test_one_pip_line_names_every_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name != "redis" else object())
    extras.require("a cache", "redis")
    with pytest.raises(MissingExtraError) as caught:
        extras.require("cdc follow", "migrations", "redis", "opensearch")
    assert (
        caught.value.what
        == "cdc follow needs alembic, sqlalchemy, opensearchpy, which are not installed"
    )
    assert caught.value.hint == "pip install 'lockstep-cdc[migrations,opensearch]'"


def test_an_extra_is_installed_with_all_of_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.is_installed("console")
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert not extras.is_installed("console")


def test_an_import_that_no_extra_brings_is_a_bug() -> None:
    assert extras.missing(ModuleNotFoundError("x", name="nosuch.part")) is None
    found = extras.missing(ModuleNotFoundError("x", name="pyspark.sql"))
    assert found is not None
    assert "pyspark" in found.what
    assert found.hint == "pip install 'lockstep-cdc[spark]'"
