"""Every command explains itself, and every outcome has its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from cdc.cli import main
from cdc.cli.options import Duration
from cdc.errors import CDCError, ConfigError, Exit, PermissionDeniedError, UnavailableError
from scripts import reference

ROOT = Path(__file__).parents[2]
COMMANDS = dict(reference.commands())
LEAVES = {path: each for path, each in COMMANDS.items() if not isinstance(each, click.Group)}

_HELP = """
import sys
from cdc.cli.main import run
code = run(["--help"])
print(*sorted(sys.modules), file=sys.stderr)
sys.exit(code)
"""
_TALK = """
import sys, click
from cdc.cli import main
def body():
    while True:
        click.echo("x" * 1000)
main.LazyCommands.get_command = lambda *_: click.Command("x", callback=body)
sys.exit(main.run(["x"]))
"""
_ASK = """
import sys, click
from cdc.cli import main
from cdc.cli.options import confirm
main.LazyCommands.get_command = lambda *_: click.Command("x", callback=lambda: confirm("Drop it?"))
sys.exit(main.run(["x"]))
"""


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_says_what_it_does(path: tuple[str, ...]) -> None:
    text = COMMANDS[path].help or ""
    assert text.split("\n")[0].endswith((".", ":"))


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_shows_an_example_that_parses(path: tuple[str, ...]) -> None:
    epilog = LEAVES[path].epilog or ""
    assert "Example" in epilog
    examples = [line.strip() for line in epilog.splitlines() if line.strip().startswith("cdc ")]
    assert any(line.startswith(" ".join(path)) for line in examples)
    for line in examples:
        # The rest of the line is for the shell.
        words = line.split("|")[0].split(" > ")[0].split("#")[0].split()
        if tuple(words[: len(path)]) != path:
            continue
        # Raises if an option or argument does not fit the command.
        LEAVES[path].make_context(path[-1], words[len(path) :])


# These print no structured data: a daemon's log, SQL to be piped, a raw value or log.
WITHOUT_JSON = {
    ("run",),
    ("console",),
    ("metrics", "rules"),
    ("metrics", "dashboard"),
    ("dead", "show"),
    ("migrations", "sql"),
    ("local", "logs"),
}


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_that_prints_data_prints_json(path: tuple[str, ...]) -> None:
    options = {option for parameter in LEAVES[path].params for option in parameter.opts}
    assert ("--json" in options) == (path[1:] not in WITHOUT_JSON)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    for parameter in LEAVES[path].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


@pytest.mark.parametrize(("name", "text"), reference.pages().items())
def test_the_reference_pages_say_what_the_code_says(name: str, text: str) -> None:
    written = (ROOT / name).read_text(encoding="utf-8")
    assert written == text, "run: python -m scripts.reference"


def test_help_comes_at_once_because_nothing_heavy_is_imported() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _HELP,
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert "Commands:" in done.stdout
    heavy = {"psycopg", "confluent_kafka", "yaml", "msgspec", "prometheus_client", "rich"}
    assert not heavy & set(done.stderr.split())


def _fail(error: BaseException) -> click.Command:
    def body() -> None:
        raise error

    return click.Command("fail", callback=body)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("a is wrong", hint="fix a"), 78, "cdc: a is wrong\nwhat to do: fix a\n"),
        (UnavailableError("no answer", hint="wait"), 69, "cdc: no answer"),
        (PermissionDeniedError("no", hint="ask"), 77, "cdc: no"),
        (click.UsageError("typo"), 2, "typo"),
        (KeyboardInterrupt(), 130, "cdc: interrupted"),
    ],
)
def test_an_error_is_a_sentence_a_remedy_and_an_exit_code(
    error: BaseException,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(main.LazyCommands, "get_command", lambda *_: _fail(error))
    assert main.run(["fail"]) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_only_a_bug_says_where_it_is_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main.LazyCommands, "get_command", lambda *_: _fail(KeyError("a value")))
    assert main.run(["fail"]) == Exit.BUG
    error = capsys.readouterr().err
    assert "KeyError" in error
    assert "a value" not in error
    assert ", in run" in error
    assert "this is a bug in Lockstep" in error
    assert "what to do: report it" in error


def test_a_reader_that_closes_our_output_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _TALK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == Exit.OK


def test_a_typo_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["stauts"]) == Exit.USAGE
    assert "No such command 'stauts'" in capsys.readouterr().err


def test_init_writes_a_file_that_checks_and_never_overwrites_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lockstep.yaml"
    assert main.run(["init", str(path), "--pipeline", "mine"]) == Exit.OK
    assert "next: edit" in capsys.readouterr().err
    assert path.stat().st_mode & 0o077 == 0
    assert main.run(["config", "check", "-c", str(path)]) == Exit.OK
    assert main.run(["init", str(path)]) == Exit.CONFIG
    assert "exists already" in capsys.readouterr().err
    assert "pipeline: mine" in path.read_text(encoding="utf-8")
    path.chmod(0o644)
    assert main.run(["init", str(path), "--force"]) == Exit.OK
    assert path.stat().st_mode & 0o077 == 0
    assert "pipeline: shop" in path.read_text(encoding="utf-8")


def test_config_show_prints_where_a_value_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lockstep.yaml"
    main.run(["init", str(path), "--dsn", "postgresql://me:hunter2@localhost/shop"])
    monkeypatch.setenv("LOCKSTEP_LOG_PARTITIONS", "8")
    assert main.run(["config", "show", "-c", str(path)]) == Exit.OK
    shown = capsys.readouterr().out
    assert "hunter2" not in shown
    partitions = next(line for line in shown.splitlines() if line.startswith("log.partitions"))
    assert partitions.split()[1:] == ["8", "LOCKSTEP_LOG_PARTITIONS"]


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 2)])
def test_only_a_yes_is_a_yes(answer: str, code: int) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _ASK,
        ],
        input=answer,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == code
    assert ("nothing was changed" in done.stderr) == (code != 0)


def test_every_error_of_ours_has_an_exit_code_of_the_table() -> None:
    def below(kind: type[CDCError]) -> list[type[CDCError]]:
        return [kind, *(each for child in kind.__subclasses__() for each in below(child))]

    for kind in below(CDCError):
        assert kind.exit_code in Exit
        assert kind.exit_code not in (Exit.OK, Exit.USAGE)


def test_a_duration_has_a_unit_and_a_number_alone_is_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Duration().convert("5", None, None) == Duration().convert("5s", None, None) == 5.0
    assert main.run(["wait", "--timeout", "5 sec"]) == Exit.USAGE
    assert "write it like 60s or 5m (a number alone: seconds)" in capsys.readouterr().err
    assert main.run(["wait", "--help"]) == Exit.OK
    assert "or a number of seconds" in " ".join(capsys.readouterr().out.split())
