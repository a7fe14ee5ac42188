"""One table of what is done about each error."""

from __future__ import annotations

import pytest

from cdc import errors
from cdc.errors import CDCError, Exit, Policy

# What a supervisor and the daemon may do: a line for every class of cdc.errors.
TABLE = {
    errors.CDCError: (Policy.HALT, Exit.BUG),
    errors.ProtocolError: (Policy.HALT, Exit.BUG),
    errors.InvariantError: (Policy.HALT, Exit.BUG),
    errors.ConfigError: (Policy.HALT, Exit.CONFIG),
    errors.NoAnswerError: (Policy.BACKOFF, Exit.CONFIG),
    errors.GapError: (Policy.HALT, Exit.CONFIG),
    errors.MiscountedError: (Policy.HALT, Exit.CONFIG),
    errors.CompactedError: (Policy.HALT, Exit.CONFIG),
    errors.PermissionDeniedError: (Policy.SLOW, Exit.PERMISSION),
    errors.StoreLostError: (Policy.BACKOFF, Exit.TEMPORARY),
    errors.SwitchedError: (Policy.BACKOFF, Exit.TEMPORARY),
    errors.OvertakenError: (Policy.BACKOFF, Exit.UNAVAILABLE),
    errors.UnavailableError: (Policy.BACKOFF, Exit.UNAVAILABLE),
    errors.SilentError: (Policy.BACKOFF, Exit.UNAVAILABLE),
    errors.UnreadableError: (Policy.BACKOFF, Exit.UNAVAILABLE),
    errors.SpoolError: (Policy.BACKOFF, Exit.TEMPORARY),
    errors.RereadError: (Policy.BACKOFF, Exit.TEMPORARY),
    errors.SlotBusyError: (Policy.BACKOFF, Exit.TEMPORARY),
    errors.FencedError: (Policy.BACKOFF, Exit.TEMPORARY),
    errors.SnapshotLostError: (Policy.BACKOFF, Exit.TEMPORARY),
    errors.RewrittenError: (Policy.BACKOFF, Exit.TEMPORARY),
    errors.OutcomeUnknownError: (Policy.BACKOFF, Exit.TEMPORARY),
    errors.LocalStackError: (Policy.HALT, Exit.UNAVAILABLE),
    errors.LagError: (Policy.BACKOFF, Exit.TEMPORARY),
}


def test_every_error_has_a_line_in_the_table() -> None:
    ours = {
        value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, CDCError) and not name.startswith("_")
    }
    assert ours == TABLE.keys()


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_policy_and_exit_code(kind: type[CDCError]) -> None:
    assert (kind.policy, kind.exit_code) == TABLE[kind]


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_an_error_shows_what_happened_and_what_to_do(kind: type[CDCError]) -> None:
    error = kind("it broke", hint="fix it")
    assert str(error) == "it broke\n  what to do: fix it"


def test_a_name_in_an_error_starts_no_line() -> None:
    forged = "a\n2026-01-01 ERROR forged\x1b[2K"
    error = CDCError(f"two are wrong:\n  {forged}\n  b", hint=forged)
    shown = r"a\n2026-01-01 ERROR forged\x1b[2K"
    assert str(error) == f"two are wrong:\n  {shown}\n  b\n  what to do: {shown}"


@pytest.mark.parametrize("kind", [errors.ProtocolError, errors.InvariantError])
def test_bugs_have_a_hint_of_their_own(kind: type[errors.ProtocolError]) -> None:
    assert "report it" in kind("it broke").hint


def test_exit_codes_are_those_that_are_documented() -> None:
    assert {code.name: code.value for code in Exit} == {
        "OK": 0,
        "FAILED": 1,
        "USAGE": 2,
        "UNAVAILABLE": 69,
        "BUG": 70,
        "TEMPORARY": 75,
        "PERMISSION": 77,
        "CONFIG": 78,
    }
