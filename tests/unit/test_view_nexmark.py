"""Which of Nexmark's queries can be views, and how the others are refused."""

from __future__ import annotations

import pytest

from cdc.config.views import View
from lockstep.jobs.views.plans import plan
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.sinks.contract import Column, Version
from tests.fixtures.nexmark_list import QUERIES, REFUSED, TABLES, VIEWS

_OIDS = {"bigint": "int8"}


def _version(table: str) -> Version:
    columns = []
    for each in TABLES[table].split(", "):
        name, kind = each.split()[:2]
        columns.append(Column(name, _OIDS.get(kind, kind), 0, -1, nullable=True))
    return Version(1, "public", table, f"x.public.{table}", ("id",), tuple(columns), {})


_VERSIONS = {f"public.{table}": _version(table) for table in TABLES}


@pytest.mark.parametrize("name", QUERIES)
def test_a_relational_query_of_nexmark_is_a_view(name: str) -> None:
    plan(name, VIEWS, _VERSIONS)


@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused_by_name(name: str) -> None:
    key, sql, what = REFUSED[name]
    with pytest.raises(UnsupportedError) as caught:
        plan(name, {name: View(sql=sql, key=(key,))}, _VERSIONS)
    assert caught.value.what == f"a view can't have {what}"
    assert caught.value.hint
