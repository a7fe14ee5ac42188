"""USING and NATURAL JOIN after other joins: by the column that those have merged, as in Postgres.

Pure: corrects a resolved query, in which sqlglot joins by the first table that has the column. The
merged column is the left side's; after a RIGHT JOIN the right side's, and after a FULL JOIN the one
of both that is not NULL. A comma begins another left side: which of its tables has the column is
not known after names are resolved, so that is refused where sqlglot has taken another's.
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from lockstep.jobs.views.refusing import UnsupportedError

# Of a join's node, in its `meta`: what it is before names are resolved.
_IS_MERGING: Final = "merges columns"
_IS_COMMA: Final = "is a comma"


def note_merging(query: exp.Query) -> None:
    """Note which joins merge columns, and which are commas, for `correct_merging`."""
    for join in query.find_all(exp.Join):
        join.meta[_IS_MERGING] = bool(join.args.get("using")) or join.method == "NATURAL"
        join.meta[_IS_COMMA] = not any(
            join.args.get(part) for part in ("on", "using", "method", "side", "kind")
        )


def correct_merging(query: exp.Query) -> None:
    """Join by merged columns; raise UnsupportedError where it is not known which these are."""
    for select in query.find_all(exp.Select):
        from_ = select.args.get("from_")
        left = {from_.this.alias_or_name} if from_ else set[str]()
        merged = dict[str, exp.Expr]()
        for join in select.args.get("joins") or ():
            if join.meta.get(_IS_COMMA):
                left.clear()
                merged.clear()
            if join.meta.get(_IS_MERGING) and join.args.get("on"):
                for equal in _equalities(join.args["on"]):
                    _correct(equal, join, left, merged)
            left.add(join.alias_or_name)


def _equalities(on: exp.Expr) -> list[exp.EQ]:
    every = on.flatten() if isinstance(on, exp.And) else [on]
    return [each for each in every if isinstance(each, exp.EQ)]


def _correct(equal: exp.EQ, join: exp.Join, left: set[str], merged: dict[str, exp.Expr]) -> None:
    """Join by the merged column of a name, and note the one that this join makes of it."""
    name = equal.expression.name
    if any(each.table not in left for each in equal.this.find_all(exp.Column)):
        raise UnsupportedError(
            f"USING ({name}) after a comma, with another table that has {name}",
            "write ON with the tables' aliases",
        )
    one, other = merged.get(name, equal.this), equal.expression
    equal.set("this", one.copy())
    if join.side == "RIGHT":
        merged[name] = other.copy()
    elif join.side == "FULL":
        merged[name] = exp.Coalesce(this=one.copy(), expressions=[other.copy()])
    else:
        merged[name] = one.copy()
