"""Show what arrives: a picture that is redrawn on a terminal, plain lines anywhere else.

Both get the same calls: `say` for things that happen once, `show` on every turn. Drawing costs a
few milliseconds, four times a second, so that the view does not slow down what it shows.
"""

from __future__ import annotations

import sys
import termios
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.log.follower_reports import FollowerRecord
    from cdc.playground.demo.flow import Flow, Kill

_FRAMES_PER_SECOND: Final = 4
_LINE_SECONDS: Final = 2.0
_KILLS_SHOWN: Final = 5
# Tables and events are shown side by side from this width on.
_WIDE_COLUMNS: Final = 110
_FIXED_ROWS: Final = 11
_OP_STYLES: Final = {
    "read": "blue",
    "insert": "green",
    "update": "yellow",
    "delete": "red",
    "truncate": "magenta",
}
_COUNTED: Final = (("r", "read"), ("c", "insert"), ("u", "update"), ("d", "delete"))
_STATE_STYLES: Final = {"streaming": "green", "following": "green", "down": "bold red"}
_STOPPED_STYLES: Final = {"halted": "bold red", "silent": "bold red"}


class Scene(NamedTuple):
    """One moment of the run."""

    flow: Flow
    title: str
    began: float  # seconds since the epoch, when changes began to be written
    now: float
    written: int  # changes that the generator has seen committed
    daemon: str  # the state that it reports
    daemon_pid: int | None
    daemon_starts: int


class DemoView(ABC):
    """What both ways of showing share."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0
        self._restored = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Print something that happened; only a terminal's lines are wrapped."""
        wrap = not self._console.is_terminal
        self._console.print(text, highlight=False, markup=False, soft_wrap=wrap)

    @abstractmethod
    def show(self, scene: Scene) -> None:
        """Show the current state; called more often than anything is drawn."""

    def close(self) -> None:
        """Restore the terminal."""
        self._restored.close()


class LineView(DemoView):
    """Plain lines: for logs, pipes and CI."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._shown: set[str] = set()

    def show(self, scene: Scene) -> None:
        for kill in scene.flow.kills:
            about = f"{kill.at - scene.began:6.1f} s  kill -9 {kill.what}"
            if kill.recovered_seconds is not None:
                about += f": {recovery(kill, scene.now)}"
            if about not in self._shown:
                self._shown.add(about)
                self.say(about)
        if not scene.flow.tables or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_SECONDS
        with scene.flow.lock:
            text = line(scene)
        self.say(text)


class ScreenView(DemoView):
    """A picture redrawn in place; the lines of `say` scroll away above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False)

    def show(self, scene: Scene) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1 / _FRAMES_PER_SECOND
        with scene.flow.lock:
            picture = draw(scene, self._console.width, self._console.height)
        if not self._live.is_started:
            self._restored.enter_context(_hidden_control_keys())
            self._restored.enter_context(self._live)
        self._live.update(picture, refresh=True)


@contextmanager
def _hidden_control_keys() -> Iterator[None]:
    """Keep the terminal from echoing `^C` into the picture, which would push it down a line."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    changed = termios.tcgetattr(sys.stdin)
    changed[3] &= ~termios.ECHOCTL  # the local modes
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def line(scene: Scene) -> str:
    """Return the current state as one line."""
    flow, now = scene.flow, scene.now
    late = flow.lateness_ms(now)
    rows = f"{grouped(flow.rows_read)} rows and " if flow.rows_read else ""
    return (
        f"{now - scene.began:6.1f} s  {rows}{grouped(flow.changes.total)} changes in the log"
        f"  {flow.changes.per_second(now):.0f}/s"
        f"  frontier {flow.frontier.lsn if flow.frontier else '-'}"
        f"  late {f'{late[0]:.0f} ms (p99 {late[1]:.0f})' if late else '-'}"
        f"  {flow.transactions.per_second(now):.0f} Kafka transactions/s"
        f"  daemon {scene.daemon}"
    ) + "".join(
        f"  {name} {_state(each)}, lag {flow.lag(each)[0]} events" if each else f"  {name} starting"
        for name, each in sorted(flow.followers.items())
    )


def draw(scene: Scene, width: int, height: int) -> RenderableType:
    """Return the current state as a picture for a terminal of that size."""
    kills = [_kill(scene, kill) for kill in scene.flow.kills[-_KILLS_SHOWN:]]
    below: list[RenderableType] = [Text(), *kills] if kills else []
    if scene.flow.followers:
        below = [Text(), _followers(scene.flow), *below]
    tables, body = _tables(scene), list[RenderableType]()
    if width >= _WIDE_COLUMNS:
        columns = Table.grid(padding=(0, 3), expand=True)
        columns.add_column()
        columns.add_column(ratio=1)
        columns.add_row(tables, _events(scene.flow, scene.flow.last.maxlen or 0))
        body.append(columns)
    else:
        # The border, the headers of tables and events, the blank lines and the two lines below.
        followers = len(scene.flow.followers)
        room = height - tables.row_count - len(kills) - _FIXED_ROWS
        room -= followers + 2 if followers else 0
        body.append(tables)
        if room > 0:
            body += [Text(), _events(scene.flow, room)]
    body += [Text(), _totals(scene), *below]
    return Panel(Group(*body), title=scene.title, title_align="left", border_style="cyan")


def _tables(scene: Scene) -> Table:
    flow, now = scene.flow, scene.now
    shown = Table(box=None, padding=(0, 1), header_style="bold")
    shown.add_column("table", min_width=9)
    for name in ("changes", "/s", *(word for _, word in _COUNTED)):
        shown.add_column(name, justify="right", min_width=5)
    for name in sorted(flow.tables):
        table = flow.tables[name]
        shown.add_row(
            name,
            grouped(table.rate.total),
            f"{table.rate.per_second(now):.0f}",
            *(Text(grouped(table.ops[op]), _OP_STYLES[word]) for op, word in _COUNTED),
        )
    shown.add_row(
        "in the log",
        grouped(flow.changes.total),
        f"{flow.changes.per_second(now):.0f}",
        style="bold",
    )
    return shown


def _events(flow: Flow, count: int) -> Table:
    shown = Table(box=None, padding=(0, 1), header_style="bold", expand=True)
    shown.add_column("seq", justify="right", min_width=7)
    shown.add_column("op", min_width=8)
    shown.add_column("table", min_width=8)
    shown.add_column("key", no_wrap=True, overflow="ellipsis", ratio=1)
    shown.add_column("late", justify="right", min_width=8)
    # Partitions are read one after another: the event that arrived last is not always the newest.
    for each in sorted(flow.last, key=lambda each: each.seq)[-count:]:
        style = _OP_STYLES.get(each.op, "")
        shown.add_row(
            str(each.seq), Text(each.op, style), each.table, each.key, f"{each.late_ms:.0f} ms"
        )
    return shown


def _totals(scene: Scene) -> Group:
    flow, now = scene.flow, scene.now
    late = flow.lateness_ms(now)
    log = _spaced(
        _labelled("frontier", str(flow.frontier.lsn) if flow.frontier else "none yet"),
        _labelled("seq", grouped(flow.frontier.seq) if flow.frontier else "-"),
        _labelled("late", f"{late[0]:.0f} ms (p99 {late[1]:.0f})" if late else "-"),
        _labelled("Kafka tx", f"{flow.transactions.per_second(now):.0f}/s"),
    )
    who = f"pid {scene.daemon_pid}" if scene.daemon_pid else "no process"
    again = f", start {scene.daemon_starts}" if scene.daemon_starts > 1 else ""
    daemon = _spaced(
        _labelled("daemon", scene.daemon, _STATE_STYLES.get(scene.daemon, "yellow"))
        + Text(f" ({who}{again})", "dim"),
        # The generator reports four times a second, so the log may be ahead of its count.
        _labelled("not yet in the log", grouped(max(0, scene.written - flow.changes.total))),
        Text(f"{now - scene.began:.0f} s", "dim"),
    )
    return Group(log, daemon)


def _followers(flow: Flow) -> Table:
    shown = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("follower", "store", "state"):
        shown.add_column(name, no_wrap=True)
    for name in ("applied", "lag", "events", "/s", "batch"):
        shown.add_column(name, justify="right", min_width=5, no_wrap=True)
    for name, each in sorted(flow.followers.items()):
        if each is None:
            shown.add_row(name, "", Text("starting", "yellow"))
            continue
        state = _state(each)
        style = _STATE_STYLES.get(state) or _STOPPED_STYLES.get(state, "yellow")
        events, seconds = flow.lag(each)
        shown.add_row(
            name,
            each.store,
            Text(state.replace("_", " "), style),
            str(each.lsn),
            f"{seconds:.1f} s" if each.seq else "-",
            Text(grouped(events), "" if events else "dim"),
            f"{each.events_per_second:.0f}",
            f"{each.batch_seconds:.1f} s",
        )
    return shown


def _state(follower: FollowerRecord) -> str:
    """Return the state that a follower reports, or that it has not reported for long."""
    over = follower.state in {"halted", "stopped"}
    return follower.state if over or follower.runs else "silent"


def _spaced(*parts: Text) -> Text:
    return Text("   ", no_wrap=True, overflow="ellipsis").join(parts)


def _labelled(label: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, style))


def _kill(scene: Scene, kill: Kill) -> Text:
    return Text.assemble(
        (f"{kill.at - scene.began:6.1f} s  ", "dim"),
        (f"kill -9 {kill.what}", "bold red"),
        ("  ", ""),
        (recovery(kill, scene.now), "green" if kill.recovered_seconds is not None else "yellow"),
    )


def recovery(kill: Kill, now: float) -> str:
    """Return in words whether and how fast a kill was recovered from."""
    if kill.recovered_seconds is None:
        return f"not back for {now - kill.at:.1f} s"
    return f"flowing again after {kill.recovered_seconds:.1f} s"


def grouped(number: int) -> str:
    """Return a number with its thousands separated."""
    return f"{number:,}".replace(",", " ")
