"""The section `console.oidc`: an issuer whose signed tokens say who views the console."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from cdc.config.secrecy import Address, Section

# What a list of people may have: `email:ann@example.com`, `group:oncall`, `sub:248289761001`.
KINDS: Final = ("email", "group", "sub")
_PEOPLE: Final = "Each is `email:…`, `group:…` or `sub:…`."


class Oidc(Section, frozen=True, kw_only=True):
    """Who views the console, by a signed token that a proxy in front of it forwards."""

    audience: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="What the token's `aud` must be or have: for most issuers it is the "
            "client's id.",
            examples=["lockstep-console"],
        ),
    ] = None
    keys: Annotated[
        Address | None,
        Meta(
            description="The issuer's public keys (JWKS): an `https` URL, or a file, whose "
            "relative path starts at the configuration file's folder. Without it the issuer's "
            "`/.well-known/openid-configuration` names them.",
            examples=["https://cdc.example.com/.well-known/pomerium/jwks.json"],
        ),
    ] = None
    issuer: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="What the token's `iss` must be. With it every viewer needs a token that "
            "this issuer has signed for `audience`.",
            examples=["https://accounts.example.com"],
        ),
    ] = None
    header: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9-]+$",
            description="The header in which the proxy forwards the token, such as "
            "`X-Forwarded-Access-Token` or `X-Pomerium-Jwt-Assertion`.",
        ),
    ] = "Authorization"
    viewers: Annotated[
        tuple[str, ...],
        Meta(
            description=f"Who may view; empty: all to whom the issuer gives a token. {_PEOPLE}",
            examples=[["email:ann@example.com", "group:oncall"]],
        ),
    ] = ()
    actors: Annotated[
        tuple[str, ...],
        Meta(
            description="Who of them may run commands, where `cdc console` is started with "
            f"`--allow-actions`, which needs this list. {_PEOPLE}",
            examples=[["group:oncall"]],
        ),
    ] = ()
    groups_claim: Annotated[
        str,
        Meta(
            min_length=1,
            description="The token's claim that lists groups, such as `cognito:groups`.",
        ),
    ] = "groups"
