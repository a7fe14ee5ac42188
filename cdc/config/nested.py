"""Read and build a section of structs within structs, as deep as their types go: `followers`.

Only the types define which names and values are allowed. Every section that is written is noted as
given, with no value: otherwise one whose fields all have defaults would leave no trace.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Final, Union, get_args, get_origin

import msgspec

from cdc.config.followers import Follower

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cdc.config.layers import Given

    At = tuple[str, ...]
    Checked = Callable[[At, Given, Any, Mapping[str, Any]], Any]

SECTION: Final = "followers"
# The maximum depth of a value whose form the store defines, such as a mapping.
FREE_DEPTH: Final = 20


def plain(kind: Any) -> Any:  # noqa: ANN401 - a type as a value
    """Return a type without its annotations, and without None where it is optional."""
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    if get_origin(kind) in (Union, types.UnionType):
        left = [each for each in get_args(kind) if each is not types.NoneType]
        return plain(left[0]) if len(left) == 1 else kind
    return kind


def kind_at(at: At) -> Any:  # noqa: ANN401 - a type as a value
    """Return the plain type at a path below `followers`; None where no value may be there."""
    kind: Any = dict[str, Follower] if at[:1] == (SECTION,) else None
    for name in at[1:]:
        if is_struct(kind):
            kind = next((f.type for f in msgspec.structs.fields(kind) if f.name == name), None)
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else None
        kind = plain(kind)
    return kind


def is_struct(kind: Any) -> bool:  # noqa: ANN401 - a type as a value
    """Return whether a type has fields of its own."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def is_section(kind: Any) -> bool:  # noqa: ANN401 - a type as a value
    """Return whether a value of this type has names below it."""
    return is_struct(kind) or get_origin(kind) is dict


def names_of(kind: Any) -> frozenset[str] | None:  # noqa: ANN401 - a type as a value
    """Return the names that a section may have; None where any may be given."""
    if is_struct(kind):
        return frozenset(field.name for field in msgspec.structs.fields(kind))
    return None


def is_json(value: object) -> bool:
    """Return whether JSON can represent the value; YAML has more types, such as dates."""
    if isinstance(value, dict):
        return all(map(is_json, value.values()))
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int | float | bool)


def build(
    kind: Any,  # noqa: ANN401 - a type as a value
    at: At,
    given: Mapping[At, Given],
    checked: Checked,
    missing: Callable[[At, Any], None],
) -> Any:  # noqa: ANN401 - of that type, or None after a problem
    """Return the section at `at`; `checked` and `missing` report what is wrong below it."""
    kind = plain(kind)
    if not is_struct(kind):
        below = {each[-1]: each for each in given if each[:-1] == at}
        entry = get_args(kind)[1]
        if is_section(plain(entry)):
            return {n: build(entry, here, given, checked, missing) for n, here in below.items()}
        return {name: checked(here, given[here], entry, {}) for name, here in below.items()}
    values: dict[str, Any] = {}
    whole = True
    for field in msgspec.structs.fields(kind):
        here = (*at, field.name)
        if here in given and is_section(plain(field.type)):
            values[field.name] = build(field.type, here, given, checked, missing)
            whole = whole and values[field.name] is not None
        elif here in given and (given[here].value is not None or field.required):
            values[field.name] = checked(here, given[here], field.type, values)
            whole = whole and values[field.name] is not None
        elif field.required:
            missing(here, field.type)
            whole = False
    return kind(**values) if whole else None
