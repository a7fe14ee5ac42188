"""Which Java is chosen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cdc.errors import LocalStackError
from cdc.runtime import java


def runtime(folder: Path, version: str, *, release_file: bool = True) -> Path:
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n", encoding="utf-8")
    program.chmod(0o755)
    if release_file:
        (folder / "release").write_text(f'JAVA_VERSION="{version}"\n', encoding="utf-8")
    return program


@pytest.fixture(autouse=True)
def _nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java, "from_pip", lambda: None)


@pytest.mark.parametrize("release_file", [True, False])
def test_java_home_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, release_file: bool
) -> None:
    runtime(tmp_path, "21.0.8")
    chosen = runtime(tmp_path / "chosen", "17.0.15", release_file=release_file)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "chosen"))
    assert java.find_java() == java.Java(chosen, 17)


def test_an_old_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime(tmp_path / "old", "1.8.0_402")
    newer = runtime(tmp_path, "21.0.8")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    assert java.find_java() == java.Java(newer, 21)


def test_no_java_is_an_error_that_shows_what_to_do() -> None:
    with pytest.raises(LocalStackError, match="no Java 17 or newer") as caught:
        java.find_java()
    assert "make setup" in caught.value.hint


def test_sparks_java_passes_on_everything_but_the_module_that_pips_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = runtime(tmp_path / "pip's own", "21.0.8")
    program.write_text('#!/bin/sh\nfor each do echo "$each"; done\n', encoding="utf-8")
    monkeypatch.setattr(java, "from_pip", lambda: java.Java(program, 21, trimmed=True))
    asked = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "-Dx='$y'", "", "Main"]
    shim = java.spark_home(tmp_path / "home") / "bin" / "java"
    reported = subprocess.run([shim, *asked], capture_output=True, text=True, check=True).stdout
    assert reported.split("\n")[:-1] == [each for each in asked if not each.startswith("--add")]
