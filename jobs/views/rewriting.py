"""Parsed SQL in the forms that rules know: windows without names, IN for = ANY of an array.

Pure: replaces them in a query, whose answer is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlglot import exp

from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def rewrite(query: exp.Query) -> None:
    """Replace names of windows by what they name, and lists in arrays by lists."""
    for select in list(query.find_all(exp.Select)):
        _name_no_window(select)
    for comparison in list(query.find_all(exp.EQ, exp.NEQ)):
        _list_elements(comparison)


def _name_no_window(select: exp.Select) -> None:
    known = dict[str, exp.Window]()
    for named in select.args.get("windows") or ():
        _copy(named, known)
        known[_name(named.this)] = named
    for window in select.find_all(exp.Window):
        if window.parent_select is select and window not in known.values():
            _copy(window, known)
    select.set("windows", None)


def _copy(window: exp.Window, known: Mapping[str, exp.Window]) -> None:
    """Give a window the parts of the one that it names; its own order and frame come first."""
    name = window.args.get("alias")
    if name is None:
        return
    base = known.get(_name(name))
    if base is None:
        raise ConfigError(
            f"there is no window {name.name} here", hint="name it in WINDOW, before its use"
        )
    window.set("alias", None)
    window.set("partition_by", [each.copy() for each in base.args.get("partition_by") or ()])
    for part in ("order", "spec"):
        found = window.args.get(part) or base.args.get(part)
        window.set(part, found and found.copy())


def _name(node: exp.Expr) -> str:
    """Return a name as Postgres reads it: in lower case, unless it is quoted."""
    return node.name if node.args.get("quoted") else node.name.lower()


def _list_elements(comparison: exp.Expr) -> None:
    """Replace `= ANY (ARRAY[…])` by IN, and `<> ALL (ARRAY[…])` by NOT IN."""
    right = comparison.expression
    if isinstance(comparison, exp.EQ) and isinstance(right, exp.Any):
        array, is_in = right.this, True
    elif isinstance(comparison, exp.NEQ) and _is_all(right):
        array, is_in = right.expressions[0], False
    else:
        return
    array = array.unnest()
    if not isinstance(array, exp.Array) or not array.expressions or array.find(exp.Query):
        return
    made: exp.Expr = exp.In(
        this=comparison.this.copy(), expressions=[each.copy() for each in array.expressions]
    )
    comparison.replace(exp.Paren(this=made if is_in else exp.Not(this=made)))


def _is_all(node: exp.Expr) -> bool:
    is_all = isinstance(node, exp.Anonymous) and node.name.lower() == "all"
    return is_all and len(node.expressions) == 1
