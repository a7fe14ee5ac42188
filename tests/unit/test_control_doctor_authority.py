"""The doctor reports who may command the pipeline, and where a password is sent unencrypted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc.config import Config, load
from cdc.operate.doctor.authority import check_connections, check_rights, check_secret, is_loopback
from cdc.operate.findings import Severity
from cdc.source.rights import Rights, quoted_role


def config(tmp_path: Path, **sections: Any) -> Config:  # noqa: ANN401 - YAML's values
    settings = {
        "pipeline": "shop",
        "source": {"dsn": "postgresql://me@db/shop"},
        "log": {"bootstrap_servers": "broker:9092"},
    }
    file = tmp_path / "lockstep.yaml"
    file.write_text(yaml.safe_dump(settings | sections), encoding="utf-8")
    return load(file, {})


@pytest.mark.parametrize(
    ("dsn", "warned"),
    [
        ("postgresql://me@db/shop", 0),
        ("postgresql://me:pw@db/shop", 1),
        ("postgresql://me:pw@db/shop?sslmode=prefer", 1),
        ("postgresql://me:pw@db/shop?sslmode=require", 0),
        ("postgresql://me:pw@db,other/shop?sslmode=verify-full", 0),
        ("postgresql://me:pw@db,localhost/shop", 1),
        ("postgresql://me:pw@127.0.0.1/shop", 0),
        ("postgresql://me:pw@[::1]/shop", 0),
        ("host=/var/run/postgresql user=me password=pw", 0),
        ("user=me password=pw", 0),
    ],
)
def test_a_postgres_password_over_an_open_connection_is_warned_of(
    tmp_path: Path, dsn: str, warned: int
) -> None:
    found = check_connections(config(tmp_path, source={"dsn": dsn}))
    warnings = [each for each in found if each.severity is Severity.WARNING]
    assert len(warnings) == warned
    assert "pw" not in str(found)


def test_so_are_those_of_kafka_and_the_stores(tmp_path: Path) -> None:
    given = config(
        tmp_path,
        log={
            "bootstrap_servers": "broker:9092,localhost:9093",
            "kafka": {"security.protocol": "SASL_PLAINTEXT", "sasl.password": "pw"},
        },
        followers={
            "a": {"redis": {"url": "redis://:pw@cache:6379/0"}},
            "b": {"redis": {"url": "rediss://:pw@cache:6379/1"}},
            "c": {"redis": {"url": "redis://cache:6379/2"}},
            "d": {"redis": {"url": "redis://:pw@localhost:6379/3"}},
            "e": {"opensearch": {"url": "http://search:9200", "user": "u", "password": "pw"}},
            "g": {"redis": {"url": "redis://cache:6379/4?password=pw"}},
            "h": {
                "topic": {
                    "bootstrap_servers": "far:9092",
                    "kafka": {"security.protocol": "SASL_PLAINTEXT", "sasl.password": "pw"},
                }
            },
            "f": {"opensearch": {"url": "https://secure:9200", "user": "u", "password": "pw"}},
        },
    )
    found = check_connections(given)
    assert [each.what.split(":")[0] for each in found] == [
        "log.kafka",
        "followers.h.topic.kafka",
        "followers.a.redis.url",
        "followers.e.opensearch.url",
        "followers.g.redis.url",
    ]
    assert all(each.severity is Severity.WARNING for each in found)


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("postgresql://me@db/copy", 0),
        ("postgresql://me:pw@db/copy", 1),
        ("postgresql+psycopg://me:pw@db:5433/copy?sslmode=prefer", 1),
        ("postgresql://me:pw@db/copy?sslmode=require", 0),
        ("postgresql://me:pw@db/copy?sslmode=verify-ca", 0),
        ("postgresql://me:pw@db/copy?sslmode=verify-full&sslrootcert=ca.pem", 0),
        ("postgresql://me@db/copy?password=pw", 1),
        ("postgresql://me@db/copy?password=pw&sslmode=require", 0),
        ("postgresql://me:pw@db,other/copy", 2),
        ("postgresql://me:pw@/copy?host=db:5433&host=localhost:5434&host=[::1]:5435", 1),
        ("postgresql://me:pw@/copy?host=db,127.0.0.1,::1", 1),
        ("postgresql://me:pw@/copy?host=/run/postgresql", 0),
        ("postgresql://me:pw@localhost/copy?host=db", 1),
        ("postgresql://me:pw@[::1]/copy", 0),
        ("sqlite:////srv/copy.db", 0),
    ],
)
def test_a_sql_followers_password_is_judged_by_what_libpq_does_with_the_url(
    tmp_path: Path, url: str, warned: int
) -> None:
    found = check_connections(config(tmp_path, followers={"copy": {"sql": {"url": url}}}))
    warnings = [each for each in found if each.severity is Severity.WARNING]
    assert len(warnings) == warned
    assert all(each.what.startswith("followers.copy.sql.url: ") for each in warnings)
    assert "pw" not in str(found)


@pytest.mark.parametrize(
    ("encoding", "invalid_text", "word"),
    [
        ("UTF8", "fail", "harmless"),
        ("LATIN1", "fail", "harmless"),
        ("SQL_ASCII", "base64", "harmless"),
        ("SQL_ASCII", "fail", "halts"),
        ("WIN1252", "base64", "halts"),
        ("EUC_JP", "fail", "halts"),
    ],
)
def test_texts_that_utf8_has_no_form_for_are_warned_of(
    encoding: str, invalid_text: str, word: str
) -> None:
    rights = Rights("me", [], True, [], {}, encoding)  # noqa: FBT003 - of EXECUTE
    (found,) = check_rights(rights, invalid_text)
    assert word in found.what
    assert (found.severity is Severity.WARNING) == (word == "halts")


def test_who_may_do_what_is_reported(tmp_path: Path) -> None:
    role = quoted_role('Odd "one"')
    keys = {"ddl_key": [role, quoted_role("PUBLIC")]}
    found = list(check_rights(Rights("me", [role], True, [role], keys)))  # noqa: FBT003 - of EXECUTE
    assert [each.check for each in found] == [
        "replication_roles",
        "emit_message",
        "trigger_keys",
        "signal_writers",
    ]
    assert found[2].fix == 'REVOKE ALL ON lockstep.ddl_key FROM "Odd ""one""", PUBLIC;'
    assert not list(check_rights(Rights("me", [], False, [], {})))  # noqa: FBT003 - of EXECUTE
    (secret,) = check_secret(config(tmp_path))
    assert secret.severity is Severity.NOTE
    (secret,) = check_secret(config(tmp_path, control={"secret": "s" * 32}))
    assert secret.severity is Severity.OK


def test_a_name_that_may_lead_anywhere_is_no_loopback() -> None:
    assert [
        is_loopback(each) for each in ("localhost", "127.9.9.9", "::1", "/run/postgresql", "")
    ] == [True] * 5
    assert not any(is_loopback(each) for each in ("localhost.example", "10.0.0.1", "128.0.0.1"))
