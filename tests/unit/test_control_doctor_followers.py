"""What followers name is checked against what is captured, before any of them is started."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cdc.config import TableRule
from cdc.config.followers import Follower
from cdc.operate.doctor.followers import CapturedTables, check_followers
from cdc.operate.findings import Finding, Severity
from cdc.source.tables import TableColumn
from tests.unit.test_control_doctor import CONFIG, TABLE

NAME = TableColumn("name", "", in_identity=False, in_primary_key=False, type_id=25)
COLUMNS = [TableColumn("id", "", in_identity=True, in_primary_key=True, type_id=23), NAME]
FACTS = CapturedTables(
    {
        "public.users": TABLE,
        "public.log": TABLE._replace(oid=2, name="log", has_primary_key=False),
    },
    {1: COLUMNS, 2: [NAME]},
)
REDIS = {"url": "redis://localhost"}


def found(follower: dict[str, Any], facts: CapturedTables = FACTS, **config: Any) -> list[Finding]:  # noqa: ANN401 - fields
    followers = {"f": msgspec.convert(follower, Follower)}
    return list(
        check_followers(msgspec.structs.replace(CONFIG, followers=followers, **config), facts)
    )


@pytest.mark.parametrize(
    "follower",
    [
        {"delta": {"path": "x"}},
        {"delta": {"path": "x", "history": ["public.log"], "cluster": {"public.users": ["name"]}}},
        {"tables": ["*.users"], "redis": REDIS},
        {
            "tables": ["public.users"],
            "redis": REDIS
            | {"shapes": {"public.users": {"key": "{{u}}:{id}", "fields": ["name"]}}},
        },
        {
            "opensearch": {"url": "http://h"},
            "mirror": "m",
            "documents": {"d": {"table": "public.users"}},
        },
        {
            "mirror": "m",
            "views": ["v"],
            "redis": REDIS | {"shapes": {"views.v": {"key": "v:{id}", "form": "hash"}}},
        },
    ],
)
def test_what_is_captured_with_a_key_can_be_followed(follower: dict[str, Any]) -> None:
    assert [each.severity for each in found(follower)] == [Severity.OK]


@pytest.mark.parametrize(
    ("follower", "severity", "says"),
    [
        ({"redis": REDIS}, Severity.ERROR, "f follows tables without a key, whose rows"),
        ({"tables": ["public.orders"], "redis": REDIS}, Severity.WARNING, "matches public.orders"),
        (
            {"delta": {"path": "x", "history": ["public.orders"]}},
            Severity.WARNING,
            "followers.f.delta.history names public.orders, which is not captured",
        ),
        (
            {"delta": {"path": "x", "partition": {"public.users": ["at"]}}},
            Severity.ERROR,
            "followers.f.delta.partition: public.users has no column at",
        ),
        (
            {
                "tables": ["*.users"],
                "redis": REDIS | {"shapes": {"public.users": {"key": "u:{no}"}}},
            },
            Severity.ERROR,
            "followers.f.redis.shapes: public.users has no column no",
        ),
        (
            {
                "tables": ["*.users"],
                "redis": REDIS | {"shapes": {"public.users": {"ttl_seconds": 9}}},
            },
            Severity.NOTE,
            "an update of a row that has expired",
        ),
        (
            {"tables": ["*.users"], "opensearch": {"url": "x", "aliases": {"public.a": "a"}}},
            Severity.WARNING,
            "followers.f.opensearch names public.a",
        ),
        (
            {
                "redis": REDIS,
                "mirror": "m",
                "documents": {
                    "d": {
                        "table": "public.users",
                        "children": {"c": {"table": "public.log", "by": {"name": "no"}}},
                    }
                },
            },
            Severity.ERROR,
            "followers.f.documents: public.users has no column no",
        ),
    ],
)
def test_what_a_follower_cannot_use_is_named(
    follower: dict[str, Any], severity: Severity, says: str
) -> None:
    reported = [each for each in found(follower) if says in each.what]
    assert [each.severity for each in reported] == [severity]
    assert reported[0].fix


def test_a_column_left_out_and_a_key_of_the_configurations_count() -> None:
    tables = {
        "public.log": TableRule(key=("name",)),
        "public.users": TableRule(exclude=("name",)),
    }
    shapes = {"public.users": {"form": "hash", "fields": ["name"]}}
    reported = found({"redis": REDIS | {"shapes": shapes}}, tables=tables)
    assert [each.what for each in reported] == [
        "followers.f.redis.shapes: public.users.name is not captured"
    ]


def test_without_canaries_it_reports_what_is_unknown() -> None:
    source = msgspec.structs.replace(CONFIG.source, canary_seconds=0.0)
    assert found({"delta": {"path": "x"}}, source=source)[-1].check == "canary"
