"""Stop a stack when the process that it is tied to has ended, in any way.

Reads a pipe that only that process writes to, and which therefore closes with it, also by SIGKILL:
`python -m cdc.playground.servers.watcher HOME`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cdc.playground.servers.stack import LocalStack


def main() -> None:
    home = Path(sys.argv[1])
    sys.stdin.buffer.read()
    LocalStack(home).down()


if __name__ == "__main__":
    main()
