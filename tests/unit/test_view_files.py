"""A view in a file of its own is checked as one in the configuration is, with file and line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cdc.config import load, read
from cdc.config.stores import longest_wait, seconds_between_cuts
from cdc.config.views import View
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.config import Config

CONFIG = """\
pipeline: shop
source:
  dsn: postgresql://me@localhost/shop
log:
  bootstrap_servers: localhost:9092
view_files: sql/views
"""
TOTALS = """\
-- Totals, by customer and region.

-- key: customer_id, region
-- refresh: strict
-- freshness_seconds: 30
SELECT customer_id, region, -- key: none
  sum(price) AS "${total}"
FROM orders GROUP BY 1, 2;
"""


def loaded(folder: Path, config: str = CONFIG, **files: str) -> Config:
    (folder / "lockstep.yaml").write_text(config)
    (folder / "sql/views").mkdir(parents=True)
    for name, text in files.items():
        (folder / f"sql/views/{name}.sql").write_text(text)
    return load(folder / "lockstep.yaml", {})


def refusal(folder: Path, config: str = CONFIG, **files: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, config, **files)
    return caught.value.what


def test_a_file_declares_the_view_that_the_section_would(tmp_path: Path) -> None:
    config = loaded(tmp_path, totals=TOTALS, plain="-- key: id\nSELECT id FROM t")
    assert dict(config.views) == {
        "plain": View(sql="SELECT id FROM t", key=("id",)),
        "totals": View(
            sql="SELECT customer_id, region, -- key: none\n"
            '  sum(price) AS "${total}"\nFROM orders GROUP BY 1, 2',
            key=("customer_id", "region"),
            refresh="strict",
            freshness_seconds=30.0,
        ),
    }
    origins = read(tmp_path / "lockstep.yaml", {}).origins
    file = tmp_path / "sql/views/totals.sql"
    assert origins["views", "totals", "key"] == f"{file}:3"
    assert origins["views", "totals", "sql"] == f"{file}:6"


def test_files_and_the_section_are_one_set_that_followers_name(tmp_path: Path) -> None:
    more = (
        "views: {listed: {sql: SELECT 1 AS a, key: [a]}}\n"
        "followers:\n  lake: {delta: {path: /lake}}\n"
        "  all: {delta: {path: /views}, mirror: lake, views: [listed, totals]}\n"
    )
    config = loaded(tmp_path, CONFIG + more, totals=TOTALS)
    assert list(config.views) == ["listed", "totals"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SELECT 1", "v.sql:1: views.v.key: missing"),
        (
            "-- kye: id\n-- key: id\nSELECT 1",
            "v.sql:1: views.v.kye: unknown name; did you mean key",
        ),
        ("-- a\n-- key: id\n-- key: x\nSELECT 1", "v.sql:3: views.v.key: given twice"),
        ("-- key:\nSELECT 1", "v.sql:1: views.v.key: "),
        (
            "-- key: id\n-- refresh: often\nSELECT 1",
            "v.sql:2: views.v.refresh: given text, 'often'",
        ),
        ("-- sql: SELECT 2\n-- key: id\nSELECT 1", "v.sql:3: views.v.sql: the query follows"),
        ("-- key: id\n", "v.sql:1: views.v.sql: given text; expected text, not empty"),
        ("", "v.sql:1: views.v.sql: given text; expected text, not empty"),
    ],
)
def test_what_is_wrong_in_a_file_is_reported_with_its_line(
    tmp_path: Path, text: str, says: str
) -> None:
    assert says in refusal(tmp_path, v=text)


def test_cuts_are_half_the_least_freshness_apart(tmp_path: Path) -> None:
    more = (
        "followers:\n  lake: {delta: {path: /lake}, every_seconds: 1}\n"
        "  all: {delta: {path: /views}, mirror: lake, views: [late, totals]}\n"
    )
    late = "-- key: id\n-- freshness_seconds: 40\nSELECT id FROM t"
    config = loaded(tmp_path, CONFIG + more, totals=TOTALS, late=late)
    assert (seconds_between_cuts(config, "all"), longest_wait(config, "all")) == (15.0, 16.0)
    assert seconds_between_cuts(config, "lake") == 1.0


@pytest.mark.parametrize(("own", "mirror"), [(30, 0), (10, 20), (0, 15)])
def test_a_view_that_would_never_be_as_fresh_is_refused(
    tmp_path: Path, own: int, mirror: int
) -> None:
    more = (
        f"followers:\n  lake: {{delta: {{path: /lake}}, every_seconds: {mirror}}}\n"
        f"  all: {{delta: {{path: /views}}, mirror: lake, views: [totals], every_seconds: {own}}}\n"
    )
    what = refusal(tmp_path, CONFIG + more, totals=TOTALS)
    says = "totals.sql:5: views.totals.freshness_seconds: 30 s; expected more than every_seconds"
    assert f"{says} of all and lake, 30 s" in what


def test_a_view_that_is_declared_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    more = "views:\n  totals: {sql: SELECT 1 AS a, key: [a]}\n"
    what = refusal(tmp_path, CONFIG + more, totals=TOTALS)
    assert "views.totals: given twice" in what
    assert "totals.sql:1" in what
    assert "lockstep.yaml:8" in what


def test_a_files_name_must_be_a_views(tmp_path: Path) -> None:
    what = refusal(tmp_path, **{"Order-Totals": TOTALS})
    assert "Order-Totals.sql:1: views.Order-Totals: 'Order-Totals' cannot name a view" in what


def test_a_missing_folder_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    what = refusal(tmp_path, CONFIG.replace("sql/views", "nowhere"))
    assert "lockstep.yaml:6: view_files: cannot read the folder" in what
    (tmp_path / "sql/views/v.sql").write_bytes(b"\xff\xfe")
    (tmp_path / "lockstep.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"v\.sql: not UTF-8 text"):
        load(tmp_path / "lockstep.yaml", {})
