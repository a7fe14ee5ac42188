"""Read the configuration's layers: a YAML file, and the environment, which overrides it.

Each value keeps where it was given, and how it was written there, so that messages name the line
and never a secret that a `${…}` resolved to. Only names are checked against the model; nothing is
guessed: an unset variable, a missing secret file, a duplicate key is a finding.

One variable for each field: `LOCKSTEP_`, then the path in capitals joined by `_`
(`LOCKSTEP_SOURCE_DSN`, `LOCKSTEP_LOG_LEVEL` for `log_level`). Settings below `log.kafka` follow a
double underscore, with `_` for each dot: `LOCKSTEP_LOG_KAFKA__SASL_PASSWORD`. Lists are separated
by commas. The sections below `tables` and `followers` can be given in the file only. Views can also
be in files of their own, in the folder `view_files`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, get_origin

import yaml

from cdc.config import view_code, view_files
from cdc.config.schema import ROOT, FieldPath, Schema, settable, variable_of
from cdc.config.tables import Mask
from cdc.config.views import View
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# A configuration is some hundred lines: a larger file is not one.
MAX_FILE_BYTES: Final = 1_000_000
# The maximum depth of a value: of one whose form the store defines, such as a mapping, and of a
# list.
_FREE_DEPTH: Final = 20
_LIST_DEPTH: Final = 2
VIEW_FILES: Final = ("view_files",)
VIEW: Final = Schema(View)


class RawValue(NamedTuple):
    """A value that the file or the environment gives, unchecked; of a section, an empty dict."""

    value: object
    written: str  # as it was written, before `${…}` is filled in
    origin: str  # `lockstep.yaml:4` or the variable's name
    as_text: bool  # text that may be a number: from the environment or a `${…}`


class Layers(NamedTuple):
    """All values given, by path, and all errors in how they were given."""

    values: dict[FieldPath, RawValue]
    problems: list[str]
    code: dict[str, view_code.Declaration]  # views in Python


def read_layers(path: Path, env: Mapping[str, str]) -> Layers:
    """Return what `path` gives, overridden by what `env` gives. Raise OSError on the file."""
    layers = Layers({}, [], {})
    _read_file(path, layers)
    _read_environment(env, layers)
    references = _References(path.parent, env)
    for at, raw in layers.values.items():
        layers.values[at] = references.fill(raw, layers.problems, ".".join(at))
    _read_views(path.parent, layers)
    return layers


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
    _read_section(root, ROOT, (), path, layers)


def _why(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong, without what the parser quotes: that may be an unquoted password."""
    problem = re.split(r"""['"]""", error.problem or error.context or "", maxsplit=1)[0].strip()
    quote = "a text that starts with one of * & ! % @ ` | > { [ or holds `: ` needs quotes"
    return f"{problem.rstrip(',')}; {quote}"


def _unreadable(what: str) -> ConfigError:
    """Return the error for an unreadable file: it comes before errors about missing fields."""
    return ConfigError(what, hint="correct it, then `cdc config check`")


_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def _read_section(
    node: yaml.Node, section: Schema, at: FieldPath, path: Path, layers: Layers
) -> None:
    """Read every value below `node`, the section at `at`, into `layers`."""
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(node, yaml.MappingNode):
        where = f"{path}:{node.start_mark.line + 1}: {'.'.join(at) or 'the file'}"
        layers.problems.append(f"{where}: expected names with values below it")
        return
    for key_node, value_node in node.value:
        origin = f"{path}:{key_node.start_mark.line + 1}"
        name = key_node.value if isinstance(key_node, yaml.ScalarNode) else "(a structure)"
        here = (*at, name)
        found = section.below(name)
        if here in layers.values:
            layers.problems.append(f"{origin}: {'.'.join(here)}: given twice")
        elif found is None:
            # `password:hunter2` without its space is also read as a name.
            here = here if _NAME.fullmatch(name) else (*at, "(no name)")
            hint = nearest(name, section.fields)
            layers.problems.append(f"{origin}: {'.'.join(here)}: unknown name{hint}")
            if section.type is Mask:
                layers.values[at] = layers.values[at]._replace(value=Reported())
        # A mask is a section only where it is written as one.
        elif found.is_section and (
            isinstance(value_node, yaml.MappingNode) or found.type is not Mask
        ):
            # Noted although it has no value: all of its fields may have defaults.
            layers.values[here] = RawValue({}, "", origin, as_text=False)
            _read_section(value_node, found, here, path, layers)
        else:
            depth = _FREE_DEPTH if found.type is object else _LIST_DEPTH
            layers.values[here] = _value(value_node, origin, depth)


def _value(node: yaml.Node, origin: str, depth: int) -> RawValue:
    try:
        value: object = _construct(node, depth)
    except (ValueError, yaml.YAMLError):
        value = Untyped()
    written = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
    return RawValue(value, written, origin, as_text=False)


class Untyped:
    """A value that plain YAML has no type for; no field accepts it."""


class Reported:
    """A value with a fault that is already reported, such as a reference to nothing."""


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


# --- views in files of their own ---


def _read_views(folder: Path, layers: Layers) -> None:
    """Add the views of the folder `view_files`; nothing in them is a reference."""
    given = layers.values.get(VIEW_FILES)
    if given is None or not isinstance(given.value, str) or not given.value:
        return
    try:
        for file in view_files.files(folder / given.value):
            if file.suffix == view_files.PYTHON:
                _read_code(file, layers)
            else:
                _read_view(file, layers)
    except view_files.ViewFileError as error:
        layers.problems.append(f"{given.origin}: view_files: {error}")


def _read_code(file: Path, layers: Layers) -> None:
    try:
        found = view_code.read(file)
    except view_files.ViewFileError as error:
        layers.problems.append(str(error))
        return
    if found is not None and not _is_twice(file, layers):
        layers.code[file.stem] = found


def _is_twice(file: Path, layers: Layers) -> bool:
    """Return whether another place declares the view, and report that."""
    at = ("views", file.stem)
    others = {at: layers.values[at].origin} if at in layers.values else {}
    others |= {at: layers.code[file.stem].origin} if file.stem in layers.code else {}
    for other in others.values():
        layers.problems.append(f"{file}:1: {'.'.join(at)}: given twice; it is in {other}, too")
    return bool(others)


def _read_view(file: Path, layers: Layers) -> None:
    at = ("views", file.stem)
    if _is_twice(file, layers):
        return
    layers.values.setdefault(at[:1], RawValue({}, "", f"{file}:1", as_text=False))
    layers.values[at] = RawValue({}, "", f"{file}:1", as_text=False)
    for view, name, text, origin in view_files.read(file):
        here = (*at, name)
        found = VIEW.below(name)
        if here in layers.values:
            what = "the query follows the comments" if name == view_files.SQL else "given twice"
            layers.problems.append(f"{origin}: {'.'.join(here)}: {what}")
        elif found is None:
            hint = nearest(name, VIEW.fields)
            layers.problems.append(f"{origin}: views.{view}.{name}: unknown name{hint}")
        else:
            value: object = text
            if get_origin(found.type) is tuple:
                value = _parts(text)
            layers.values[here] = RawValue(value, text, origin, as_text=True)


# --- the environment ---

# A name as the map has it, from a variable's.
_MAP_NAMES: Final[dict[str, Callable[[str], str]]] = {
    "kafka": lambda name: name.lower().replace("_", "."),
    "options": str.lower,
    "storage": str,  # delta-rs' names: AWS_REGION
}


def _read_environment(env: Mapping[str, str], layers: Layers) -> None:
    fields = list(settable())
    single = {variable_of(at): (at, field) for at, field in fields if not field.is_section}
    maps = {
        variable_of(at) + "__": at
        for at, field in fields
        if field.is_map and not field.has_sections
    }
    ours = tuple(variable_of(at) + "_" for at, field in fields if field.fields)
    for variable in sorted(env):
        text = env[variable]
        start = next((prefix for prefix in maps if variable.startswith(prefix)), None)
        if variable in single:
            at, field = single[variable]
            value: object = text
            if get_origin(field.type) is tuple:
                value = _parts(text)
        elif start is not None and len(variable) > len(start):
            value, given = text, variable.removeprefix(start)
            at = (*maps[start], _MAP_NAMES[maps[start][-1]](given))
        else:
            if variable.startswith(ours):
                close = difflib.get_close_matches(variable, single, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                layers.problems.append(f"{variable}: the environment sets no such field{hint}")
            continue
        layers.values[at] = RawValue(value, text, variable, as_text=True)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


# --- references ---

_REFERENCE = re.compile(r"\$(\$)?\{([^}]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _References:
    """Fills in `${VAR}` and `${file:PATH}`; `$${` means a literal `${`."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._env = env

    def fill(self, raw: RawValue, problems: list[str], name: str) -> RawValue:
        """Return `raw` with every reference in its texts replaced by what it names."""
        found: list[str] = []
        filled = self._filled(raw.value, found)
        problems.extend(f"{raw.origin}: {name}: {each}" for each in found)
        if found:
            filled = Reported()
        return raw._replace(value=filled, as_text=raw.as_text or filled != raw.value)

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
            raise LookupError("`${` starts neither ${VARIABLE} nor ${file:PATH}; $${ escapes it")
        if name not in self._env:
            raise LookupError(f"the environment variable {name} is not set")
        return self._env[name]
