"""Encrypt and decrypt values by AES-SIV (RFC 5297) with their subject's key.

The same text of one subject has one ciphertext, so that a row that did not change does not look
changed; of two subjects, equal texts differ. An encrypted value is `enc:` and base64 of the
keyring's number, the key's number, and the ciphertext: it can be decrypted by itself.
"""

from __future__ import annotations

import re
from binascii import Error as NotBase64
from binascii import a2b_base64, b2a_base64
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from cdc.errors import ConfigError
from cdc.keyring.contract import KEY_NUMBER_BYTES, KEYRING_NUMBER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.keyring.contract import Keyring

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_UUID: Final = re.compile(r"\{?[0-9A-Fa-f]{4}(-?[0-9A-Fa-f]{4}){7}\}?")
_NULL: Final = b"null"
_PREFIX: Final = "enc:"
# In front of each text: an empty one can't be encrypted. Other bytes are for other releases.
_FORMAT: Final = b"\x01"
# Of the subjects met last: keys of some 300 bytes, and ciphers of 5 KB that are made of them.
_KEYS: Final = 50_000
_CIPHERS: Final = 2_000


class _Cipher(NamedTuple):
    head: bytes  # in front of each ciphertext
    siv: AESSIV


class Ciphers:
    """A keyring, and the ciphers of the subjects met last."""

    def __init__(self, keyring: Keyring) -> None:
        self.keyring = keyring
        self._changes = keyring.changes()
        self._key = lru_cache(_KEYS)(keyring.key_of)
        self._cipher = lru_cache(_CIPHERS)(self._new_cipher)

    def encryptor(self, kind: str) -> Callable[[bytes, bytes], bytes]:
        """Return the function of subject and text, as Postgres writes them.

        It returns the encrypted value as a JSON string, or null for a forgotten subject. Rows
        without a subject have one together, whose text is empty.
        """
        prefix, cipher_of = subject_of(kind, b""), self._cipher

        def encrypt(subject: bytes, text: bytes) -> bytes:
            cipher = cipher_of(prefix + subject)
            if cipher is None:
                return _NULL
            value = cipher.head + cipher.siv.encrypt(_FORMAT + text, None)
            return b'"enc:%b"' % b2a_base64(value, newline=False)

        return encrypt

    def _new_cipher(self, subject: bytes) -> _Cipher | None:
        key = self._key(subject)
        return key and _Cipher(self.keyring.number + key.number, AESSIV(key.secret))

    def make_durable(self) -> None:
        """Return once every key that was used is on disk; call it before each commit.

        What was forgotten since the last call is noticed here.
        """
        self.keyring.make_durable()
        if (changes := self.keyring.changes()) != self._changes:
            self._changes = changes
            self._key.cache_clear()
            self._cipher.cache_clear()

    def decrypt(self, value: str | None) -> str | None:
        """Return the text, as Postgres writes it; None for NULL, and if its key is deleted.

        Raises ConfigError for what is no encrypted value, or not one of this keyring.
        """
        if value is None:
            return None
        keyring, number, ciphertext = _parts(value)
        if keyring != self.keyring.number:
            raise ConfigError(
                f"the value is encrypted by another keyring, {keyring.hex()}",
                hint=f"this one is {self.keyring.number.hex()}: use the other one",
            )
        secret = self.keyring.find(number)
        if secret is None:
            return None
        try:
            text = AESSIV(secret).decrypt(ciphertext, None)
        except InvalidTag:
            raise ConfigError(
                "the encrypted value was changed", hint="read it again from its store"
            ) from None
        return text.removeprefix(_FORMAT).decode()


def _parts(value: str) -> tuple[bytes, bytes, bytes]:
    """Return the number of the keyring, that of the key, and the ciphertext."""
    try:
        encoded = a2b_base64(value.removeprefix(_PREFIX), strict_mode=True)
    except (NotBase64, ValueError):
        encoded = b""
    head = KEYRING_NUMBER_BYTES + KEY_NUMBER_BYTES
    if not value.startswith(_PREFIX) or len(encoded) <= head:
        raise ConfigError(
            "the value is not an encrypted value",  # and may be one that is to be hidden
            hint="one begins with `enc:` and is in a column with the mask `encrypt`",
        )
    return encoded[:KEYRING_NUMBER_BYTES], encoded[KEYRING_NUMBER_BYTES:head], encoded[head:]


def subject_of(kind: str, text: bytes) -> bytes:
    """Return the subject of this kind whose column has this text."""
    return b"%b\0%b" % (kind.encode(), text)


def given_subject(kind: str, text: str) -> bytes:
    """Return the subject that a person has written, in any form that Postgres would read.

    Raises ConfigError for what is neither an integer nor a uuid: no column has such a subject.
    """
    text = text.strip()
    if _INTEGER.fullmatch(text):
        return subject_of(kind, str(int(text)).encode())
    if _UUID.fullmatch(text):
        return subject_of(kind, str(UUID(text)).encode())
    if text:
        raise ConfigError(
            f"{text!r} is neither an integer nor a uuid",
            hint="give the value that the subject's column has; '' for rows whose column is NULL",
        )
    return subject_of(kind, b"")
