"""Read the configuration's layers: a YAML file, and the environment, which overrides it.

Each value keeps where it was given, and how it was written there, so that messages name the line
and never a secret that a `${…}` resolved to. Only names are checked against the model; nothing is
guessed: an unset variable, a missing secret file, a duplicate key is a finding.

One variable for each field: `LOCKSTEP_`, then the path in capitals joined by `_`
(`LOCKSTEP_SOURCE_DSN`, `LOCKSTEP_LOG_LEVEL` for `log_level`). Settings below `log.kafka` follow a
double underscore, with `_` for each dot: `LOCKSTEP_LOG_KAFKA__SASL_PASSWORD`. Lists are separated
by commas. The sections below `tables` and `followers` can be given in the file only.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin

import msgspec
import yaml

from cdc.config import nested
from cdc.config.model import Config
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ENVIRONMENT = "LOCKSTEP_"
# A configuration is some hundred lines: a larger file is not one.
MAX_FILE_BYTES = 1_000_000


class Given(NamedTuple):
    """A value that the file or the environment gives, with its origin for messages."""

    value: object
    written: str  # as it was written, before `${…}` is filled in
    place: str  # `lockstep.yaml:4` or the variable's name
    as_text: bool  # text that may be a number: from the environment or a `${…}`


class Layers(NamedTuple):
    """All values given, by path, and all errors in how they were given."""

    given: dict[tuple[str, ...], Given]
    problems: list[str]


def read_layers(path: Path, env: Mapping[str, str]) -> Layers:
    """Return what `path` gives, overridden by what `env` gives. Raise OSError on the file."""
    layers = Layers({}, [])
    _read_file(path, layers)
    _read_environment(env, layers)
    reader = _References(path.parent, env)
    for place, given in layers.given.items():
        layers.given[place] = reader.fill(given, layers.problems, ".".join(place))
    return layers


# --- the model's names ---


class Known(NamedTuple):
    """Where the model has fields: leaves by path, and the paths whose entries have free names.

    The entries of `open` are values, those of `named` are sections, all of one struct, and below
    `deep` are sections within sections: `cdc.config.nested`.
    """

    leaves: tuple[tuple[str, ...], ...]
    open: tuple[tuple[str, ...], ...]
    sections: tuple[tuple[str, ...], ...]
    named: dict[tuple[str, ...], type[msgspec.Struct]]
    deep: tuple[tuple[str, ...], ...]


@cache
def known_paths() -> Known:
    """Return every path of the model."""
    leaves: list[tuple[str, ...]] = []
    opened: list[tuple[str, ...]] = []
    sections: list[tuple[str, ...]] = []
    named: dict[tuple[str, ...], type[msgspec.Struct]] = {}
    deep: list[tuple[str, ...]] = []

    def walk(struct: type[msgspec.Struct], path: tuple[str, ...]) -> None:
        for field in msgspec.structs.fields(struct):
            here = (*path, field.encode_name)
            if here == (nested.SECTION,):
                deep.append(here)
            elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                sections.append(here)
                walk(field.type, here)
            elif (entries := _entries(field.type)) is None:
                leaves.append(here)
            elif isinstance(entries, type) and issubclass(entries, msgspec.Struct):
                named[here] = entries
            else:
                opened.append(here)

    walk(Config, ())
    return Known(tuple(leaves), tuple(opened), tuple(sections), named, tuple(deep))


def _entries(kind: Any) -> Any:  # noqa: ANN401 - a type as a value
    """Return the type of a dict's values; None where it is no dict."""
    plain = getattr(kind, "__origin__", kind)
    return get_args(plain)[1] if get_origin(plain) is dict else None


def variable_of(path: tuple[str, ...], *, opened: bool = False) -> str:
    """Return the name of the environment variable that sets `path`."""
    if opened:
        section = "_".join(path[:-1]).upper()
        return f"{ENVIRONMENT}{section}__{path[-1].upper().replace('.', '_')}"
    return ENVIRONMENT + "_".join(path).upper().replace(".", "_")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean …?` where one of `names` is close to `name`, else the names."""
    names = sorted(names)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(names)}"


# --- the file ---


def _read_file(path: Path, layers: Layers) -> None:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise _unreadable(f"{path}: larger than {MAX_FILE_BYTES} bytes; not a configuration")
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise _unreadable(f"{where}: not YAML: {_why(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _unreadable(f"{path}: not YAML: bytes that are not text") from error
    if root is None:
        return
    _read_mapping(root, (), path, layers)


def _why(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong, without what the parser quotes: that may be an unquoted password."""
    problem = re.split(r"""['"]""", error.problem or error.context or "", maxsplit=1)[0].strip()
    quote = "a text that begins with one of * & ! % @ ` | > { [ or holds `: ` needs quotes"
    return f"{problem.rstrip(',')}; {quote}"


def _unreadable(what: str) -> ConfigError:
    """Return the error for an unreadable file: it comes before errors about missing fields."""
    return ConfigError(what, hint="correct it, then `cdc config check`")


class _Shape(NamedTuple):
    """What may be below a path: the known names (None: any), and which of them are sections."""

    names: frozenset[str] | None
    sections: frozenset[str] | None  # None: any that is written as one


_NONE: frozenset[str] = frozenset()
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MASKS = frozenset({"fixed", "truncate", "hmac"})


def _shape(at: tuple[str, ...]) -> _Shape:
    """Return what the model has below `at`, a section or a map of free names."""
    known = known_paths()
    if at[:1] in known.deep:
        return _Shape(nested.names_of(nested.kind_at(at)), None)
    if at in (*known.open, *known.named):
        return _Shape(None, _NONE if at in known.open else None)
    if at[:-1] in known.named:
        fields = msgspec.structs.fields(known.named[at[:-1]])
        return _Shape(frozenset(field.name for field in fields), frozenset({"mask"}))
    if at[:-2] in known.named:
        return _Shape(None, None)  # a column's mask is a word, or a section of one field
    if at[:-3] in known.named:
        return _Shape(_MASKS, _NONE)
    paths = (*known.leaves, *known.open, *known.sections, *known.named, *known.deep)
    names = {each[len(at)] for each in paths if each[: len(at)] == at and len(each) > len(at)}
    deep = {*known.open, *known.sections, *known.named, *known.deep}
    return _Shape(frozenset(names), frozenset(name for name in names if (*at, name) in deep))


def _read_mapping(node: yaml.Node, at: tuple[str, ...], path: Path, layers: Layers) -> None:
    """Read every value below `node`, the section `at`, into `layers`."""
    section = ".".join(at) or "the file"
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        layers.problems.append(f"{path}:{line}: {section}: expected names with values below it")
        return
    shape = _shape(at)
    if shape.names is _MASKS and not node.value:
        layers.problems.append(f"{path}:{line}: {section}: expected one of fixed, hmac, truncate")
    for key_node, value_node in node.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        name = key_node.value if isinstance(key_node, yaml.ScalarNode) else "(a structure)"
        here = (*at, name)
        if here in layers.given:
            layers.problems.append(f"{place}: {'.'.join(here)}: given twice")
        elif shape.names is not None and name not in shape.names:
            hint = nearest(name, shape.names)
            # `password:hunter2` without its space is also read as a name.
            here = here if _NAME.fullmatch(name) else (*at, "(no name)")
            layers.problems.append(f"{place}: {'.'.join(here)}: unknown name{hint}")
        elif _is_section(shape, here, value_node):
            if here[:1] in known_paths().deep:
                layers.given[here] = Given(None, "", place, as_text=False)
            _read_mapping(value_node, here, path, layers)
        else:
            free = nested.kind_at(here) is object
            depth = nested.FREE_DEPTH if free else 2
            layers.given[here] = _scalar(value_node, place, depth)


def _is_section(shape: _Shape, here: tuple[str, ...], node: yaml.Node) -> bool:
    if here[:1] in known_paths().deep:
        return nested.is_section(nested.kind_at(here))
    if shape.sections is None:
        # A table's rule is always a section; a column's mask only where it is written as one.
        return here[:-1] in known_paths().named or isinstance(node, yaml.MappingNode)
    return here[-1] in shape.sections


def _scalar(node: yaml.Node, place: str, depth: int) -> Given:
    try:
        value: object = _construct(node, depth)
    except (ValueError, yaml.YAMLError):
        value = Untyped()
    written = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
    return Given(value, written, place, as_text=False)


class Untyped:
    """A value that plain YAML has no type for; no field accepts it."""


class Broken:
    """A text whose references could not be filled in; the finding is already reported."""


def _construct(node: yaml.Node, depth: int) -> object:
    """Return the plain value of `node`; the depth is limited, since an alias may contain itself."""
    if depth == 0:
        raise ValueError("nested too deeply")
    if isinstance(node, yaml.SequenceNode):
        return [_construct(each, depth - 1) for each in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _construct(value, depth - 1) for key, value in node.value}
    value: object = yaml.constructor.SafeConstructor().construct_object(node)
    return value


# --- the environment ---

_LISTS = (("source", "tables"), ("source", "exclude"))


def _read_environment(env: Mapping[str, str], layers: Layers) -> None:
    known = known_paths()
    leaves = {variable_of(path): path for path in known.leaves}
    opened = {variable_of(path) + "__": path for path in known.open}
    ours = tuple(variable_of(path) + "_" for path in known.sections)
    for variable in sorted(env):
        text = env[variable]
        if variable in leaves:
            path = leaves[variable]
            value: object = text
            if path in _LISTS:
                value = [part.strip() for part in text.split(",") if part.strip()]
            layers.given[path] = Given(value, text, variable, as_text=True)
            continue
        start = next((prefix for prefix in opened if variable.startswith(prefix)), None)
        if start is not None and len(variable) > len(start):
            name = variable.removeprefix(start).lower().replace("_", ".")
            layers.given[(*opened[start], name)] = Given(text, text, variable, as_text=True)
        elif variable.startswith(ours):
            close = difflib.get_close_matches(variable, leaves, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            layers.problems.append(f"{variable}: the environment sets no such field{hint}")


# --- references ---

_REFERENCE = re.compile(r"\$(\$)?\{([^}]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _References:
    """Fills in `${VAR}` and `${file:PATH}`; `$${` means a literal `${`."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._env = env

    def fill(self, given: Given, problems: list[str], name: str) -> Given:
        """Return `given` with every reference in its texts replaced by what it names."""
        found: list[str] = []
        value = given.value
        filled = self._filled(value, found)
        problems.extend(f"{given.place}: {name}: {each}" for each in found)
        if found:
            filled = Broken()
        return given._replace(value=filled, as_text=given.as_text or filled != value)

    def _filled(self, value: object, found: list[str]) -> object:
        if isinstance(value, list):
            return [self._filled(each, found) for each in value]
        if isinstance(value, dict):
            return {name: self._filled(each, found) for name, each in value.items()}
        return self._text(value, found) if isinstance(value, str) else value

    def _text(self, text: str, found: list[str]) -> str:
        def replace(match: re.Match[str]) -> str:
            escaped, name = match.groups()
            if escaped:
                return "${" + name + "}"
            try:
                return self._look_up(name)
            except LookupError as error:
                found.append(str(error.args[0]))
                return ""

        return _REFERENCE.sub(replace, text)

    def _look_up(self, name: str) -> str:
        if name.startswith("file:"):
            path = self._folder / name.removeprefix("file:")
            try:
                return path.read_text("utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
                raise LookupError(f"cannot read ${{{name}}}: {why}") from error
        if not _VARIABLE.fullmatch(name):
            raise LookupError(
                "what `${` begins is neither ${VARIABLE} nor ${file:PATH}; $${ escapes"
            )
        if name not in self._env:
            raise LookupError(f"the environment variable {name} is not set")
        return self._env[name]
