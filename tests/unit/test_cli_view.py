"""`cdc view` without a store: what is declared, who holds it, and what nobody holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cdc.cli.main import run
from cdc.errors import Exit


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "lockstep.yaml"
    sql = "SELECT id, name FROM people"
    file.write_text(
        yaml.safe_dump(
            {
                "pipeline": "shop",
                "source": {"dsn": "postgresql://nobody@localhost:1/x"},
                "log": {"bootstrap_servers": "localhost:1"},
                "views": {
                    "names": {"sql": sql, "key": ["id"], "freshness_seconds": 30},
                    "pairs": {"sql": sql, "key": ["id", "name"], "refresh": "strict"},
                },
                "followers": {
                    "lake": {"delta": {"path": str(tmp_path / "lake")}},
                    "answers": {
                        "mirror": "lake",
                        "views": ["names"],
                        "delta": {"path": str(tmp_path / "views")},
                    },
                    "cache": {
                        "mirror": "lake",
                        "views": ["names"],
                        "redis": {"url": "redis://localhost:1/0"},
                    },
                },
            }
        )
    )
    return file


def test_views_are_listed_with_the_followers_that_hold_them(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["view", "list", "--config", str(config)]) == Exit.OK
    assert capsys.readouterr().out.splitlines() == [
        "names  key id, refresh auto, at most 30 s late, in answers, cache",
        "pairs  key id, name, refresh strict, in no follower: name it in a follower's `views`",
    ]
    assert run(["view", "list", "--json", "--config", str(config)]) == Exit.OK
    names, pairs = json.loads(capsys.readouterr().out)
    assert names == {
        "view": "names",
        "key": ["id"],
        "refresh": "auto",
        "freshness_seconds": 30.0,
        "followers": ["answers", "cache"],
    }
    assert (pairs["key"], pairs["refresh"], pairs["followers"]) == (["id", "name"], "strict", [])


def test_a_view_that_no_follower_holds_is_not_rebuilt(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["view", "rebuild", "pairs", "--config", str(config)]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert "no follower holds the view pairs" in error
    assert "add pairs to a follower's `views`" in error


def test_a_view_that_does_not_exist_is_not_rebuilt(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["view", "rebuild", "other", "--config", str(config)]) == Exit.CONFIG
    assert "there is no view other" in capsys.readouterr().err
