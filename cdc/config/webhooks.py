"""Webhooks in the configuration: receivers of tables' changes (docs/WEBHOOKS.md)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cdc.config.secrecy import Address, NeverShown, Section


class Webhook(Section, frozen=True, kw_only=True):
    """A receiver that is sent every change of some tables, each key's in order."""

    url: Annotated[
        Address,
        Meta(
            pattern=r"^https?://[^/?#]+",
            description="Where messages are sent, by POST. `http` only to an address in `allow`.",
            examples=["https://example.com/changes"],
        ),
    ]
    secrets: Annotated[
        tuple[str, ...],
        NeverShown(),
        Meta(
            min_length=1,
            description="What messages are signed with (Standard Webhooks), as `cdc webhook "
            "secret` makes it; with each of several while it is exchanged.",
            examples=[["${HOOK_SECRET}"]],
        ),
    ]
    tables: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="Their names, as `cdc table list` shows them."),
    ]
    start: Annotated[
        str,
        Meta(
            pattern=r"^(beginning|now)$",
            description="Where it starts when it first runs: `beginning` of the log, snapshot rows "
            "included, or `now`. Later `cdc group seek` changes its place.",
        ),
    ] = "now"
    batch: Annotated[int, Meta(ge=1, le=1_000, description="Events in one message, at most.")] = 50
    connections: Annotated[
        int, Meta(ge=2, le=64, description="Messages that are sent at the same time, at most.")
    ] = 8
    timeout_seconds: Annotated[
        float, Meta(gt=0, le=60, description="How long an answer may take.")
    ] = 10.0
    attempts: Annotated[
        int,
        Meta(
            ge=1,
            description="After so many refusals of one event by itself it is given up: noted in "
            "the log for `cdc webhook undelivered`, and the key's next event follows. Waits "
            "between attempts double, from 0.5 s to 5 min: 20 attempts take about an hour.",
        ),
    ] = 20
    allow: Annotated[
        tuple[str, ...],
        Meta(
            description="Networks that are not public and may be sent to.",
            examples=[["10.1.2.0/24"]],
        ),
    ] = ()
