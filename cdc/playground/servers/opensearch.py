"""OpenSearch 2.19 as one node, on loopback: the newest that runs on Java 17.

Its jars have no start script and no main class that loads plugins from the class path; so
OpenSearchNode.java, next to this module, is compiled once, by Janino, which needs no JDK.
"""

from __future__ import annotations

import http.client
import subprocess
import zipfile
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Final

from cdc.errors import LocalStackError
from cdc.playground.servers.home import ServerState
from cdc.playground.servers.jvm import JavaServer, class_path
from cdc.playground.servers.ports import LOOPBACK
from cdc.runtime.java import find_java

_PLUGINS: Final = (
    "org.opensearch.transport.Netty4Plugin",
    "org.opensearch.index.reindex.ReindexPlugin",
    "org.opensearch.painless.PainlessPlugin",
    "org.opensearch.index.mapper.MapperExtrasPlugin",
)
# Prevents the creation of indexes on a runtime without Thai word segmentation.
_ANALYSIS_PLUGIN: Final = "org.opensearch.analysis.common.CommonAnalysisPlugin"

_SETTINGS: Final = {
    "cluster.name": "lockstep",
    "node.name": "local",
    "network.host": LOOPBACK,
    "discovery.type": "single-node",
    "action.auto_create_index": "false",
    "node.processors": "2",
    # A disk that is nearly full must not make a demo's indexes read-only.
    "cluster.routing.allocation.disk.threshold_enabled": "false",
}
_PROBE_SECONDS: Final = 3.0


class OpenSearch(JavaServer):
    """One node per home; its second port is the transport's, which is not used."""

    name: ClassVar[str] = "opensearch"
    default_version: ClassVar[str] = "2.19.5"
    ports_needed: ClassVar[int] = 2

    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def prepare(self, state: ServerState) -> None:
        del state
        self._main_jar()
        for folder in ("config", "tmp"):
            (self.data / folder).mkdir(parents=True, exist_ok=True)

    def command(self, state: ServerState) -> list[str]:
        settings = {
            **_SETTINGS,
            "path.home": str(self.data),
            "path.data": str(self.data / "data"),
            "path.logs": str(self.data / "logs"),
            "http.port": str(state.ports[0]),
            "transport.port": str(state.ports[1]),
            **state.settings,
        }
        return self.server_command(
            "-XX:MaxDirectMemorySize=64m",
            f"-Djava.io.tmpdir={self.data / 'tmp'}",
            "-Dio.netty.allocator.type=unpooled",
            "-Dio.netty.noUnsafe=true",
            "OpenSearchNode",
            ",".join(_PLUGINS if find_java().trimmed else (*_PLUGINS, _ANALYSIS_PLUGIN)),
            *(f"{name}={value}" for name, value in settings.items()),
        )

    def class_path(self) -> str:
        return f"{self._main_jar()}:{super().class_path()}"

    def is_ready(self, state: ServerState) -> bool:
        connection = http.client.HTTPConnection(LOOPBACK, state.ports[0], timeout=_PROBE_SECONDS)
        try:
            connection.request("GET", "/_cluster/health?wait_for_status=yellow&timeout=1s")
            return connection.getresponse().status == http.HTTPStatus.OK
        except http.client.HTTPException:
            return False
        finally:
            connection.close()

    def _main_jar(self) -> Path:
        # A jar, not a folder of classes: class data sharing refuses folders.
        libraries = self.cache.fetch("opensearch")
        compiler = self.cache.fetch("janino")

        def compile_main(target: Path) -> None:
            self.progress.step(self.name, "compiling its main class")
            source = files("cdc.playground.servers").joinpath("OpenSearchNode.java")
            with as_file(source) as path, TemporaryDirectory() as out:
                _compile(path, Path(out), class_path(libraries), class_path(compiler))
                with zipfile.ZipFile(target, "w") as jar:
                    for made in sorted(Path(out).glob("*.class")):
                        jar.write(made, made.name)

        return self.cache.derive(f"{libraries.name}-main.jar", compile_main)


def _compile(source: Path, out: Path, libraries: str, compiler: str) -> None:
    """Compile one Java file, without lambdas and generic methods, which Janino does not support."""
    demo = "org.codehaus.commons.compiler.samples.CompilerDemo"
    command = [
        *(str(find_java().program), "-Xmx256m", "-XX:+UseSerialGC", "-cp", compiler, demo),
        *("-d", str(out), "-classpath", libraries, str(source)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not list(out.glob("*.class")):
        raise LocalStackError(
            f"{source.name} does not compile: {(done.stdout + done.stderr).strip()}",
            hint="report it with the version of Java",
        )
