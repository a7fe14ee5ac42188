"""The table of built-in types."""

from __future__ import annotations

import pytest

from cdc.decode.types import TYPE_NAMES, type_name


@pytest.mark.parametrize(
    ("type_id", "name"),
    [(16, "bool"), (23, "int4"), (1007, "_int4"), (1700, "numeric"), (3802, "jsonb")],
)
def test_built_in_types_have_their_names(type_id: int, name: str) -> None:
    assert type_name(type_id) == name


def test_a_type_that_postgres_describes_has_no_name_here() -> None:
    assert type_name(10_000) is None


def test_names_are_unique_and_numbers_are_built_in() -> None:
    assert len(set(TYPE_NAMES.values())) == len(TYPE_NAMES)
    assert max(TYPE_NAMES) < 10_000
