"""Write the reference pages from the code: `python -m scripts.reference`.

docs/CLI.md is every command's own help, docs/CONFIG.md the configuration's model, docs/METRICS.md
and two files of compose/ what is exported. A test compares them, so that none becomes outdated.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cdc.cli.main import COMMANDS, cdc
from cdc.config.meaning import OWNED_KAFKA_SETTINGS
from cdc.config.schema import ROOT, FieldPath, Schema, variable_of
from cdc.config.tables import Mask
from cdc.config.template import render
from cdc.errors import Exit
from cdc.operate import alerts
from cdc.operate.metric_table import EVERY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WIDTH = 100
_MADE = "<!-- Made by `python -m scripts.reference`: change the code, not this page. -->\n"

_ABOUT = """\
Every command prints what to do next, on stderr, so that its output can be piped. Errors are one
sentence and a remedy; only a bug prints places in the code.
"""

_EXITS = {
    Exit.OK: "done; stopped as asked",
    Exit.FAILED: "a check failed: `doctor`, `status`, `demo`; or a question was answered no",
    Exit.USAGE: "the command was typed wrongly",
    Exit.UNAVAILABLE: "Postgres, Kafka or another server does not answer",
    Exit.BUG: "a bug in Lockstep",
    Exit.TEMPORARY: "temporarily busy; try again",
    Exit.PERMISSION: "a server refuses access",
    Exit.CONFIG: "the configuration, or a gap, needs a person: a supervisor must not restart on it",
}


def cli_page() -> str:
    """Return docs/CLI.md."""
    parts = [
        "# Commands\n",
        _MADE,
        _ABOUT,
        "| exit code | meaning |\n| --- | --- |",
        *(f"| {code.value} | {meaning} |" for code, meaning in _EXITS.items()),
        "",
    ]
    for path, command in commands():
        context = click.Context(
            command,
            info_name=" ".join(path),
            terminal_width=_WIDTH,
            help_option_names=["-h", "--help"],
        )
        mark = "#" * min(4, 1 + len(path))
        parts.append(f"{mark} {' '.join(path)}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with its words, groups before their members."""
    yield ("cdc",), cdc
    for name in COMMANDS:
        command = cdc.get_command(click.Context(cdc), name)
        assert command is not None
        yield ("cdc", name), command
        if isinstance(command, click.Group):
            for word, member in command.commands.items():
                yield ("cdc", name, word), member


def config_page() -> str:
    """Return docs/CONFIG.md."""
    example = render(
        {
            "pipeline": "shop",
            "source.dsn": "postgresql://lockstep@localhost:5432/shop",
            "source.tables": ("public.*",),
            "log.bootstrap_servers": "localhost:9092",
        }
    )
    return "\n".join([_HEAD, *_rows(ROOT, (), {}), _REST, f"```yaml\n{example}```\n"])


_HEAD = f"""\
# Configuration

{_MADE}
One YAML file, `lockstep.yaml` in the current folder unless `--config` or `LOCKSTEP_CONFIG` says
otherwise. `cdc init` writes one, `cdc config check` checks it, `cdc config show` shows every
effective value and where it comes from, with secrets masked. Unknown names are errors.

| field | takes | default | environment | meaning |
| --- | --- | --- | --- | --- |"""

_REST = """
## Environment

The environment wins over the file. A field's variable is `LOCKSTEP_` and its path in capitals,
joined by `_`. Settings below `log.kafka` follow a double underscore, with `_` for each dot:
`LOCKSTEP_LOG_KAFKA__SASL_PASSWORD` sets `sasl.password`. Below `archive.storage` the name is taken
as it is (`…__AWS_REGION`), below `keyring.options` in small letters. Lists are separated by commas.
A variable that starts with a section's prefix and names no field is an error. What is below
`tables` and `followers` can be given in the file only, where any text may hold a `${VARIABLE}`.

## Tables, columns, rows

`source.tables` names what is captured and `source.exclude` what of it is left out. A section below
`tables` has the settings of one table, or with a pattern of many:

```yaml
tables:
  public.users:
    exclude: [password]              # or: columns: [id, name, ...]
    where: region = 'eu'             # the publication's row filter
    key: [tenant, id]                # instead of the primary key
    mask:
      email: {hmac: "${HMAC_KEY}"}   # the same value is the same string, everywhere
      phone: null
      name: {truncate: 1}
      salary: {fixed: 0}
  "*.*":
    exclude: [secret_*]
```

`cdc doctor` compares these with the database, and `cdc setup` puts them into the publication: run
it again after each change. docs/EVENTS.md describes the events that result.

## Followers

Each name below `followers` is a store that follows the log, with exactly one of `delta`, `redis`,
`opensearch`, `sql` and `plugin` (a store by a sink of another package); docs/FOLLOWERS.md describes
what it then contains.

```yaml
followers:
  mirror:
    delta: {path: s3a://lake/shop, history: [public.prices]}
  cache:
    tables: [public.users]
    redis:
      url: redis://:${REDIS_PASSWORD}@localhost:6379/0
      shapes:
        public.users: {key: "user:{id}", form: hash}
  copy:
    sql: {url: "postgresql://copy:${SQL_PASSWORD}@localhost/copy"}
  orders:
    mirror: mirror                   # whose tables the documents are made from
    opensearch: {url: "http://localhost:9200"}
    documents:
      orders:
        table: public.orders
        children:
          lines: {table: public.order_lines, by: {order_id: id}}
```

A single table is named in full (`schema.table`); `tables` takes patterns.

## Secrets

Any text may hold `${VARIABLE}` or `${file:PATH}`, which stand for the variable's value and the
file's text (without the newline at its end); `$${` stands for `${` itself. `source.password_file`
is read again at every connect. Relative paths start at the configuration file's folder. No command
shows secrets, and no log contains them (docs/SECURITY.md). A password in a URL is percent-encoded.

## Kafka settings that are ours

These are refused under `log.kafka`, since exactly-once depends on them:
OWNED.

## All fields in one file
"""


def _rows(section: Schema, at: FieldPath, seen: Mapping[type, str]) -> Iterator[str]:
    """Yield the fields of a section and of its subsections; a recursive one only once."""
    for name, field in section.fields.items():
        here = (*at, name)
        meaning = field.meta.description or ""
        below, under = field, here
        if field.has_sections and (entry := field.below("")) is not None:
            below, under = entry, (*here, _ENTRIES.get(here, "<name>"))
        if not below.fields or below.type is Mask:
            yield _row(here, field, field.expected, meaning)
        elif below.type in seen:
            takes = f"names, each with the fields of `{seen[below.type]}`"
            yield _row(here, field, takes, meaning)
        else:
            what = f"{name if here in _ENTRIES else 'names'}, each with the fields below"
            takes = what if field.is_map else "the fields below"
            if field.is_map or field.in_file_only:
                doc = meaning or (below.type.__doc__ or "").strip()
                yield _row(here, field, takes, doc)
            yield from _rows(below, under, {**seen, below.type: ".".join(under)})


_ENTRIES: dict[FieldPath, str] = {("tables",): "<table>", ("followers",): "<follower>"}


def _row(at: FieldPath, field: Schema, takes: str, meaning: str) -> str:
    if field.in_file_only or field.has_sections:
        variable = "in the file only"
    else:
        variable = f"`{variable_of(at)}{'__<NAME>' if field.is_map else ''}`"
    default = {} if field.is_map else field.default
    if field.required:
        shown = "**required**"
    elif isinstance(default, tuple):
        shown = f"`[{', '.join(default)}]`"
    else:
        shown = "" if default is None else f"`{default}`"
    cells = (f"`{'.'.join(at)}`", takes.replace("|", "\\|"), shown, variable, meaning)
    return f"| {' | '.join(cells)} |"


def _metrics_page() -> Iterator[str]:
    """Yield the parts of docs/METRICS.md."""
    yield from ("# Metrics and alerts\n", f"<!-- {alerts.MADE} -->\n")
    yield (
        "The daemon serves these at `http.listen`, `/metrics`, with Python's and the process's own."
        " Followers and webhooks have none: the\ndaemon shows what they report into the log, so"
        " there is one place to scrape, which also shows when a job has died. `cdc metrics"
        " rules`\nand `cdc metrics dashboard` print the files of [compose/](../compose/);"
        " adapt the limits.\n"
    )
    yield "## Alerts\n\n| alert | when | for | severity | meaning | to do |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for each in alerts.ALERTS:
        expr = each.expr.replace("|", "\\|")
        cells = (each.name, f"`{expr}`", each.lasts, each.severity, each.summary, each.what_to_do)
        yield f"| {' | '.join(cells)} |"
    yield "\n## Metrics\n\n| metric | kind | labels | meaning |\n| --- | --- | --- | --- |"
    for name, metric in sorted(EVERY.items()):
        ending = "_total" if metric.kind == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{name}{ending}` | {metric.kind} | {labels} | {metric.meaning} |"


def pages() -> dict[str, str]:
    """Return the pages, and the files made from the metrics, by their path."""
    owned = ", ".join(f"`{name}`" for name in sorted(OWNED_KAFKA_SETTINGS))
    return {
        "docs/CLI.md": cli_page(),
        "docs/CONFIG.md": config_page().replace("OWNED", owned),
        "docs/METRICS.md": "\n".join(_metrics_page()) + "\n",
        "compose/prometheus-rules.yaml": alerts.rules(),
        # A chart has files of its own folder only.
        "compose/helm/lockstep/files/prometheus-rules.yaml": alerts.rules(),
        "compose/grafana-dashboard.json": alerts.dashboard(),
    }


def main() -> None:
    """Write the pages below the current folder."""
    for name, text in pages().items():
        Path(name).write_text(text, encoding="utf-8")
        click.echo(f"wrote {name}")


if __name__ == "__main__":
    main()
