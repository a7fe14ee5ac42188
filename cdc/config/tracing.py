"""Traces in the configuration: where spans are sent, and of how many transactions (TRACING.md)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cdc.config.secrecy import Address, Section


class Tracing(Section, frozen=True, kw_only=True):
    """Traces of transactions, from their commit into each store, for OpenTelemetry."""

    endpoint: Annotated[
        Annotated[Address, Meta(pattern=r"^https?://[^/?#]+")] | None,
        Meta(
            description="Where `cdc trace` sends spans: OTLP over HTTP. What the receiver wants as "
            "headers, such as a token, is in the environment: OTEL_EXPORTER_OTLP_TRACES_HEADERS.",
            examples=["http://localhost:4318/v1/traces"],
        ),
    ] = None
    sample: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="The share of frontiers whose last transaction is traced. One whose "
            "application sends a `traceparent` is always traced.",
        ),
    ] = 0.01
