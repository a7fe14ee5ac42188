"""Build the sections below `tables` from what was given, and refuse contradictions.

What only the database can show, such as whether a column exists, is left to `cdc doctor` and `cdc
setup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cdc.config.model import Mask, TableRule
from cdc.config.patterns import parse_name, parse_table_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cdc.config.layers import Given

    At = tuple[str, ...]
    Checked = Callable[[At, Given, Any, Mapping[str, Any]], Any]

# With fewer characters the key can be found by trying, and with the key every value.
MIN_HMAC_KEY = 16
_MASKS: dict[str, Any] = {"fixed": str | int | float | bool, "truncate": int, "hmac": str}


def build_rules(
    section: At, given: Mapping[At, Given], checked: Checked, problems: list[str]
) -> dict[str, TableRule]:
    """Return the rules below `section` by their table pattern, in the file's order."""
    names = dict.fromkeys(at[len(section)] for at in given if at[: len(section)] == section)
    rules = {}
    for name in names:
        at = (*section, name)
        first = next(value for each, value in given.items() if each[: len(at)] == at)
        found = [*_table(name)]
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(TableRule):
            here = (*at, field.name)
            if field.name == "mask":
                values["mask"] = _masks(here, given, checked, problems)
            elif here in given and given[here].value is not None:
                values[field.name] = checked(here, given[here], field.type, values)
        if all(value is not None for value in values.values()):
            rule = TableRule(**values)
            found += _contradictions(rule)
            rules[name] = rule
        problems.extend(f"{first.place}: {'.'.join(at)}: {each}" for each in found)
    return rules


def _table(name: str) -> Iterator[str]:
    try:
        parse_table_pattern(name)
    except ValueError:
        yield "names no table; expected schema.table or schema.*"


def _masks(
    section: At, given: Mapping[At, Given], checked: Checked, problems: list[str]
) -> dict[str, Mask]:
    masks: dict[str, Mask] = {}
    for at, value in given.items():
        if at[: len(section)] != section:
            continue
        column = at[len(section)]
        where = f"{value.place}: {'.'.join(at)}"
        if column in masks:
            problems.append(f"{where}: a column has one mask; it has another already")
        elif len(at) > len(section) + 1:
            kind: Any = at[-1]
            argument = checked(at, value, _MASKS[kind], {})
            problems.extend(f"{where}: {each}" for each in _argument(kind, argument))
            masks[column] = Mask(kind, argument)
        elif value.value in (None, "null", "keep"):
            masks[column] = Mask("keep" if value.value == "keep" else "null")
        else:
            problems.append(
                f"{where}: expected null, keep, {{fixed: value}}, {{truncate: n}} or {{hmac: key}}"
            )
    return masks


def _argument(kind: str, value: Any) -> Iterator[str]:  # noqa: ANN401 - any mask's
    if kind == "hmac" and isinstance(value, str) and len(value) < MIN_HMAC_KEY:
        yield f"a key of {len(value)} characters can be found by trying; use {MIN_HMAC_KEY} or more"
    if kind == "truncate" and isinstance(value, int) and value < 0:
        yield "a length is not negative"


def _contradictions(rule: TableRule) -> Iterator[str]:
    if rule.columns is not None and rule.exclude:
        yield "columns and exclude are two ways to say one thing; keep one of them"
    for name, given in (
        ("columns", rule.columns),
        ("where", rule.where),
        ("key", rule.key),
        ("snapshot_where", rule.snapshot_where),
    ):
        if given is not None and not given:
            yield f"{name} is empty; leave it out"
    key = rule.key or ()
    if len(set(key)) != len(key):
        yield "key names a column twice"
    for column in key:
        if rule.columns is not None and not any(
            parse_name(c).matches(column) for c in rule.columns
        ):
            yield f"key names {column}, which columns leaves out"
        if any(parse_name(each).matches(column) for each in rule.exclude):
            yield f"key names {column}, which exclude leaves out"
        masks = [mask for name, mask in rule.mask.items() if parse_name(name).matches(column)]
        if masks and masks[-1].kind not in {"keep", "hmac"}:
            yield (
                f"key names {column}, whose mask {masks[-1].kind} makes rows alike; "
                "a key column takes hmac only"
            )
