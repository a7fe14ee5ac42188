"""Whether this version can take over a pipeline, and whether the version before still could after.

From the formats in the log (`cdc.operate.formats`), and in the archive, its bases and OpenSearch,
which a process of `jobs` reads. Other stores have no format of ours, and are not read. Nothing is
changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc import __version__
from cdc.errors import Exit
from cdc.operate import formats
from cdc.operate.formats import KindFound
from cdc.runtime import extras, spark

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from cdc.config import Config

_STORES_SECONDS: Final = 120.0


class UpgradeCheck(NamedTuple):
    """What was found, and the stores of which nothing is known, with the reason."""

    found: tuple[KindFound, ...]
    unread: tuple[str, ...] = ()

    @property
    def refused(self) -> list[KindFound]:
        """What this version would refuse."""
        return [each for each in self.found if not each.is_readable]

    @property
    def rising(self) -> list[KindFound]:
        """What it will write in a newer format than there is."""
        return [each for each in self.found if each.is_readable and each.will_rise]

    @property
    def exit_code(self) -> Exit:
        return Exit.CONFIG if self.refused else Exit.OK

    def fields(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "version": __version__,
            "can_run": not self.refused,
            # What has not risen was written by this format's version, or a newer one.
            "can_go_back": not self.refused and not self.rising,
            "kinds": [
                each._asdict() | {"readable": each.is_readable, "will_rise": each.will_rise}
                for each in self.found
            ],
            "not_checked": list(self.unread),
        }


def check(config: Config, path: Path) -> UpgradeCheck:
    """Return what this version would find; `path` is the configuration's file. Blocks.

    Raises UnavailableError if the brokers do not answer, ConfigError if the log has nothing of this
    pipeline.
    """
    found = formats.read(config)
    stored, unread = _stored(config, path)
    return UpgradeCheck((*found, *stored), unread)


def stores(config: Config) -> list[str]:
    """Return the stores that have a format of ours, as they are named in the configuration."""
    names = ["archive"] if config.archive.path is not None else []
    return names + [
        f"followers.{name}" for name, each in config.followers.items() if each.opensearch
    ]


def _stored(config: Config, path: Path) -> tuple[list[KindFound], tuple[str, ...]]:
    """Return what stores have, and those that could not be read."""
    wanted = stores(config)
    if not wanted:
        return [], ()
    lacking = _lacking(wanted)
    if lacking:
        what = f"needs lockstep-cdc[{lacking}]: run this where the followers run"
        return [], tuple(f"{name}: {what}" for name in wanted)
    command = [sys.executable, str(spark.job("stored_formats")), "--config", str(path.absolute())]
    try:
        done = subprocess.run(  # noqa: S603 - our own job
            command, capture_output=True, text=True, timeout=_STORES_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        return [], tuple(f"{name}: no answer in {_STORES_SECONDS:.0f} s" for name in wanted)
    except subprocess.CalledProcessError as error:
        why = " ".join(error.stderr.split())[-400:]
        return [], tuple(f"{name}: {why}" for name in wanted)
    answer = json.loads(done.stdout)
    return [KindFound(**each) for each in answer["kinds"]], tuple(answer["not_checked"])


def _lacking(wanted: Collection[str]) -> str:
    """Return the extras that are missing here to read these stores."""
    needed = {"spark"} | {"opensearch" for each in wanted if each != "archive"}
    return ",".join(sorted(each for each in needed if not extras.is_installed(each)))
