"""How the stack's Java servers run: small heap, one collector thread, the quick compiler only.

The client compiler (C1) halves the CPU time of a short run and costs nothing that a demo would
notice. Logs are warnings on stdout; without a configuration the libraries would drop all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cdc.playground.servers.home import Home

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


def flags(home: Home, *, heap_mb: int) -> list[str]:
    """Return the flags, and write the configuration of logs that they name."""
    logs = home.run / "log4j2.xml"
    logs.write_text(_LOG4J, encoding="utf-8")
    return [
        "-Xms64m",
        f"-Xmx{heap_mb}m",
        "-Xss512k",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:-UsePerfData",
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={logs}",
    ]


def class_path(*folders: Path) -> str:
    """Return every jar by name: with a wildcard the order would depend on the file system."""
    return ":".join(str(jar) for folder in folders for jar in sorted(folder.glob("*.jar")))
