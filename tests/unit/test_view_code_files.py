"""A view in Python is read from its file without running it, and checked with its line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cdc.config import load, read, show
from cdc.config.views import PythonView
from tests.unit.test_view_files import CONFIG

if TYPE_CHECKING:
    from pathlib import Path

VIEW = """\
import lockstep

raise AssertionError("it is only parsed")


@lockstep.view(
    reads={"a": "orders", "b": "SELECT id FROM lines"}, by=["id"], key=["id"],
    columns={"id": "int4"}, refresh="strict",
)
def ids(b, a):
    return a
"""
TRANSFORM = """\
import lockstep
@lockstep.transform(reads="orders", key=("id",), columns={"id": "int4"})
def ids(rows): ...
"""


def _written(folder: Path, text: str, name: str = "ids") -> Path:
    (folder / "sql/views").mkdir(parents=True, exist_ok=True)
    file = folder / f"sql/views/{name}.py"
    file.write_text(text)
    return file


def _refusal(folder: Path, text: str, name: str = "ids") -> str:
    _written(folder, text, name)
    return _refused(folder)


def _refused(folder: Path) -> str:
    (folder / "lockstep.yaml").write_text(CONFIG)
    with pytest.raises(Exception, match="the configuration") as caught:
        load(folder / "lockstep.yaml", {})
    return str(caught.value)


def test_a_decorator_declares_what_the_configuration_has(tmp_path: Path) -> None:
    file = _written(tmp_path, VIEW)
    (tmp_path / "lockstep.yaml").write_text(CONFIG)
    effective = read(tmp_path / "lockstep.yaml", {})
    assert dict(effective.config.views) == {
        "ids": PythonView(
            sql="",
            key=("id",),
            refresh="strict",
            source=VIEW,
            is_transform=False,
            reads={"a": "orders", "b": "SELECT id FROM lines"},
            by=("id",),
            columns={"id": "int4"},
        )
    }
    assert effective.origins["views", "ids", "sql"] == f"{file}:6"
    shown = {path: origin for path, _, origin in show(effective) if path.startswith("views.")}
    assert shown == dict.fromkeys(
        ["views.ids.sql", "views.ids.key", "views.ids.refresh"], f"{file}:6"
    )


def test_a_transform_reads_one_table_by_its_only_parameter(tmp_path: Path) -> None:
    _written(tmp_path, TRANSFORM)
    (tmp_path / "lockstep.yaml").write_text(CONFIG)
    (found,) = load(tmp_path / "lockstep.yaml", {}).views.values()
    assert isinstance(found, PythonView)
    assert (found.is_transform, found.reads, found.by) == (True, {"rows": "orders"}, ())


def test_files_that_declare_nothing_may_be_in_the_folder(tmp_path: Path) -> None:
    _written(tmp_path, "def ids(): ...\n", "test_ids")
    assert _names(tmp_path) == []


def _names(folder: Path) -> list[str]:
    (folder / "lockstep.yaml").write_text(CONFIG)
    return list(load(folder / "lockstep.yaml", {}).views)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def ids", "def other", "ids.py:6: views.ids: a file has one view"),
        ('key=["id"]', "key=KEY", "ids.py:6: views.ids: key is no literal"),
        ('key=["id"]', "key=[]", "ids.py:6: views.ids: key, columns and reads are not empty"),
        (' key=["id"],', "", "views.ids: Object missing required field `key`"),
        ('key=["id"]', "key=[1]", "views.ids: Expected `str`, got `int` - at `$.key[0]`"),
        ('key=["id"]', 'key=["id"], kye=1', "views.ids: Object contains unknown field `kye`"),
        (
            'refresh="strict"',
            'refresh="often"',
            "views.ids: Invalid enum value 'often' - at `$.refresh`",
        ),
        ('refresh="strict"', "freshness_seconds=0", "Expected `float` > 0.0 - at `$.freshness_se"),
        ("ids(b, a)", "ids(b)", "its parameters are b; expected those of reads, a, b"),
        ("ids(b, a)", "ids(b, *a)", "its parameters are b; expected those of reads, a, b"),
        ("lockstep.view", "lockstep.transform", "reads is a text, one table"),
        ("return a", "return (", "ids.py:11: not Python: '(' was never closed"),
        ("(\n    reads", "({}, reads", "its arguments are given by name"),
    ],
)
def test_what_is_wrong_in_a_file_is_reported_with_its_line(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in VIEW
    assert says in _refusal(tmp_path, VIEW.replace(old, new))


def test_a_transform_has_one_parameter_and_one_table(tmp_path: Path) -> None:
    two = TRANSFORM.replace("rows)", "rows, more)")
    assert "a transform has one parameter" in _refusal(tmp_path, two)
    as_view = TRANSFORM.replace("transform", "view")
    assert "reads is names with a table or SELECT each" in _refusal(tmp_path, as_view)


def test_two_views_in_a_file_and_a_view_that_is_declared_twice_are_refused(tmp_path: Path) -> None:
    assert "a file has one view" in _refusal(tmp_path, VIEW + VIEW.replace("def ids", "def more"))
    _written(tmp_path, VIEW)
    (tmp_path / "sql/views/ids.sql").write_text("-- key: id\nSELECT id FROM orders")
    what = _refused(tmp_path)
    assert "ids.sql:1: views.ids: given twice; it is in" in what
    assert "ids.py:6, too" in what


def test_a_follower_that_names_no_view_is_refused_with_those_in_python(tmp_path: Path) -> None:
    more = "followers:\n  lake: {delta: {path: /a}}\n  v: {mirror: lake, views: [x], sql: {url: 'sqlite:///a'}}\n"
    _written(tmp_path, VIEW)
    (tmp_path / "lockstep.yaml").write_text(CONFIG + more)
    with pytest.raises(Exception, match=r"there is no view x; the views are \['ids'\]"):
        load(tmp_path / "lockstep.yaml", {})
