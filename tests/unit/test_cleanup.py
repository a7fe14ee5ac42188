"""What topics are given to be compacted, which tables may be, and where a group is in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc.config import Config, load
from cdc.errors import ConfigError
from cdc.events import LSN, TRUNCATE_KEY, row_key
from cdc.log import cleanup, topics
from cdc.log.group_compaction import GroupPlace
from cdc.log.groups import GroupProgress
from cdc.log.inspection import TopicFacts
from cdc.log.records import SchemaRecord
from cdc.operate.doctor.topics import check_topic
from cdc.operate.findings import Severity

_HELD = str(topics.NO_COMPACTION)


@pytest.fixture
def made(tmp_path: Path) -> Any:  # noqa: ANN401 - a function
    """Return a function that loads a configuration with these settings of `log` and `tables`."""

    def new(tables: dict[str, Any] | None = None, **log: object) -> Config:
        sections = {
            "pipeline": "shop",
            "source": {"dsn": "postgresql://localhost/shop"},
            "log": {"bootstrap_servers": "localhost:9092", **log},
            "tables": tables or {},
        }
        file = tmp_path / "lockstep.yaml"
        file.write_text(yaml.safe_dump(sections), "utf-8")
        return load(file, {})

    return new


def version(*key: str) -> SchemaRecord:
    return SchemaRecord(
        schema_id=1,
        relation_id=1,
        schema="public",
        table="t",
        topic="shop.public.t",
        replica_identity="d",
        from_lsn=LSN(1),
        key=key,
        columns=(),
    )


def test_a_table_has_its_own_cleanup_or_that_of_all(made: Any) -> None:  # noqa: ANN401
    config = made({"public.*": {"cleanup": "both"}, "public.t": {"cleanup": "compact"}})
    assert topics.cleanup(config, "public", "t") == "compact"
    assert topics.cleanup(config, "public", "u") == "both"
    assert topics.cleanup(config, "other", "t") == "delete"
    assert topics.compacts(config)
    assert not topics.compacts(made())
    assert topics.cleanup(made(cleanup="compact"), "other", "t") == "compact"


def test_a_compacted_topic_keeps_every_event_and_tombstone_for_the_lag(made: Any) -> None:  # noqa: ANN401
    topic = topics.data_topic(made(cleanup="both", compaction_lag_hours=0.5), "public", "t")
    stated = {
        "cleanup.policy": "compact,delete",
        "min.compaction.lag.ms": "1800000",
        "max.compaction.lag.ms": _HELD,
        "delete.retention.ms": "1800000",
    }
    assert stated.items() <= topic.config.items()
    assert topics.LAG not in topics.data_topic(made(), "public", "t").config
    own = topics.internal_topics(made(cleanup="compact"))
    assert [topics.LAG in each.config for each in own] == [False] * len(own)


@pytest.mark.parametrize("hours", [0, -1, float("inf")])
def test_a_lag_is_a_number_of_hours(made: Any, hours: float) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="compaction_lag_hours"):
        made(compaction_lag_hours=hours)


def test_a_lag_that_retention_overtakes_is_refused(made: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="nothing would be compacted before"):
        made(retention_hours=12, cleanup="both", compaction_lag_hours=12)


def test_only_a_table_with_a_key_can_be_compacted(made: Any) -> None:  # noqa: ANN401
    config = made(cleanup="compact")
    cleanup.expect_keys(config, [version("id")])
    with pytest.raises(ConfigError, match=r"public\.t has no key") as error:
        cleanup.expect_keys(config, [version()])
    assert "tables.public.t.cleanup: delete" in error.value.hint
    cleanup.expect_keys(made(), [version()])


@pytest.mark.parametrize(
    ("settings", "check", "severity"),
    [
        ({"cleanup.policy": "delete, compact"}, None, None),
        ({topics.LAG: _HELD}, None, None),
        ({topics.LAG: "0"}, topics.LAG, Severity.ERROR),
        ({"cleanup.policy": "compact"}, "cleanup.policy", Severity.ERROR),
        ({"cleanup.policy": "delete"}, "cleanup.policy", Severity.WARNING),
    ],
)
def test_the_doctor_names_what_is_not_as_configured(
    made: Any,  # noqa: ANN401
    settings: dict[str, str],
    check: str | None,
    severity: Severity | None,
) -> None:
    config = made(cleanup="both")
    wanted = topics.data_topic(config, "public", "t")
    topic = TopicFacts(wanted.name, wanted.partitions, 1, 1, 0, {**wanted.config, **settings})
    found = [(each.check, each.severity) for each in check_topic(config, topic, wanted, None)]
    assert found == ([] if check is None else [(check, severity)])


def test_a_truncate_has_no_rows_key() -> None:
    assert row_key(TRUNCATE_KEY) is None
    assert row_key(b'{"id":1}') == b'{"id":1}'


def test_a_groups_place_is_as_old_as_its_first_open_record() -> None:
    progress = GroupProgress(5, 100)
    assert progress.place == GroupPlace(5, 100)
    progress.receive(6, 200)
    progress.receive(8, 300)
    progress.wait(999)
    assert progress.place == GroupPlace(6, 200)
    progress.acknowledge(6)
    assert progress.place == GroupPlace(8, 300)
    progress.acknowledge(8)
    assert progress.place == GroupPlace(9, 300)
    progress.wait(400)
    assert progress.place == GroupPlace(9, 300), "it may have more that has not arrived"
    progress.end(10)
    progress.wait(400)
    assert progress.place == GroupPlace(10, 400)
    progress.skip(11)
    progress.wait(500)
    assert progress.place == GroupPlace(11, 400)
