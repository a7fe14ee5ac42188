"""The zip of our own code for a cluster, from a checkout and from an installed package."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from cdc.runtime import spark


@pytest.mark.parametrize("installed", [False, True])
def test_every_file_is_packed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, installed: bool
) -> None:
    root = tmp_path / "site"
    for package in ("cdc", "jobs", "sinks", "lockstep"):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text(package)
    for package in ("jobs", "sinks"):
        if installed:
            (root / package).rename(root / "lockstep" / package)
        else:
            (root / "lockstep" / package).symlink_to(root / package)
    monkeypatch.setattr(spark, "folder_of", lambda name: root.joinpath(*name.split(".")))
    many = spark.pack(tmp_path / "packed.zip")
    with zipfile.ZipFile(tmp_path / "packed.zip") as packed:
        names = packed.namelist()
    assert sorted(names) == sorted(set(names))
    assert len(names) == many
    assert {"lockstep/jobs/__init__.py", "lockstep/sinks/__init__.py"} <= set(names)
