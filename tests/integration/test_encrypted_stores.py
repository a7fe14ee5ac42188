"""Encrypted columns in each kind of store: unreadable, readable by key, and forgotten for good.

No store is written again when a subject is forgotten: its key was the only copy that had to go.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import lockstep
from tests.fixtures.every_store import EveryStore, NewEveryStore, Rows
from tests.integration.test_encryption import ENCRYPTED, KEYRING, MASKS, TABLES, cdc

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.fixtures.daemon import NewPipeline

_USERS = (
    "INSERT INTO users SELECT i, 'secret' || i, repeat('secret', 800) FROM generate_series(1, 40) i"
)


def test_every_store_has_encrypted_values_and_none_of_a_forgotten_subject(
    pipeline: NewPipeline, every_store: NewEveryStore, tmp_path: Path
) -> None:
    kept = every_store(
        partial(
            pipeline, *TABLES[:2], tables={"public.users": MASKS["public.users"]}, keyring=KEYRING
        )
    )
    line, execute = kept.pipeline, kept.pipeline.database.execute
    assert cdc(line, "create") == 0
    line.start().wait_ready()
    execute(_USERS)
    _check(kept)
    # Notes that are not sent again, rows that become another subject's, one of a new subject.
    execute(
        "UPDATE users SET email = 'secret again ' || id WHERE id < 5",
        "UPDATE users SET id = id + 100 WHERE id BETWEEN 10 AND 12",
        "DELETE FROM users WHERE id = 20",
        "UPDATE users SET email = NULL WHERE id = 21",
        "INSERT INTO users VALUES (50, 'secret fifty', '')",
    )
    _check(kept)
    before = kept.seen("users")["users"]
    assert cdc(line, "forget", "user", "3", "--yes") == 0
    assert kept.seen("users")["users"] == before
    execute("UPDATE users SET email = 'secret at last' WHERE id IN (3, 7)")
    _check(kept, forgotten=3)
    assert line.daemon.term() == 0
    assert b"secret" not in (tmp_path / "copy.db").read_bytes()


def _check(kept: EveryStore, forgotten: int | None = None) -> None:
    """Fail unless every store shows what the database does, and none of it without a key."""
    decrypt = lockstep.decryptor(kept.pipeline.config_file)

    def shown(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: decrypt(value) if name in ENCRYPTED else value for name, value in row.items()}

    wanted: Rows = kept.source("users")
    if forgotten is not None:
        wanted[forgotten] |= dict.fromkeys(("email", "note"))
    for store, rows in kept.seen("users")["users"].items():
        assert {number: shown(row) for number, row in rows.items()} == wanted, store
        assert "secret" not in str(rows), store
