"""Programs under measurement: started with output to a file, ended by their process id."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Self

from benchmarks.failure import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.fixtures.spark_cluster import Cluster

_STOP_SECONDS = 30.0
_LOG_TAIL_CHARACTERS = 3000


class Program:
    """One running program. A context manager: it never outlives the block."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise if the program has ended, so that a measurement does not wait for it forever."""
        code = self._process.poll()
        if code is not None:
            raise self._ended(code)

    def wait(self, seconds: float) -> None:
        """Wait for the program to exit with 0."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(
                f"{self.name} is not done after {seconds:.0f} s",
                hint=f"its output ends so:\n{self._tail()}",
            ) from error
        if code != 0:
            raise self._ended(code)

    def stop(self) -> None:
        """Ask the program to stop, and kill it if it does not."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running():
            self.stop()

    def output(self) -> str:
        """Return what the program has written so far."""
        return self._log.read_text(errors="replace")

    def _ended(self, code: int) -> BenchmarkError:
        return BenchmarkError(
            f"{self.name} ended with exit code {code} while it was measured",
            hint=f"its output ends so:\n{self._tail()}",
        )

    def _tail(self) -> str:
        return self.output()[-_LOG_TAIL_CHARACTERS:]


def follower_on(cluster: Cluster, config: Path, *options: str) -> Program:
    """Return the job of followers, as a cluster's user submits it."""
    return Program(
        "the follower on a cluster",
        [*cluster.submitting("follow"), "--config", str(config), *options],
        cluster.folder / "follow.log",
        environment={**cluster.env, "TMPDIR": str(cluster.folder)},
    )
