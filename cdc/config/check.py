"""Check the layers against the model and against what Postgres and Kafka accept.

`read` returns a configuration that needs no further checks, or raises one `ConfigError` that lists
every finding: the place, the field, what was given (never a secret) and what is expected.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import inspect

from cdc.config import nested, stores
from cdc.config.followers import Follower
from cdc.config.layers import Broken, Given, known_paths, read_layers, variable_of
from cdc.config.meaning import complaints
from cdc.config.model import Config
from cdc.config.rules import build_rules
from cdc.config.show import is_secret
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Effective(NamedTuple):
    """A checked configuration, its file, and where each value that is not a default was given."""

    config: Config
    path: Path
    origins: dict[tuple[str, ...], str]


def load(path: str | Path, env: Mapping[str, str] | None = None) -> Config:
    """Return the configuration in `path` under `env`; raise ConfigError with every finding."""
    return read(path, env).config


def read(path: str | Path, env: Mapping[str, str] | None = None) -> Effective:
    """Return the configuration in `path` under `env`, and where its values come from."""
    path = Path(path)
    try:
        layers = read_layers(path, os.environ if env is None else env)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}",
            hint="`cdc init` writes one; --config or LOCKSTEP_CONFIG names another place",
        ) from error
    _make_absolute(layers.given, path)
    problems = list(layers.problems)
    config: Config | None = _build(Config, (), layers.given, path, problems)
    if config is not None:
        problems += [f"{path}: {each}" for each in _together(config)]
        for at, what in stores.together(config):
            problems.append(f"{_place(layers.given, at, path)}: {'.'.join(at)}: {what}")
    if problems:
        count = "one error" if len(problems) == 1 else f"{len(problems)} errors"
        raise ConfigError(
            f"the configuration {path} has {count}:\n" + "\n".join(f"  {p}" for p in problems),
            hint="correct it, then `cdc config check`; docs/CONFIG.md lists every field",
        )
    assert config is not None
    origins = {at: given.place for at, given in layers.given.items()}
    return Effective(config, path, origins)


def _together(config: Config) -> Iterator[str]:
    """Yield contradictions between sections."""
    direct = [name for name, rule in config.tables.items() if rule.snapshot == "direct"]
    if direct and config.delta.path is None:
        yield f"delta.path: missing; tables.{direct[0]}.snapshot: direct needs it"


# --- types ---


def _build(
    struct: type[msgspec.Struct],
    at: tuple[str, ...],
    given: Mapping[tuple[str, ...], Given],
    path: Path,
    problems: list[str],
) -> Any:  # noqa: ANN401 - an instance of `struct`, or None after a problem
    """Return `struct` filled from what is given below `at`; None where a problem was found."""
    known = known_paths()
    values: dict[str, Any] = {}
    before = len(problems)
    for field in msgspec.structs.fields(struct):
        here = (*at, field.encode_name)
        if here in known.sections:
            values[field.name] = _build(field.type, here, given, path, problems)
        elif here in known.named:
            checked = partial(_checked, problems=problems)
            values[field.name] = build_rules(here, given, checked, problems)
        elif here in known.deep:
            values[field.name] = _followers(given, path, problems)
        elif here in known.open:
            below = {each: value for each, value in given.items() if each[:-1] == here}
            values[field.name] = {
                each[-1]: _checked(each, value, str | int | float | bool, values, problems)
                for each, value in below.items()
            }
        elif here in given and not _is_empty_optional(given[here], field):
            values[field.name] = _checked(here, given[here], field.type, values, problems)
        elif field.required:
            problems.append(
                f"{path}: {'.'.join(here)}: missing; expected {expected(field.type)}, "
                f"here or in {variable_of(here)}"
            )
    broken = any(isinstance(value.value, Broken) for value in given.values())
    return struct(**values) if len(problems) == before and not broken else None


def _followers(
    given: Mapping[tuple[str, ...], Given], path: Path, problems: list[str]
) -> dict[str, Follower]:
    """Return the correct followers, by name."""

    def missing(at: tuple[str, ...], kind: Any) -> None:  # noqa: ANN401 - a type as a value
        place = _place(given, at, path)
        problems.append(f"{place}: {'.'.join(at)}: missing; expected {expected(kind)}")

    checked = partial(_checked, problems=problems)
    found = nested.build(dict[str, Follower], (nested.SECTION,), given, checked, missing)
    for at, what in stores.complaints(found):
        problems.append(f"{_place(given, at, path)}: {'.'.join(at)}: {what}")
    return {name: stores.plainly(each) for name, each in found.items() if each is not None}


def _place(given: Mapping[tuple[str, ...], Given], at: tuple[str, ...], path: Path) -> str:
    """Return where `at` is given, or the section in which it is missing."""
    written = (given[at[:n]].place for n in range(len(at), 0, -1) if at[:n] in given)
    return next(written, str(path))


def _is_empty_optional(given: Given, field: msgspec.structs.FieldInfo) -> bool:
    """Return whether an empty value means the default, as `slot:` and `slot: null` do."""
    return given.value is None and not field.required


def _checked(
    at: tuple[str, ...],
    given: Given,
    kind: Any,  # noqa: ANN401 - a type as a value
    beside: Mapping[str, Any],
    problems: list[str],
) -> Any:  # noqa: ANN401 - of that type, or None after a problem
    name = ".".join(at)
    if isinstance(given.value, Broken):
        return None  # reported already
    # YAML reads a choice `on` or `off` as a boolean.
    choice = isinstance(given.value, bool) and _is_choice(inspect.type_info(kind))
    try:
        found = given.written if choice else given.value
        value = msgspec.convert(found, kind, strict=not given.as_text)
        wrong = kind is object and not nested.is_json(value)
    except msgspec.ValidationError:
        wrong = True
    if wrong:
        problems.append(f"{given.place}: {name}: {_what(at, given)}; expected {expected(kind)}")
        return None
    problems.extend(f"{given.place}: {name}: {each}" for each in complaints(at, value, beside))
    return value


def _is_choice(info: inspect.Type) -> bool:
    """Return whether a field takes one of a list of words."""
    return (
        _is_choice(info.type)
        if isinstance(info, inspect.Metadata)
        else (isinstance(info, inspect.LiteralType))
    )


def _what(at: tuple[str, ...], given: Given) -> str:
    """Return what was given, as it was written: a reference, not the value that it names."""
    kinds = {str: "text", bool: "a yes or no", int: "a whole number", float: "a number"}
    kinds |= {list: "a list", dict: "names with values", type(None): "nothing"}
    kind = kinds.get(type(given.value), "something else")
    hide = is_secret(at) or not given.written
    return f"given {kind}" if hide else f"given {kind}, {given.written!r}"


def expected(kind: Any) -> str:  # noqa: ANN401 - a type as a value
    """Return in words what values a field of the type `kind` takes."""
    return _words(inspect.type_info(kind))


def _words(info: inspect.Type) -> str:  # noqa: PLR0911 - one return a kind of type
    match info:
        case inspect.Metadata():
            return _words(info.type)
        case inspect.StrType():
            return "text" + (", not empty" if info.min_length else "")
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            return _range(info)
        case inspect.LiteralType():
            return "one of " + ", ".join(str(each) for each in info.values)
        case inspect.VarTupleType():
            few = ", not empty" if info.min_length else ""
            return f"a list of {_words(info.item_type)}{few}"
        case inspect.DictType():
            return f"names, each with {_entry(info.value_type)}"
        case inspect.UnionType():
            return _either(info)
        case inspect.CustomType():  # object: any value that YAML and JSON both have
            return "a text, number, true or false, a list or names with values"
        case _:
            raise AssertionError(f"no words for {info}")


def _range(info: inspect.IntType | inspect.FloatType) -> str:
    word = "a whole number" if isinstance(info, inspect.IntType) else "a number"
    if info.gt is not None:
        return f"{word} above {info.gt}"
    if info.ge is not None and info.le is not None:
        return f"{word} from {info.ge} to {info.le}"
    return word if info.ge is None else f"{word}, at least {info.ge}"


def _entry(info: inspect.Type) -> str:
    """Return in words what an open section's entries are; a struct by its own name."""
    if isinstance(info, inspect.StructType):
        return f"a {info.cls.__name__.lower()}"
    return _words(info)


def _either(info: inspect.UnionType) -> str:
    kinds = [each for each in info.types if not isinstance(each, inspect.NoneType)]
    words = [
        str(word) for kind in kinds if isinstance(kind, inspect.LiteralType) for word in kind.values
    ]
    if words:
        either = any(isinstance(kind, inspect.BoolType) for kind in kinds)
        return ", ".join([*words, *(["true or false"] if either else [])])
    return _words(kinds[0]) if len(kinds) == 1 else "a text, number, true or false"


def _make_absolute(given: dict[tuple[str, ...], Given], path: Path) -> None:
    """Resolve file names relative to the configuration's folder, wherever the command is run."""
    for at, each in given.items():
        named = at == ("source", "password_file") or at[2:] == ("opensearch", "ca_file")
        if named and isinstance(each.value, str):
            file = path.parent / Path(each.value).expanduser()
            given[at] = each._replace(value=str(file.absolute()))
