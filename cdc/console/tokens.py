"""Read a signed token (JWT) of an issuer: who views the console, and what that person may do.

Pure. What is not signed is not believed: of a token that is not verified yet only the name of its
key is used. A key fits the algorithms of its own type only, never one that the token chooses, and
none is a shared secret. Nothing here repeats text of a token, except a verified viewer's name.

https://www.rfc-editor.org/rfc/rfc7519, https://www.rfc-editor.org/rfc/rfc8725
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jwt
import orjson

from cdc.errors import UnavailableError

if TYPE_CHECKING:
    from cdc.config.oidc import Oidc

# What the headers' limit leaves room for, next to cookies.
MOST_BYTES: Final = 12_288
# By how much the clocks of issuer and console may differ.
SKEW_SECONDS: Final = 60
# An answer without an end stops then at the latest, even if the token is valid for longer.
MOST_SECONDS: Final = 86_400.0
_MOST_KEYS: Final = 100
_MOST_NAME: Final = 200
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
# By type and curve of a key.
_ALGORITHMS: Final = {
    ("RSA", None): _RSA,
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA", "Ed25519"),
}
_REQUIRED: Final = ["exp", "iss", "aud"]
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.+@:|/=-]+")
_WHY: Final[dict[type[Exception], str]] = {
    jwt.ExpiredSignatureError: "it has expired",
    jwt.ImmatureSignatureError: "it is not valid yet",
    jwt.InvalidIssuerError: "another issuer made it",
    jwt.InvalidAudienceError: "it is for another audience",
    jwt.InvalidSignatureError: "its signature is wrong",
    jwt.InvalidAlgorithmError: "its algorithm does not fit the key",
    jwt.MissingRequiredClaimError: "it has no exp, iss or aud",
}


class TokenError(Exception):
    """A token that is not accepted; `status` is HTTP's: 401, or 403 for who is not on the list."""

    def __init__(self, why: str, status: int = 401) -> None:
        super().__init__(why)
        self.status = status


class SigningKey(NamedTuple):
    """A public key, and the algorithms for which it is accepted."""

    public: Any  # one of cryptography's
    algorithms: tuple[str, ...]


class Viewer(NamedTuple):
    """Who asks: a name, "" where there is none; for how many more seconds that is known."""

    name: str
    acts: bool
    seconds: float | None = None


def keys_of(document: bytes) -> dict[str, SigningKey]:
    """Return the usable keys of a JWKS by their ids; raise UnavailableError where it has none."""
    try:
        listed: Any = orjson.loads(document)["keys"]
        found = [key for each in listed[:_MOST_KEYS] for key in _usable(each)]
    except (ValueError, TypeError, KeyError):
        found = []
    if not found:
        raise UnavailableError(
            "the issuer's JWKS has no key with a kid that is RSA of 2048 bits, EC or Ed25519",
            hint="correct console.oidc.issuer or console.oidc.keys",
        )
    return dict(reversed(found))


def _usable(given: Any) -> list[tuple[str, SigningKey]]:  # noqa: ANN401 - JSON
    """Return a key with its id, in a list; an empty one for what signs no tokens."""
    if not isinstance(given, dict) or given.get("use", "sig") != "sig" or "d" in given:
        return []
    kind, kid = given.get("kty"), given.get("kid")
    fits = _ALGORITHMS.get((str(kind), None if kind == "RSA" else given.get("crv")), ())
    algorithms = tuple(each for each in fits if given.get("alg", each) == each)
    if not isinstance(kid, str) or not algorithms:
        return []
    public = {name: given[name] for name in ("kty", "crv", "n", "e", "x", "y") if name in given}
    try:
        key = jwt.PyJWK(public, algorithms[0])
        is_long = key.Algorithm.check_key_length(key.key) is None
    except (jwt.PyJWTError, TypeError, ValueError):
        return []
    return [(kid, SigningKey(key.key, algorithms))] if is_long else []


def kid_of(token: str) -> str:
    """Return the id of the key that has signed a token; raise TokenError where it names none."""
    if len(token) > MOST_BYTES:
        raise TokenError(f"it is larger than {MOST_BYTES >> 10} kB")
    try:
        kid = jwt.get_unverified_header(token).get("kid")
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise TokenError("it is no JWT") from None
    if not isinstance(kid, str):
        raise TokenError("it names no key (kid)")
    return kid


def viewer_of(token: str, key: SigningKey, oidc: Oidc) -> Viewer:
    """Return who a token is about; raise TokenError where it is not accepted."""
    try:
        header = jwt.get_unverified_header(token)
        if "crit" in header:
            raise TokenError("it has critical headers")
        claims = jwt.decode(
            token,
            key.public,
            list(key.algorithms),
            options={"require": _REQUIRED, "enforce_minimum_key_length": True},
            audience=oidc.audience,
            issuer=oidc.issuer,
            leeway=SKEW_SECONDS,
        )
        seconds = int(claims["exp"]) + SKEW_SECONDS - time.time()
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TokenError(_WHY.get(type(error), "it is not valid")) from None
    return _admitted(claims, oidc, min(max(seconds, 0.0), MOST_SECONDS))


def _admitted(claims: dict[str, Any], oidc: Oidc, seconds: float) -> Viewer:
    people = _people(claims, oidc.groups_claim)
    if not people or people[0].startswith("group:"):
        raise TokenError("it names nobody: it has no verified email and no sub")
    acts = not set(people).isdisjoint(map(_same, oidc.actors))
    if oidc.viewers and not acts and set(people).isdisjoint(map(_same, oidc.viewers)):
        raise TokenError("this viewer is not in console.oidc.viewers", 403)
    return Viewer(_shown(people[0].removeprefix("email:")), acts, seconds)


def _people(claims: dict[str, Any], groups_claim: str) -> list[str]:
    """Return all that lists of people may call the token's person; the name to show is first."""
    found = []
    email, groups = claims.get("email"), claims.get(groups_claim)
    # Some issuers write it as text; proxies that sign for people they know leave it out.
    if (
        isinstance(email, str)
        and "@" in email
        and claims.get("email_verified", True) in (True, "true")
    ):
        found.append(_same(f"email:{email}"))
    if isinstance(claims.get("sub"), str) and claims["sub"]:
        found.append(f"sub:{claims['sub']}")
    groups = [groups] if isinstance(groups, str) else groups
    if isinstance(groups, list):
        found += [f"group:{each}" for each in groups if isinstance(each, str)]
    return found


def _same(person: str) -> str:
    """Return an email in lower case, all else as it is.

    Not one with other characters than ASCII, of which some are an ASCII letter in lower case.
    """
    return person.lower() if person.startswith("email:") and person.isascii() else person


def _shown(name: str) -> str:
    """Return a name as logs have it: in quotes, if it could be read as more than a name."""
    name = name[:_MOST_NAME]
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)
