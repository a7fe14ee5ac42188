"""Write the reference pages from the code: `python -m cdc.cli.reference`.

docs/CLI.md is every command's own help, docs/CONFIG.md the configuration's model. A test compares
both with the files, so that neither becomes outdated.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_origin

import click
import msgspec

from cdc.cli.main import COMMANDS, cdc
from cdc.config import nested
from cdc.config.check import expected
from cdc.config.followers import Follower
from cdc.config.layers import known_paths, variable_of
from cdc.config.meaning import OWNED_KAFKA_SETTINGS
from cdc.config.model import Config
from cdc.config.template import described, render
from cdc.errors import Exit

if TYPE_CHECKING:
    from collections.abc import Iterator

_WIDTH = 100
_MADE = "<!-- Made by `python -m cdc.cli.reference`: change the code, not this page. -->\n"

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
    Exit.TEMPORARY: "busy just now; try again",
    Exit.PERMISSION: "a server knows us and refuses",
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
        context = _context(path, command)
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


def _context(path: tuple[str, ...], command: click.Command) -> click.Context:
    parent = None
    for word in path[:-1]:
        parent = click.Context(click.Group(word), parent=parent, info_name=word)
    return click.Context(
        command,
        parent=parent,
        info_name=path[-1],
        terminal_width=_WIDTH,
        help_option_names=["-h", "--help"],
    )


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
    return "\n".join([_HEAD, *_rows(Config, ()), _REST, f"```yaml\n{example}```\n"])


_HEAD = f"""\
# Configuration

{_MADE}
One YAML file, `lockstep.yaml` in the current folder unless `--config` or `LOCKSTEP_CONFIG` says
otherwise. `cdc init` writes one, `cdc config check` checks it, `cdc config show` tells every
effective value and where it comes from, with secrets masked. Unknown names are errors.

| field | takes | default | environment | meaning |
| --- | --- | --- | --- | --- |"""

_REST = """
## Environment

The environment wins over the file. A field's variable is `LOCKSTEP_` and its path in capitals,
joined by `_`. Settings below `log.kafka` follow a double underscore, with `_` for each dot:
`LOCKSTEP_LOG_KAFKA__SASL_PASSWORD` sets `sasl.password`. Lists are separated by commas. A variable
that begins like ours and names no field is an error. What is said of single `tables` and of
`followers` stands in the file only; a `${VARIABLE}` may stand there as anywhere.

## Tables, columns, rows

`source.tables` names what is captured and `source.exclude` what of it is left out. A section below
`tables` says more of one table, or with a pattern of many:

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

`cdc doctor` holds these against the database, `cdc setup` puts them into the publication, and does
so again whenever they change; docs/EVENTS.md says what events look like then.

## Followers

Each name below `followers` is a store that follows the log, with exactly one of `delta`, `redis`
and `opensearch`; docs/FOLLOWERS.md says what stands in it then.

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
  orders:
    mirror: mirror                   # whose tables the documents are made from
    opensearch: {url: "http://localhost:9200"}
    documents:
      orders:
        table: public.orders
        children:
          lines: {table: public.order_lines, by: {order_id: id}}
```

Tables are named in full (`schema.table`) where one is meant; `tables` takes patterns.

## Secrets

Any text may hold `${VARIABLE}` or `${file:PATH}`, which stand for the variable's value and the
file's text (without the newline at its end); `$${` stands for `${` itself. `source.password_file`
is read anew at every connect. Relative paths count from the configuration file. Secrets are shown
by no command and written to no log (docs/SECURITY.md); a password in a URL is percent-encoded.

## Kafka settings that are ours

These are refused under `log.kafka`, since exactly-once rests on them:
OWNED.

## All fields in one file
"""


def _rows(struct: type[msgspec.Struct], at: tuple[str, ...]) -> Iterator[str]:
    known = known_paths()
    for field in msgspec.structs.fields(struct):
        here = (*at, field.encode_name)
        if here in known.sections:
            yield from _rows(field.type, here)
            continue
        meaning, _ = described(field.type)
        if here in known.deep:
            yield _row(here, "followers, each with the fields below", "{}", _FILE, meaning)
            yield from _deep_rows(Follower, (*here, "<follower>"), {})
            continue
        opened, named = here in known.open, here in known.named
        variable = variable_of((*here, "<name>"), opened=True) if opened else variable_of(here)
        in_file_only = named or at[:-1] in known.named
        yield _row(
            here,
            "tables, each with the fields below" if named else expected(field.type),
            "{}" if opened or named else field.default,
            _FILE if in_file_only else f"`{variable}`",
            meaning,
            required=field.required,
        )
        if named:
            yield from _rows(known.named[here], (*here, "<table>"))


def _deep_rows(
    struct: type[msgspec.Struct], at: tuple[str, ...], seen: dict[type, str]
) -> Iterator[str]:
    """Yield the fields of a section and of its subsections; a recursive one only once."""
    seen = {**seen, struct: ".".join(at)}
    for field in msgspec.structs.fields(struct):
        here = (*at, field.name)
        kind, below = nested.plain(field.type), here
        if get_origin(kind) is dict:
            kind, below = nested.plain(get_args(kind)[1]), (*here, "<name>")
        meaning, _ = described(field.type)
        if not nested.is_struct(kind):
            default = "{}" if get_origin(nested.plain(field.type)) is dict else field.default
            takes = expected(field.type)
            yield _row(here, takes, default, _FILE, meaning, required=field.required)
        elif kind in seen:
            yield _row(here, f"names, each with the fields of `{seen[kind]}`", "{}", _FILE, meaning)
        else:
            meaning = meaning or (kind.__doc__ or "").strip()
            takes = "the fields below" if below == here else "names, each with the fields below"
            yield _row(here, takes, None if below == here else "{}", _FILE, meaning)
            yield from _deep_rows(kind, below, seen)


_FILE = "in the file only"


def _row(
    at: tuple[str, ...],
    takes: str,
    default: object,
    variable: str,
    meaning: str,
    *,
    required: bool = False,
) -> str:
    if required:
        shown = "**required**"
    elif isinstance(default, tuple):
        shown = f"`[{', '.join(default)}]`"
    elif default is None or default is msgspec.NODEFAULT:
        shown = ""
    else:
        shown = f"`{default}`"
    cells = (f"`{'.'.join(at)}`", takes.replace("|", "\\|"), shown, variable, meaning)
    return f"| {' | '.join(cells)} |"


def pages() -> dict[str, str]:
    """Return the pages by their name in docs/."""
    owned = ", ".join(f"`{name}`" for name in sorted(OWNED_KAFKA_SETTINGS))
    return {"CLI.md": cli_page(), "CONFIG.md": config_page().replace("OWNED", owned)}


def main() -> None:
    """Write the pages into docs/ of the current folder."""
    for name, text in pages().items():
        Path("docs", name).write_text(text, encoding="utf-8")
        click.echo(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
