"""Reports of bugs, other processes' output and libraries' errors contain no row values."""

from __future__ import annotations

import io
import logging
import sys

import psycopg
import pytest

from cdc.errors import CDCError, Exit, gist
from cdc.operate.logs import setup_logging
from cdc.runtime import bugs
from cdc.snapshot.initial.spark_runner import failure
from cdc.source.connection import translate
from lockstep.sinks.opensearch.client import Reason, refusal

VALUE = "ada@x.org"

# As Python, Spark and the JVM write them: values are in the errors' messages, on any line of them.
PYTHON = f"""\
Traceback (most recent call last):
  File "/srv/jobs/snapshot.py", line 12, in copy
    convert({VALUE!r})
  File "/srv/cdc/rows.py", line 3
ValueError: invalid literal for int(): '{VALUE}'
and on its next line {VALUE}
pyarrow.lib.ArrowInvalid: Could not convert {VALUE}
"""
JAVA = f"""\
26/01/01 00:00:00 ERROR Executor: Exception in task 0.0 in stage 1.0: {VALUE}
org.apache.spark.SparkException: Job aborted: row [{VALUE}]
\tat org.apache.spark.scheduler.DAGScheduler.abort(DAGScheduler.scala:2844)
\tat java.base/java.lang.Thread.run(Thread.java:840)
Caused by: java.lang.NumberFormatException: For input string: "{VALUE}"
Caused by: java.net.ConnectException: Connection refused
"""


def test_of_another_process_only_stack_lines_and_types_are_reported() -> None:
    reported = bugs.places(PYTHON + JAVA)
    assert VALUE not in reported
    assert reported.splitlines() == [
        '  File "/srv/jobs/snapshot.py", line 12, in copy',
        '  File "/srv/cdc/rows.py", line 3',
        "ValueError",
        "org.apache.spark.SparkException",
        "\tat org.apache.spark.scheduler.DAGScheduler.abort(DAGScheduler.scala:2844)",
        "\tat java.base/java.lang.Thread.run(Thread.java:840)",
        "java.lang.NumberFormatException",
        "ConnectException: Connection refused",
        "(the rest of its output is left out, since it may hold rows' values)",
    ]


@pytest.mark.parametrize("output", ["", "\n \n"])
def test_of_a_process_without_output_nothing_is_reported(output: str) -> None:
    assert bugs.places(output) == ""


@pytest.mark.parametrize("code", [1, Exit.UNAVAILABLE, Exit.CONFIG, Exit.BUG, -9])
def test_the_words_of_the_spark_child_are_not_passed_on(code: int) -> None:
    error = failure(code, io.BytesIO(b""), io.BytesIO((PYTHON + JAVA).encode()))
    assert isinstance(error, CDCError)
    assert VALUE not in f"{error.what} {error.hint}"
    assert "NumberFormatException" in error.hint


def look_up(rows: dict[str, int]) -> int:
    try:
        return rows[VALUE]
    except KeyError as error:
        raise ValueError(VALUE) from error


def failed() -> Exception:
    """Return an error with a cause and a context that all quote the value."""
    with pytest.raises(ValueError, match=VALUE) as raised:
        look_up({})
    raised.value.add_note(VALUE)
    return raised.value


def test_a_bug_is_reported_by_its_types_and_stack_lines() -> None:
    reported = bugs.where(failed())
    assert VALUE not in reported
    assert reported.index("KeyError") < reported.index("ValueError")
    assert ", in look_up" in reported


def test_an_error_that_is_its_own_cause_is_reported_once() -> None:
    error = ValueError(VALUE)
    error.__cause__ = other = KeyError(VALUE)
    other.__context__ = error
    assert bugs.where(error) == "KeyError\nValueError\n"


def test_what_ends_the_process_is_reported_without_its_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("threading.excepthook", None)
    bugs.install()
    sys.excepthook(ValueError, failed(), None)
    reported = capsys.readouterr().err
    assert "a bug in Lockstep, in MainThread" in reported
    assert VALUE not in reported
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("lines", [True, False])
def test_a_log_line_has_no_message_of_an_exception(*, lines: bool) -> None:
    root = logging.getLogger("cdc")
    before = root.handlers[:], root.level, root.propagate
    stream = io.StringIO()
    if lines:
        stream.isatty = lambda: True  # type: ignore[method-assign]
    try:
        setup_logging("info", stream=stream)
        logging.getLogger("cdc.tests").error("failed", exc_info=failed())
    finally:
        root.handlers[:], root.propagate = before[0], before[2]
        root.setLevel(before[1])
    assert "KeyError" in stream.getvalue()
    assert VALUE not in stream.getvalue()


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (ValueError(f"Cast error: Cannot cast string '{VALUE}'"), "ValueError (cast error)"),
        (OSError(28, "No space left on device"), "OSError (no space left on device)"),
        (RuntimeError(f"403 Forbidden <Key>{VALUE}</Key>"), "RuntimeError (403 forbidden)"),
        (RuntimeError(VALUE), "RuntimeError"),
    ],
)
def test_of_a_librarys_error_the_type_and_the_cause_are_reported(
    error: Exception, reported: str
) -> None:
    assert gist(error) == reported


@pytest.mark.parametrize(
    ("output", "reported"),
    [
        (f'invalid input syntax for type integer: "{VALUE}"', "type integer: …"),
        (f'invalid input syntax for type integer: "a"{VALUE}"b"', "type integer: …"),
        (f'invalid input syntax for type integer: "{VALUE}\nx"', "type integer: …"),
        (f"ungültige Eingabesyntax: \u201e{VALUE}\u201c", "Eingabesyntax: …"),
        (f"syntaxe en entrée invalide : \u00ab {VALUE} \u00bb", "invalide : …"),
        ("division by zero", "division by zero"),
    ],
)
def test_postgres_errors_about_values_quote_none(output: str, reported: str) -> None:
    error = psycopg.errors.InvalidTextRepresentation(output)
    what = translate(error, "reading rows").what
    assert VALUE not in what
    assert what.endswith(reported)


def test_a_violated_constraint_is_reported_without_the_row() -> None:
    error = psycopg.errors.UniqueViolation(
        f"duplicate key value violates unique constraint\nDETAIL:  Key (email)=({VALUE}) exists."
    )
    assert VALUE not in translate(error, "writing").what


@pytest.mark.parametrize("what", ["PUT /x/_doc", "POST /_reindex", "_reindex into x", "_mget"])
def test_a_reason_of_opensearch_is_reported_of_a_new_index_only(what: str) -> None:
    why = Reason("mapper_parsing_exception", f"Preview of field's value: '{VALUE}'")
    error = refusal(400, why, what)
    assert VALUE not in f"{error.what} {error.hint}"
    assert "mapper_parsing_exception" in error.what
    assert "unknown setting" in refusal(400, Reason("x", "unknown setting"), "the index x").what
