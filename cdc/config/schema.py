"""What the configuration allows at each path: a tree that is derived from the model's types.

Reading the file and the environment, building, showing, secrecy and the reference all walk this
tree, so only the types define which names and values are allowed. Pure.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, inspect

from cdc.config.model import Config
from cdc.config.secrecy import Secrecy, secrecy_of
from cdc.config.tables import Mask, WrittenMask

if TYPE_CHECKING:
    from collections.abc import Iterator

FieldPath = tuple[str, ...]

ENVIRONMENT: Final = "LOCKSTEP_"


@dataclass(frozen=True, eq=False)
class Schema:
    """What is allowed at one path: a section of fields, a map of free names, or a value."""

    annotated: Any  # the type, with its annotations
    attribute: str = ""  # a field's name in Python
    default: object = NODEFAULT
    required: bool = False
    secrecy: Secrecy | None = None  # how much of it may be shown
    names: FieldPath = ()  # those below the map that `secrecy` annotates
    in_file_only: bool = False  # the environment can't set what is below a section of a free name

    @cached_property
    def type(self) -> Any:  # noqa: ANN401 - a type as a value
        """The type without annotations, and without None where it is optional."""
        return plain(self.annotated)

    @cached_property
    def fields(self) -> dict[str, Schema]:
        """Return the fields of a section, by the names that the file has for them."""
        struct = WrittenMask if self.type is Mask else self.type
        if not is_struct(struct):
            return {}
        return {
            field.encode_name: Schema(
                *(field.type, field.name, field.default, field.required, secrecy_of(field.type)),
                in_file_only=self.in_file_only,
            )
            for field in msgspec.structs.fields(struct)
        }

    @property
    def is_map(self) -> bool:
        return get_origin(self.type) is dict

    @property
    def has_sections(self) -> bool:
        """Whether it is a map whose entries are sections of fields."""
        return self.is_map and bool(Schema(get_args(self.type)[1]).fields)

    @property
    def is_section(self) -> bool:
        """Whether it has names below it."""
        return self.is_map or bool(self.fields)

    @property
    def is_optional(self) -> bool:
        """Whether a section is absent where it is not written."""
        return self.default is None

    def below(self, name: str) -> Schema | None:
        """Return what is allowed under a name; None where the section has no such name."""
        if not self.is_map:
            return self.fields.get(name)
        return Schema(
            get_args(self.type)[1],
            secrecy=self.secrecy,
            names=(*self.names, name),
            in_file_only=self.in_file_only or self.has_sections,
        )

    def shown(self, value: object) -> object:
        """Return the value, or what may be shown instead."""
        return value if self.secrecy is None else self.secrecy.shown(self.names, value)

    @property
    def meta(self) -> msgspec.Meta:
        """The description and the examples."""
        notes = getattr(self.annotated, "__metadata__", ())
        return next((each for each in notes if isinstance(each, msgspec.Meta)), msgspec.Meta())

    @property
    def expected(self) -> str:
        """The values that are allowed, in words."""
        return _words(inspect.type_info(self.annotated))

    @property
    def is_choice(self) -> bool:
        """Whether it takes one of a list of words."""
        return isinstance(inspect.type_info(self.type), inspect.LiteralType)


ROOT: Final = Schema(Config)


def settable(section: Schema = ROOT, at: FieldPath = ()) -> Iterator[tuple[FieldPath, Schema]]:
    """Yield every field of the model that has a fixed path, each section before its fields."""
    for name, field in section.fields.items():
        yield (*at, name), field
        yield from settable(field, (*at, name))


def variable_of(at: FieldPath) -> str:
    """Return the environment variable that sets `at`; of a map, the first part of its name."""
    return ENVIRONMENT + "_".join(at).upper().replace(".", "_")


def plain(kind: Any) -> Any:  # noqa: ANN401 - a type as a value
    """Return a type without its annotations, and without None where it is optional."""
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    if get_origin(kind) in (Union, types.UnionType):
        left = [each for each in get_args(kind) if each is not types.NoneType]
        return plain(left[0]) if len(left) == 1 else kind
    return kind


def is_struct(kind: Any) -> bool:  # noqa: ANN401 - a type as a value
    """Return whether a type has fields of its own."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# --- in words ---


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
