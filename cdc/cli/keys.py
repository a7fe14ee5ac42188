"""`cdc keys`: the keyring of encrypted columns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cdc.cli.options import (
    as_json,
    confirm,
    echo,
    example,
    next_step,
    print_done,
    print_json,
    print_warning,
    with_config,
    yes,
)

if TYPE_CHECKING:
    from cdc.config import Config


@click.group(epilog=example("cdc keys create", "cdc keys forget user 7"))
def keys() -> None:
    """Make the keyring of columns with the mask `encrypt`, look into it, forget a subject.

    docs/ENCRYPTION.md explains what is encrypted, and what deleting a key does not reach.
    """


@keys.command(epilog=example("cdc keys create"))
@with_config
@as_json
def create(config: Config, *, as_json: bool) -> None:
    """Make an empty keyring at keyring.path, which must not exist yet. Back it up from then on."""
    from cdc.errors import ConfigError  # noqa: PLC0415 - not for --help
    from cdc.keyring import file  # noqa: PLC0415 - as above

    if config.keyring.path is None:
        raise ConfigError("no keyring file is configured", hint="set keyring.path")
    path = Path(config.keyring.path)
    file.create(path)
    if as_json:
        print_json({"created": str(path)})
        return
    print_done(f"the keyring {path} is empty; only its owner may read it")
    next_step("back it up: what a lost key has encrypted can't be read any more")


@keys.command(epilog=example("cdc keys status", "cdc keys status --json | jq .forgotten"))
@with_config
@as_json
def status(config: Config, *, as_json: bool) -> None:
    """Show how many subjects have a key, and how many are forgotten."""
    from cdc.keyring.opening import need_ciphers  # noqa: PLC0415 - not for --help

    keyring = need_ciphers(config).keyring
    counts = keyring.counts()
    if as_json:
        print_json({"keyring": keyring.number.hex(), **counts._asdict()})
        return
    echo(
        f"keyring {keyring.number.hex()}: {counts.keys:,} subjects have a key,"
        f" {counts.forgotten:,} are forgotten"
    )


@keys.command(epilog=example("cdc keys forget user 7", "cdc keys forget user 7 --yes --json"))
@with_config
@click.argument("kind")
@click.argument("subject")
@yes
@as_json
def forget(config: Config, kind: str, subject: str, *, yes: bool, as_json: bool) -> None:
    """Delete the key of SUBJECT, of that KIND, for good: `user 7` where masks have `user:COLUMN`.

    From then on nobody can read what it has encrypted, wherever that is: topics, archive, bases,
    stores, their backups. Backups of the keyring still have the key. Values that are written for
    the subject afterwards are null, until `cdc keys allow`. Without a key it warns, which is
    no error. If it was killed, run it again. Asks first.
    """
    from cdc.keyring.ciphers import given_subject  # noqa: PLC0415 - not for --help
    from cdc.keyring.opening import need_ciphers  # noqa: PLC0415 - as above

    _expect_kind(config, kind)
    named = given_subject(kind, subject)
    keyring = need_ciphers(config).keyring
    if not yes:
        confirm(f"Delete the key of {kind} {subject}, for good?")
    had_key = keyring.forget(named)
    if as_json:
        print_json({"forgotten": True, "had_key": had_key})
        return
    if had_key:
        print_done(f"{kind} {subject} is forgotten: its key is deleted")
    else:
        print_warning(
            f"{kind} {subject} had no key, and gets none from now on: it was forgotten before, or"
            f" nothing was encrypted for it with the keyring {keyring.number.hex()}"
        )


@keys.command(epilog=example("cdc keys allow user 7"))
@with_config
@click.argument("kind")
@click.argument("subject")
@as_json
def allow(config: Config, kind: str, subject: str, *, as_json: bool) -> None:
    """Let a forgotten SUBJECT have a new key, such as one that came back.

    What was encrypted by the deleted key stays unreadable.
    """
    from cdc.keyring.ciphers import given_subject  # noqa: PLC0415 - not for --help
    from cdc.keyring.opening import need_ciphers  # noqa: PLC0415 - as above

    _expect_kind(config, kind)
    was = need_ciphers(config).keyring.allow(given_subject(kind, subject))
    if as_json:
        print_json({"was_forgotten": was})
        return
    print_done(
        f"{kind} {subject} gets a key with its next value"
        if was
        else f"{kind} {subject} was not forgotten"
    )


@keys.command(epilog=example("cdc keys decrypt enc:8f0KJ…", "cdc keys decrypt --json enc:8f0KJ…"))
@with_config
@click.argument("values", nargs=-1, required=True)
@as_json
def decrypt(config: Config, values: tuple[str, ...], *, as_json: bool) -> None:
    """Print the text of encrypted VALUES, a line each; an empty line if the key is deleted."""
    from cdc.keyring.opening import need_ciphers  # noqa: PLC0415 - not for --help

    found = [need_ciphers(config).decrypt(each) for each in values]
    if as_json:
        print_json(found)
        return
    for each in found:
        echo(each or "")


def _expect_kind(config: Config, kind: str) -> None:
    """Raise ConfigError if no column is encrypted by the key of such a subject."""
    from cdc.errors import ConfigError  # noqa: PLC0415 - not for --help

    masks = [mask for rule in config.tables.values() for mask in rule.mask.values()]
    kinds = {mask.subject[0] for mask in masks if mask.subject}
    if kind not in kinds:
        raise ConfigError(
            f"no column is encrypted by the key of a {kind}",
            hint=f"the masks have {', '.join(sorted(kinds)) or 'no `encrypt`'}",
        )
