"""Logs are one JSON object a line, or a line for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from cdc.errors import UnavailableError
from cdc.events import LSN
from cdc.operate.logs import MessageFormatter, setup_logging

log = logging.getLogger("cdc.tests")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger("cdc")
    before = root.handlers[:], root.level, root.propagate
    yield io.StringIO()
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def test_a_record_is_one_json_line_with_its_fields(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    log.info("slot\ntaken", extra={"fields": {"slot": "s", "at": LSN(0x16B3748), "count": 3}})
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert list(record) == ["ts", "level", "logger", "event", "fields"]
    assert record["event"] == "slot\ntaken"
    assert record["level"] == "info"
    assert record["logger"] == "cdc.tests"
    assert record["fields"] == {"slot": "s", "at": "0/16B3748", "count": 3}
    assert record["ts"].endswith("Z")


def test_an_error_of_ours_is_logged_with_its_remedy(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    log.warning("gone", extra={"fields": {"error": UnavailableError("no broker", hint="wait")}})
    fields = json.loads(stream.getvalue())["fields"]
    assert fields["error"] == {"class": "UnavailableError", "what": "no broker", "hint": "wait"}


def test_what_json_has_no_form_for_does_not_break_the_log(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    log.info("odd", extra={"fields": {"a": {1, 2}, "b": object(), "c": 2**70}})
    assert json.loads(stream.getvalue())["event"] == "odd"


def test_a_traceback_stays_on_its_line(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    try:
        int("x")
    except ValueError:
        log.exception("bug")
    assert "ValueError" in json.loads(stream.getvalue())["traceback"]


def test_the_level_holds_and_setting_up_again_does_not_double(stream: io.StringIO) -> None:
    setup_logging("debug", stream=stream)
    setup_logging("warning", stream=stream)
    log.info("quiet")
    log.warning("loud")
    assert len(stream.getvalue().splitlines()) == 1


def test_people_get_a_line_with_names_and_values(stream: io.StringIO) -> None:
    setup_logging("info", as_json=False, stream=stream)
    log.info("slot taken", extra={"fields": {"slot": "s"}})
    assert "slot taken" in stream.getvalue()
    assert stream.getvalue().endswith("slot=s\n")


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_only_a_terminal_that_wants_them_gets_colours(
    setting: dict[str, str], stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colours make a file unreadable; on a terminal, the environment may disable them."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    screen = _Screen()
    for each in (screen, stream):
        setup_logging("info", as_json=False, stream=each)
        log.info("slot taken", extra={"fields": {"slot": "s"}})
    assert "\x1b" not in stream.getvalue()
    assert ("\x1b" in screen.getvalue()) == (not setting)


# A name that a role may give its table: it would start a line, erase one, or turn one around.
FORGED = "a\n2026-01-01 ERROR forged\r\x1b[2K\x9b2K\u2028\u202e"


@pytest.mark.parametrize("as_json", [True, False])
def test_a_name_from_the_database_forges_no_line(stream: io.StringIO, *, as_json: bool) -> None:
    setup_logging("info", as_json=as_json, stream=stream)
    error = UnavailableError(f"no {FORGED}", hint=FORGED)
    log.info("lost %s", FORGED, extra={"fields": {"table": FORGED, "error": error}})
    line = stream.getvalue().removesuffix("\n")
    assert line.isprintable()
    if as_json:
        assert json.loads(line)["fields"]["table"] == FORGED, "programs read the name itself"


def test_a_followers_log_has_its_own_lines_only() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s\n  what to do: x", (FORGED,), None)
    first, second = MessageFormatter().format(record).split("\n")
    assert second == "  what to do: x"
    assert first.isprintable()
