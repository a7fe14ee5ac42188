"""Ours: `cdc setup`, then `cdc run`, as a user starts them, always with exactly-once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from benchmarks.backlog import PUBLICATION
from benchmarks.failure import BenchmarkError
from benchmarks.programs import Program
from cdc.keyring import file as keyring

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.subject import RunContext

PARTITIONS = 4
_SETUP_SECONDS = 600.0  # thousands of tables take minutes
# The console script's own entry point, with this interpreter regardless of PATH.
CDC = (sys.executable, "-c", "from cdc.cli.main import main; main()")
TREE = Path(__file__).parent.parent
TRACED = (sys.executable, "-m", "benchmarks.traced_daemon")


def trace_path(place: RunContext, run: str) -> Path:
    """Return where a traced daemon writes its trace when it ends."""
    return place.folder / run / "trace.json"


def config_path(place: RunContext, run: str) -> Path:
    """Return where a run's configuration is once it is prepared."""
    return place.folder / run / "lockstep.yaml"


def write_config(
    place: RunContext,
    run: str,
    tables: tuple[str, ...],
    source: Mapping[str, str] | None = None,
    snapshot: Mapping[str, object] | None = None,
    kafka: Mapping[str, str | int] | None = None,
    partitions: int = PARTITIONS,
    log: Mapping[str, str | int] | None = None,
) -> Path:
    """Write the configuration of a run into its folder; without `snapshot` the run takes none."""
    path = config_path(place, run)
    config = {
        "pipeline": run,
        "source": {
            "dsn": f"postgresql://postgres@127.0.0.1:{place.postgres_port}/bench",
            "slot": run,
            "publication": PUBLICATION,
            "tables": [f"public.{table}" for table in tables],
            **(source or {}),
        },
        "log": {
            "bootstrap_servers": place.bootstrap,
            "partitions": partitions,
            "kafka": dict(kafka or {}),
            **(log or {}),
        },
        # Nothing queries its health here, and a fixed port may be in use.
        "http": {"listen": ""},
        "snapshot": snapshot or {"mode": "never"},
    }
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@dataclass(frozen=True)
class Daemon:
    """The daemon with its defaults, except for settings of `source`, `log` and `log.kafka`."""

    name: str = "lockstep"
    source: Mapping[str, str] = field(default_factory=dict)
    kafka: Mapping[str, str | int] = field(default_factory=dict)
    partitions: int = PARTITIONS
    log: Mapping[str, str | int] = field(default_factory=dict)
    traced: bool = False  # whether it writes the times of its batches' stages to `trace_path`
    program: tuple[str, ...] = CDC
    tree: Path = TREE  # the checkout whose code runs
    encrypted: Mapping[str, str] = field(default_factory=dict)  # by column, whose key encrypts it

    @property
    def settings(self) -> Mapping[str, str | int]:
        source = {f"source.{name}": value for name, value in self.source.items()}
        kafka = {f"log.kafka.{name}": value for name, value in self.kafka.items()}
        log = {f"log.{name}": value for name, value in self.log.items()}
        masks = {f"encrypt.{name}": subject for name, subject in self.encrypted.items()}
        return {"log.partitions": self.partitions, **source, **kafka, **log, **masks}

    def topic(self, run: str, table: str) -> str:
        return f"{run}.public.{table}"

    def prepare(self, place: RunContext, run: str, tables: tuple[str, ...]) -> None:
        """Create the topics and take the slot at the backlog's start."""
        folder = place.folder / run
        folder.mkdir()
        config = write_config(
            place,
            run,
            tables,
            self.source,
            kafka=self.kafka,
            partitions=self.partitions,
            log=self.log,
        )
        if self.encrypted:
            self._encrypt(config, tables)
        command = [*CDC, "setup", "--config", str(config), "--adopt-slot"]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_SETUP_SECONDS,
                check=False,
                env=self._environment(),
                cwd=self.tree,
            )
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(
                f"cdc setup is not done after {_SETUP_SECONDS:.0f} s",
                hint="look at the broker's log in the folder that --keep leaves",
            ) from error
        if done.returncode != 0:
            raise BenchmarkError(
                f"cdc setup ended with exit code {done.returncode}",
                hint=f"it printed: {done.stdout.strip()} {done.stderr.strip()}",
            )

    def start(self, place: RunContext, run: str) -> Program:
        folder = place.folder / run
        program = [*TRACED, str(trace_path(place, run))] if self.traced else self.program
        return Program(
            self.name,
            [*program, "run", "--config", str(config_path(place, run))],
            folder / "log",
            # Put what it spills to disk into the folder that is measured.
            environment=self._environment() | {"TMPDIR": str(folder)},
            folder=self.tree,
        )

    def _encrypt(self, path: Path, tables: tuple[str, ...]) -> None:
        """Make a keyring, and have the columns encrypted by its keys."""
        place = path.with_name("keys.sqlite")
        keyring.create(place)
        masks = {name: {"encrypt": subject} for name, subject in self.encrypted.items()}
        config = yaml.safe_load(path.read_text())
        config["keyring"] = {"path": str(place)}
        config["tables"] = {f"public.{table}": {"mask": masks} for table in tables}
        path.write_text(yaml.safe_dump(config, sort_keys=False))

    def _environment(self) -> dict[str, str]:
        """Return one in which the checkout's code is found before what is installed."""
        return {**os.environ, "PYTHONPATH": str(self.tree)}
