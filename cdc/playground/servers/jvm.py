"""How the stack's Java servers run: small heap, one collector thread, the quick compiler only.

The client compiler (C1) halves the CPU time of a short run and costs nothing that a demo would
notice. Logs are warnings on stdout; without a configuration the libraries would drop all of them.

The first start on a machine is preceded by one that makes the archive of the server's classes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from cdc.errors import LocalStackError
from cdc.playground.servers.home import Home
from cdc.playground.servers.server import EmbeddedServer
from cdc.runtime import class_archive
from cdc.runtime.java import find_java
from cdc.runtime.progress import Progress

_LOG4J: Final = """\
<Configuration status="WARN">
  <Appenders>
    <Console name="out" target="SYSTEM_OUT">
      <PatternLayout pattern="%d{ISO8601} %p %c{1.} %m%n"/>
    </Console>
  </Appenders>
  <Loggers>
    <Root level="WARN"><AppenderRef ref="out"/></Root>
  </Loggers>
</Configuration>
"""

# A trial server ends by then, also if this process was killed meanwhile.
_TRIAL: Final = ("timeout", "300")


class JavaServer(EmbeddedServer):
    """A server that runs on Java."""

    heap_mb: int = 256
    _made: Path | None = None  # the archive that this server writes when it stops

    def class_path(self) -> str:
        """Return its jars, of which this machine has one archive."""
        return class_path(self.cache.fetch(self.name))

    def server_command(self, *arguments: str) -> list[str]:
        """Return the command line of the server itself: flags, if any, its main class and more."""
        if self._made is not None:
            return [*_TRIAL, *self.java_command(*class_archive.making(self._made), *arguments)]
        name = class_archive.file_name(self.name, find_java(), self.class_path())
        archive = self.cache.derive(name, self._make_archive)
        return self.java_command(*class_archive.using(archive), *arguments)

    def java_command(self, *arguments: str) -> list[str]:
        """Return the command line that runs a class of its jars."""
        return [
            str(find_java().program),
            *_flags(self.home, heap_mb=self.heap_mb),
            *("-cp", self.class_path()),
            *arguments,
        ]

    def _make_archive(self, target: Path) -> None:
        """Start and stop another one in a folder of its own; the file is empty if that fails."""
        self.progress.step(self.name, "its first start here: preparing faster ones")
        with TemporaryDirectory() as folder:
            trial = type(self)(Home(Path(folder)), self.cache, Progress())
            trial._made = target  # noqa: SLF001 - its own class
            trial.home.make()
            with suppress(LocalStackError):
                trial.start()
            trial.state.process.signal(trial.stop_signal)
            if not trial.state.process.wait(trial.stop_seconds):
                trial.kill()
                target.unlink(missing_ok=True)
        target.touch()


def log_configuration(home: Home) -> Path:
    """Write the configuration of logs; return its file."""
    written = home.run / "log4j2.xml"
    written.write_text(_LOG4J, encoding="utf-8")
    return written


def _flags(home: Home, *, heap_mb: int) -> list[str]:
    return [
        "-Xms64m",
        f"-Xmx{heap_mb}m",
        "-Xss512k",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:-UsePerfData",
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={log_configuration(home)}",
    ]


def class_path(*folders: Path) -> str:
    """Return every jar by name: with a wildcard the order would depend on the file system."""
    return ":".join(str(jar) for folder in folders for jar in sorted(folder.glob("*.jar")))
