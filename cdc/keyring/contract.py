"""What a keyring does. Other packages register theirs in the entry point group `GROUP`.

An entry is called with `keyring.options` and returns a `Keyring`. Every process that
encrypts calls it once: the daemon, and each worker of a snapshot. Errors are those of `cdc.errors`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

GROUP: Final = "lockstep.keyrings"

# A keyring's number and a key's are part of each encrypted value.
KEYRING_NUMBER_BYTES: Final = 4
KEY_NUMBER_BYTES: Final = 8
# AES-SIV with AES-256 takes two keys of 32 bytes.
KEY_BYTES: Final = 64


class Key(NamedTuple):
    """A subject's key, and the number that finds it: KEY_BYTES and KEY_NUMBER_BYTES, random."""

    number: bytes
    secret: bytes

    def __repr__(self) -> str:
        """Return it without the secret."""
        return f"Key({self.number.hex()})"


class Keyring(Protocol):
    """Keys by subject. May be called by several threads at once.

    A subject is its kind, a zero byte and the text of its column, such as `user`, 0, `7`.
    """

    number: bytes
    """KEYRING_NUMBER_BYTES that distinguish it from other keyrings."""

    def key_of(self, subject: bytes) -> Key | None:
        """Return the subject's key, a new one if it has none; None if the subject is forgotten.

        Every process gets the same key from then on, unless the machine fails before
        `make_durable`.
        """
        ...

    def find(self, number: bytes) -> bytes | None:
        """Return the secret of the key of that number; None if it is deleted, or never was."""
        ...

    def make_durable(self) -> None:
        """Return once every key that was returned is on disk. Cheap if all are."""
        ...

    def forget(self, subject: bytes) -> bool:
        """Delete the subject's key for good; it gets no other. Return whether it had one.

        May be repeated: what a killed call left is completed.
        """
        ...

    def allow(self, subject: bytes) -> bool:
        """Let a forgotten subject have a new key. Return whether it was forgotten."""
        ...

    def changes(self) -> int:
        """Return how often a subject was forgotten or allowed: then a cached key may be deleted."""
        ...

    def counts(self) -> KeyCounts:
        """Return how many subjects there are."""
        ...


class KeyCounts(NamedTuple):
    """How many subjects have a key, and how many are forgotten."""

    keys: int
    forgotten: int
