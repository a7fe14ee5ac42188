"""Rules for texts.

Pure. Only what has one answer in every collation: texts are compared, cut and joined by their
characters. Lower and upper case have one in the collation "C" alone, where they are ASCII's.
"""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase
from typing import Final

from sqlglot import exp

from lockstep.jobs.views.refusing import UnsupportedError, written
from lockstep.jobs.views.types import BOOL, INT4, INTEGERS, TEXT
from lockstep.jobs.views.values import (
    Rules,
    Value,
    coerced,
    expect_text,
    number_in,
    string,
    table_of,
)

_TRIMMED: Final = {"": "BOTH", "BOTH": "BOTH", "LEADING": "LEADING", "TRAILING": "TRAILING"}


def _text(rules: Rules, node: exp.Expr, what: str) -> str:
    found = rules.value(node)
    expect_text(found.type, what)
    return coerced(found, TEXT)


def _integer(node: exp.Expr | None, what: str) -> int:
    found = number_in(node)
    if found is None or abs(found) >= 1 << 31:
        raise UnsupportedError(f"{what} with other than a number", "write a number")
    return found


def _concatenated(rules: Rules, node: exp.DPipe) -> Value:
    given = (_text(rules, each, "||") for each in (node.this, node.expression))
    return Value(f"({' || '.join(given)})", TEXT)


def _concat(rules: Rules, node: exp.Concat | exp.ConcatWs) -> Value:
    """Return texts in one, without those that are NULL."""
    what, given = written(node), list(node.expressions)
    separator = "''"
    if isinstance(node, exp.ConcatWs):
        separator = _text(rules, given.pop(0), what)
    made = []
    for each in given:
        found = rules.value(each)
        if found.type.name not in INTEGERS:
            expect_text(found.type, what)
        made.append(coerced(found, TEXT))
    return Value(f"concat_ws({', '.join([separator, *made])})", TEXT)


def _length(rules: Rules, node: exp.Length) -> Value:
    return Value(f"length({_text(rules, node.this, 'length()')})", INT4)


def _reverse(rules: Rules, node: exp.Reverse) -> Value:
    return Value(f"reverse({_text(rules, node.this, 'reverse()')})", TEXT)


def _repeat(rules: Rules, node: exp.Repeat) -> Value:
    times = _integer(node.args["times"], "repeat()")
    return Value(f"repeat({_text(rules, node.this, 'repeat()')}, {max(times, 0)})", TEXT)


def _trim(rules: Rules, node: exp.Trim) -> Value:
    found = _text(rules, node.this, "trim()")
    side = _TRIMMED[(node.args.get("position") or "").upper()]
    characters = node.args.get("expression")
    if side == "BOTH" and characters is None:
        return Value(f"trim({found})", TEXT)
    given = "' '" if characters is None else _text(rules, characters, "trim()")
    return Value(f"trim({side} {given} FROM {found})", TEXT)


def _replace(rules: Rules, node: exp.Replace) -> Value:
    given = [_text(rules, node.args[p], "replace()") for p in ("this", "expression", "replacement")]
    return Value(f"replace({', '.join(given)})", TEXT)


def _translate(rules: Rules, node: exp.Translate) -> Value:
    given = [_text(rules, node.args[part], "translate()") for part in ("this", "from_", "to")]
    return Value(f"translate({', '.join(given)})", TEXT)


def _position(rules: Rules, node: exp.StrPosition) -> Value:
    given = [_text(rules, node.args[part], "strpos()") for part in ("this", "substr")]
    return Value(f"instr({', '.join(given)})", INT4)


def _starts(rules: Rules, node: exp.StartsWith) -> Value:
    given = [_text(rules, each, "starts_with()") for each in (node.this, node.expression)]
    return Value(f"startswith({', '.join(given)})", BOOL)


def _split(rules: Rules, node: exp.SplitPart) -> Value:
    given = [_text(rules, node.args[part], "split_part()") for part in ("this", "delimiter")]
    place = _integer(node.args["part_index"], "split_part()")
    if place == 0:
        raise UnsupportedError("split_part() with the place 0", "count from 1, or from -1 back")
    return Value(f"split_part({', '.join(given)}, {place})", TEXT)


def _padded(rules: Rules, node: exp.Pad) -> Value:
    what = "lpad" if node.args.get("is_left") else "rpad"
    fill = node.args.get("fill_pattern")
    given = [_text(rules, node.this, f"{what}()"), str(_integer(node.expression, f"{what}()"))]
    given.append("' '" if fill is None else _text(rules, fill, f"{what}()"))
    return Value(f"{what}({', '.join(given)})", TEXT)


def _substring(rules: Rules, node: exp.Substring) -> Value:
    start, length = node.args.get("start"), node.args.get("length")
    if isinstance(start, exp.Literal) and start.is_string:
        raise UnsupportedError(
            "substring() of a regular expression, whose dialects differ",
            "write substring(… FROM n FOR n), split_part() or strpos()",
        )
    found = _text(rules, node.this, "substring()")
    first = 1 if start is None else _integer(start, "substring()")
    if length is None:
        return Value(f"substring({found}, {max(first, 1)})", TEXT)
    most = _integer(length, "substring()")
    if most < 0:
        raise UnsupportedError("substring() with a negative length", "write 0 or more")
    # Places before the first are counted, and empty.
    most = max(most + min(first, 1) - 1, 0)
    return Value(f"substring({found}, {max(first, 1)}, {most})", TEXT)


def _side(rules: Rules, node: exp.Left | exp.Right) -> Value:
    what = f"{node.key}()"
    found, length = _text(rules, node.this, what), _integer(node.expression, what)
    if length >= 0:
        return Value(f"{node.key}({found}, {length})", TEXT)
    if isinstance(node, exp.Right):
        return Value(f"substring({found}, {1 - length})", TEXT)
    return Value(f"reverse(substring(reverse({found}), {1 - length}))", TEXT)


def _collate(rules: Rules, node: exp.Collate) -> Value:
    found = rules.value(node.this)
    if not found.type.is_nondeterministic:
        expect_text(found.type, "COLLATE")
    if node.expression.name != "C":
        raise UnsupportedError(f"COLLATE {node.expression.name}", 'write COLLATE "C"')
    return found._replace(type=found.type.as_bytes)


def _cased(rules: Rules, node: exp.Lower | exp.Upper) -> Value:
    found = rules.value(node.this)
    expect_text(found.type, f"{node.key}()")
    # A column's own collation may order by bytes, and change other letters than those of ASCII.
    if found.type.is_c is not True:
        raise UnsupportedError(
            f"{node.key}(), which depends on the collation",
            f'write {node.key}(… COLLATE "C"), which changes the letters of ASCII',
        )
    letters = [ascii_uppercase, ascii_lowercase]
    old, new = letters if isinstance(node, exp.Lower) else letters[::-1]
    return Value(f"translate({coerced(found, TEXT)}, {string(old)}, {string(new)})", found.type)


RULES: Final = table_of(
    ("this expression", _concatenated, [exp.DPipe]),
    ("expressions coalesce", _concat, [exp.Concat, exp.ConcatWs]),
    ("this", _length, [exp.Length]),
    ("this", _reverse, [exp.Reverse]),
    ("this times", _repeat, [exp.Repeat]),
    ("this expression position", _trim, [exp.Trim]),
    ("this expression replacement", _replace, [exp.Replace]),
    ("this from_ to", _translate, [exp.Translate]),
    ("this substr", _position, [exp.StrPosition]),
    ("this expression", _starts, [exp.StartsWith]),
    ("this delimiter part_index", _split, [exp.SplitPart]),
    ("this expression fill_pattern is_left", _padded, [exp.Pad]),
    ("this start length", _substring, [exp.Substring]),
    ("this expression", _side, [exp.Left, exp.Right]),
    ("this expression", _collate, [exp.Collate]),
    ("this", _cased, [exp.Lower, exp.Upper]),
)
