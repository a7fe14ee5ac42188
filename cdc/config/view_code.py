"""Read views that are declared in Python, in files of the folder `view_files`: `views/sessions.py`.

The function has the file's name, and its decorator, `@lockstep.view` or `@lockstep.transform`, the
view's fields. They must be literals, because the code is parsed here and not run: only a follower
that holds the view runs it. A file without such a function declares nothing.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec

from cdc.config.view_files import ViewFileError, text_of
from cdc.config.views import PythonView

if TYPE_CHECKING:
    from pathlib import Path

_VIEW, _TRANSFORM = "view", "transform"
_FACADE: Final = "lockstep"


class Declaration(NamedTuple):
    """A view in Python, and where its decorator is."""

    view: PythonView
    origin: str  # `views/sessions.py:7`


class _Given(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A decorator's arguments."""

    reads: dict[str, str] | str
    key: tuple[str, ...]
    columns: dict[str, str]
    by: tuple[str, ...] = ()
    refresh: Literal["auto", "strict"] = "auto"
    freshness_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


def read(file: Path) -> Declaration | None:
    """Return what a file declares, if anything; raise ViewFileError, whose text is a finding."""
    source = text_of(file)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ViewFileError(f"{file}:{line}: not Python: {error.args[0]}") from error
    found = [
        (node, decorator)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if _kind(decorator)
    ]
    if not found:
        return None
    (node, decorator), *more = found
    origin = f"{file}:{decorator.lineno}"
    if more or node.name != file.stem:
        raise ViewFileError(
            f"{origin}: views.{file.stem}: a file has one view, whose function has the file's name"
        )
    return Declaration(_declared(node, decorator, source, f"{origin}: views.{node.name}"), origin)


def _kind(node: ast.expr) -> str | None:
    """Return which decorator of ours it is, called or not."""
    name = node.func if isinstance(node, ast.Call) else node
    if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name):
        is_ours = name.value.id == _FACADE and name.attr in {_VIEW, _TRANSFORM}
        return name.attr if is_ours else None
    return None


def _declared(node: ast.FunctionDef, decorator: ast.expr, source: str, where: str) -> PythonView:
    try:
        given = msgspec.convert(_literals(decorator, where), _Given)
    except msgspec.ValidationError as error:
        raise ViewFileError(f"{where}: {error}") from error
    if not given.key or not given.columns or not given.reads:
        raise ViewFileError(f"{where}: key, columns and reads are not empty")
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    is_transform = _kind(decorator) == _TRANSFORM
    if is_transform != isinstance(given.reads, str):
        what = "a text, one table" if is_transform else "names with a table or SELECT each"
        raise ViewFileError(f"{where}: reads is {what}")
    if isinstance(given.reads, str):
        if len(names) != 1:
            raise ViewFileError(f"{where}: a transform has one parameter, its rows")
        reads = {names[0]: given.reads}
    else:
        reads = given.reads
    others = (arguments.vararg, arguments.kwarg, *arguments.kwonlyargs)
    if any(others) or sorted(names) != sorted(reads):
        raise ViewFileError(
            f"{where}: its parameters are {', '.join(names)}; expected those of reads,"
            f" {', '.join(reads)}"
        )
    return PythonView(
        sql="",
        key=given.key,
        refresh=given.refresh,
        freshness_seconds=given.freshness_seconds,
        source=source,
        is_transform=is_transform,
        reads=reads,
        by=given.by,
        columns=given.columns,
    )


def _literals(decorator: ast.expr, where: str) -> dict[str, Any]:
    """Return the decorator's arguments, by name."""
    if not isinstance(decorator, ast.Call) or decorator.args:
        raise ViewFileError(f"{where}: its arguments are given by name: key, reads, columns")
    found = {}
    for each in decorator.keywords:
        try:
            found[each.arg or "**"] = ast.literal_eval(each.value)
        except ValueError as error:
            raise ViewFileError(
                f"{where}: {each.arg or '**'} is no literal; the configuration is read without"
                " running code"
            ) from error
    return found
