"""Open the configured keyring, once in each process."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cdc.config import load
from cdc.errors import ConfigError
from cdc.keyring.contract import GROUP
from cdc.keyring.file import FileKeyring
from cdc.runtime import extras

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.config.keyring import KeyringConfig
    from cdc.keyring.ciphers import Ciphers
    from cdc.keyring.contract import Keyring

_opened: dict[bytes, Ciphers] = {}


def ciphers_of(config: Config) -> Ciphers | None:
    """Return the ciphers of the configured keyring, opened; None if none is configured.

    Raises ConfigError if there is none where it should be.
    """
    if not config.keyring.is_there:
        return None
    which = msgspec.json.encode(config.keyring)
    if which not in _opened:
        extras.require("encrypted columns", "keyring")
        from cdc.keyring.ciphers import Ciphers  # noqa: PLC0415 - needs the extra

        _opened[which] = Ciphers(open_keyring(config.keyring))
    return _opened[which]


def decryptor(config_file: str | Path) -> Callable[[str | None], str | None]:
    """Return the function that decrypts a value of a column with the mask `encrypt`.

    It returns the value's text, as Postgres writes it; None for NULL, and where the subject is
    forgotten. It raises ConfigError for what is no encrypted value, or not of this keyring. It is
    for the process that opened it.
    """
    return need_ciphers(load(config_file)).decrypt


def need_ciphers(config: Config) -> Ciphers:
    """Return the ciphers of the configured keyring; raise ConfigError if none is configured."""
    ciphers = ciphers_of(config)
    if ciphers is None:
        raise ConfigError("no keyring is configured", hint="set keyring.path (docs/ENCRYPTION.md)")
    return ciphers


def open_keyring(config: KeyringConfig) -> Keyring:
    """Return the keyring; raise ConfigError if there is none."""
    if config.plugin is None:
        assert config.path is not None, "checked with the configuration"
        return FileKeyring(Path(config.path))
    found = [each for each in entry_points(group=GROUP) if each.name == config.plugin]
    if len(found) != 1:
        raise ConfigError(
            f"keyring.plugin: {len(found) or 'no'} packages have the keyring {config.plugin}",
            hint="install the package that has it, and no other, on every machine that encrypts",
        )
    opened: Keyring = found[0].load()(config.options)
    return opened
