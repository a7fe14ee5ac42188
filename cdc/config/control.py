"""The section `control`: what authorizes commands to the daemon."""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from cdc.config.secrecy import Secret, described


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may command the daemon through the database."""

    __repr__ = described

    secret: Annotated[
        Secret | None,
        Meta(
            description="What proves to the daemon that a command, such as `cdc snapshot`, comes "
            "from somebody with this configuration: 32 characters or more, the same wherever "
            "`cdc` is run for this pipeline. `cdc init` writes one. Without it the daemon obeys "
            "no command that comes with the stream.",
            examples=["${LOCKSTEP_SECRET}"],
        ),
    ] = None


def new_secret() -> str:
    """Return a new secret of 256 bits."""
    return secrets.token_hex(32)
