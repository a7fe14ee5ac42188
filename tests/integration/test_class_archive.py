"""JVMs map the archive of their classes, and start without one, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import SparkContext

from cdc.playground.servers.stack import LocalStack
from cdc.runtime import class_archive
from cdc.runtime import spark as files
from cdc.runtime.java import Java, find_java
from cdc.runtime.progress import Progress
from tests.fixtures.spark import need_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _mapped(pid: int) -> set[str]:
    """Return the names of the archives that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").split()
    return {Path(each).name for each in maps if each.endswith(".jsa")}


@pytest.mark.parametrize("server", ["kafka", "opensearch"])
def test_a_server_maps_the_archive_that_its_first_start_has_made(
    tmp_path: Path, server: str
) -> None:
    stack = LocalStack(tmp_path / "home", tied=True)
    try:
        stack.up([server])
        assert any(each.startswith(f"{server}-") for each in _mapped(stack[server].pid))
    finally:
        stack.down()


def test_a_session_maps_the_archive_of_sparks_classes(spark: SparkSession) -> None:
    assert spark.range(2).count() == len("ab")
    archive, gateway = files.classes(), SparkContext._gateway
    assert archive is not None
    assert archive.name in _mapped(gateway.proc.pid)  # type: ignore[union-attr]


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_jvm_that_finds_no_archive_of_its_own_starts_without(
    tmp_path: Path, content: bytes | None
) -> None:
    need_java()
    archive = tmp_path / "some.jsa"
    if content is not None:
        archive.write_bytes(content)
    flags = class_archive.using(archive)
    assert bool(flags) == bool(content)
    started = subprocess.run(
        [find_java().program, *flags, "-version"], capture_output=True, text=True, check=True
    )
    assert started.stdout == ""
    assert "[cds]" not in started.stderr


def test_an_archive_that_cannot_be_made_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, older = tmp_path / "share" / "spark-1.jsa", tmp_path / "share" / "spark-0.jsa"
    older.parent.mkdir()
    older.touch()
    monkeypatch.setattr(files, "classes", lambda: archive)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    files.make_classes(Progress())
    assert (archive.stat().st_size, older.exists()) == (0, False)
    monkeypatch.setattr(sys, "executable", "/none")
    files.make_classes(Progress())


def test_each_java_and_class_path_has_its_own_archive(tmp_path: Path) -> None:
    programs = [tmp_path / name / "bin" / "java" for name in ("one", "other")]
    for program in programs:
        program.parent.mkdir(parents=True)
        program.touch()
    one, other = (Java(program, 17) for program in programs)
    names = {class_archive.file_name("kafka", each, jars) for each in (one, other) for jars in "ab"}
    (tmp_path / "one" / "release").write_text('JAVA_VERSION="17.0.15"\n', encoding="utf-8")
    names.add(class_archive.file_name("kafka", one, "a"))
    (tmp_path / "one" / "release").write_text('JAVA_VERSION="17.0.16"\n', encoding="utf-8")
    names.add(class_archive.file_name("kafka", one, "a"))
    assert len(names) == len({one, other}) * len("ab") + 2
