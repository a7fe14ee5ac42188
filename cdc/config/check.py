"""Check the layers against the model and against what Postgres and Kafka accept.

`read` returns a configuration that needs no further checks, or raises one `ConfigError` that lists
every finding: the place, the field, what was given (never a secret) and what is expected.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from cdc.config import meaning, stores, tables
from cdc.config.layers import VIEW, RawValue, Reported, read_layers
from cdc.config.model import Config
from cdc.config.schema import ROOT, FieldPath, Schema, variable_of
from cdc.config.tables import Mask, TableRule
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from cdc.config.view_code import Declaration


class Effective(NamedTuple):
    """A checked configuration, its file, and where each value that is not a default was given."""

    config: Config
    path: Path
    origins: dict[FieldPath, str]


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
            hint="`cdc init` writes one; --config or LOCKSTEP_CONFIG names another file",
        ) from error
    _make_absolute(layers.values, path)
    builder = _Builder(layers.values, path, layers.problems)
    config: Config | None = builder.build(ROOT, (), {})
    if config is not None:
        config = msgspec.structs.replace(
            config,
            # A section whose settings are all commented out is no rule.
            tables={name: rule for name, rule in config.tables.items() if rule != TableRule()},
            followers={name: stores.with_plain_names(f) for name, f in config.followers.items()},
            views=config.views | {name: each.view for name, each in layers.code.items()},
        )
        layers.values.update(_origins(layers.code))
        layers.problems.extend(f"{path}: {each}" for each in _contradictions(config))
        builder.report(stores.contradictions(config))
    if layers.problems:
        many = len(layers.problems)
        count = "one error" if many == 1 else f"{many} errors"
        raise ConfigError(
            f"the configuration {path} has {count}:\n"
            + "\n".join(f"  {each}" for each in layers.problems),
            hint="correct it, then `cdc config check`; docs/CONFIG.md lists every field",
        )
    assert config is not None
    return Effective(config, path, {at: raw.origin for at, raw in layers.values.items()})


def _contradictions(config: Config) -> Iterator[str]:
    """Yield contradictions between sections."""
    direct = [name for name, rule in config.tables.items() if rule.snapshot == "direct"]
    if direct and config.delta.path is None:
        yield f"delta.path: missing; tables.{direct[0]}.snapshot: direct needs it"
    if config.archive.path is not None and "archive" in config.followers:
        yield "followers.archive: the archive reports under this name; give it another one"
    if config.keyring.options and config.keyring.plugin is None:
        yield "keyring.options: a plugin takes them; set keyring.plugin"
    encrypted = [
        f"tables.{name}.mask.{column}"
        for name, rule in config.tables.items()
        for column, mask in rule.mask.items()
        if mask.subject
    ]
    if encrypted and not config.keyring.is_there:
        yield f"keyring.path: missing; {encrypted[0]}: encrypt needs it"


def _origins(code: Mapping[str, Declaration]) -> Iterator[tuple[FieldPath, RawValue]]:
    """Yield where the fields of views in Python were given: these are no values to be built."""
    for name, each in code.items():
        raw = RawValue({}, "", each.origin, as_text=False)
        yield ("views", name), raw
        yield from ((("views", name, field), raw) for field in VIEW.fields)


_FILES: Final = {
    *(("source", "password_file"), ("console", "token_file"), ("console", "oidc", "keys")),
    ("console", "index_dir"),
    ("keyring", "path"),
}


def _make_absolute(values: dict[FieldPath, RawValue], path: Path) -> None:
    """Resolve file names relative to the configuration's folder, wherever the command is run."""
    for at, raw in values.items():
        is_file = at in _FILES or at[2:] == ("opensearch", "ca_file")
        if is_file and isinstance(raw.value, str) and not meaning.is_url(raw.value):
            file = path.parent / Path(raw.value).expanduser()
            values[at] = raw._replace(value=str(file.absolute()))


# --- building ---

# What is wrong with the entries of a section, which may contradict themselves or each other.
_SECTION_CHECKS: Final[dict[FieldPath, Callable[[Any], Iterator[tuple[FieldPath, str]]]]] = {
    ("tables",): tables.complaints,
    ("followers",): stores.complaints,
}


class _Builder:
    """Fills the model's types from what was given, and reports what is wrong."""

    def __init__(
        self, values: Mapping[FieldPath, RawValue], path: Path, problems: list[str]
    ) -> None:
        self._values = values
        self._path = path
        self._problems = problems
        self._failures = 0
        self._below: dict[FieldPath, list[str]] = {}
        for *parent, name in values:
            self._below.setdefault(tuple(parent), []).append(name)

    def report(self, complaints: Iterable[tuple[FieldPath, str]]) -> None:
        """Report what is wrong, each where it is given, or the section in which it is missing."""
        for at, what in complaints:
            given = (at[:n] for n in range(len(at), 0, -1) if at[:n] in self._values)
            origin = next((self._values[each].origin for each in given), str(self._path))
            self._problems.append(f"{origin}: {'.'.join(at)}: {what}")
            self._failures += 1

    def build(self, schema: Schema, at: FieldPath, siblings: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of the schema's type
        """Return what is at `at`, with defaults; None after a problem.

        `siblings` are the fields of the same section that are built already.
        """
        if schema.type is Mask:
            return self._mask(schema, at)
        if schema.fields:
            return self._struct(schema, at)
        if not schema.is_map:
            return self._value(schema, at, siblings)
        found = {}
        for name in self._below.get(at, ()):
            entry = schema.below(name)
            assert entry is not None
            found[name] = self.build(entry, (*at, name), {})
        if at in _SECTION_CHECKS:
            self.report(_SECTION_CHECKS[at](found))
        return found

    def _struct(self, schema: Schema, at: FieldPath) -> Any:  # noqa: ANN401 - of the schema's type
        values: dict[str, Any] = {}
        before = self._failures
        for name, field in schema.fields.items():
            here = (*at, name)
            raw = self._values.get(here)
            if field.is_section:
                # The environment may set fields of a section that the file does not have.
                is_built = raw is not None or not field.is_optional
            else:
                # An empty value means the default, as `slot:` and `slot: null` do.
                is_built = raw is not None and (raw.value is not None or field.required)
            if is_built:
                values[field.attribute] = self.build(field, here, values)
            elif field.required:
                where = "" if field.in_file_only else f", here or in {variable_of(here)}"
                self.report([(here, f"missing; expected {field.expected}{where}")])
        return schema.type(**values) if self._failures == before else None

    def _mask(self, schema: Schema, at: FieldPath) -> Mask | None:
        value = self._values[at].value
        below = self._below.get(at, [])
        if isinstance(value, Reported):
            self._failures += 1
            return None
        if value in (None, "null", "keep"):
            return Mask("keep" if value == "keep" else "null")
        if len(below) == 1:
            kind: Any = below[0]
            mask = Mask(kind, self.build(schema.fields[kind], (*at, kind), {}))
            self.report(((*at, kind), each) for each in tables.mask_complaints(mask))
            return mask
        one = "null, keep, {fixed: value}, {truncate: n}, {hmac: key} or {encrypt: kind:column}"
        several = f"a column has one mask; this has {' and '.join(below)}"
        self.report([(at, several if below else f"expected {one}")])
        return None

    def _value(self, schema: Schema, at: FieldPath, siblings: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of the schema's type
        raw = self._values[at]
        if isinstance(raw.value, Reported):
            self._failures += 1
            return None
        # YAML reads a choice `on` or `off` as a boolean.
        is_word = isinstance(raw.value, bool) and schema.is_choice
        given = raw.written if is_word else raw.value
        try:
            value = msgspec.convert(given, schema.annotated, strict=not raw.as_text)
            is_wrong = schema.type is object and not _is_json(value)
        except msgspec.ValidationError:
            is_wrong = True
        if is_wrong:
            self.report([(at, f"{_described(raw, schema)}; expected {schema.expected}")])
            return None
        self.report((at, each) for each in meaning.complaints(at, value, siblings))
        return value


def _is_json(value: object) -> bool:
    """Return whether JSON can represent the value; YAML has more types, such as dates."""
    if isinstance(value, dict):
        return all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)


def _described(raw: RawValue, schema: Schema) -> str:
    """Return what was given, as it was written: a reference, not the value that it names."""
    kinds = {str: "text", bool: "a yes or no", int: "a whole number", float: "a number"}
    kinds |= {list: "a list", dict: "names with values", type(None): "nothing"}
    kind = kinds.get(type(raw.value), "something else")
    hide = schema.secrecy is not None or not raw.written
    return f"given {kind}" if hide else f"given {kind}, {raw.written!r}"
