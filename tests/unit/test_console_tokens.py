"""A token is believed if its issuer signed it for this console, and is still valid; else never."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from typing import Any

import jwt
import orjson
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from cdc.config.oidc import Oidc
from cdc.console import tokens
from cdc.console.tokens import SigningKey, TokenError, Viewer
from cdc.errors import UnavailableError
from tests.fixtures.issuer import PrivateKey, jwk_of, rsa_key

_ISSUER = "https://accounts.example.com"
_OIDC = Oidc(issuer=_ISSUER, audience="lockstep")
_RSA = rsa_key()
_OTHER = rsa_key()
_EC = ec.generate_private_key(ec.SECP256R1())
_CLAIMS: dict[str, Any] = {
    "iss": _ISSUER,
    "aud": "lockstep",
    "sub": "248289",
    "email": "Ann@Example.com",
    "groups": ["eng", "oncall"],
    "exp": 600,
}


def key_of(private: PrivateKey, **more: str) -> SigningKey:
    """Return what is kept of a key that an issuer publishes."""
    document = orjson.dumps({"keys": [jwk_of(private, "k", **more)]})
    return tokens.keys_of(document)["k"]


def claims_of(**changed: Any) -> dict[str, Any]:  # noqa: ANN401 - claims
    """Return claims with times in seconds from now on; a changed one that is None is left out."""
    found = {name: each for name, each in (_CLAIMS | changed).items() if each is not None}
    now = int(time.time())
    times = {name: found[name] for name in ("exp", "nbf", "iat") if name in found}
    return found | {name: now + each for name, each in times.items() if isinstance(each, int)}


def signed(
    private: Any = _RSA,  # noqa: ANN401 - a key
    algorithm: str = "RS256",
    headers: dict[str, Any] | None = None,
    **changed: Any,  # noqa: ANN401 - claims
) -> str:
    return jwt.encode(claims_of(**changed), private, algorithm, {"kid": "k"} | (headers or {}))


def part(given: object) -> str:
    """Return a part of a token that no library would make."""
    body = given if isinstance(given, bytes) else json.dumps(given).encode()
    return base64.urlsafe_b64encode(body).rstrip(b"=").decode()


def signed_as(header: object, body: object) -> str:
    """Return what no library would sign, with a valid signature."""
    text = f"{part(header)}.{part(body)}"
    signature = jwt.get_algorithm_by_name("RS256").sign(text.encode(), _RSA)
    return f"{text}.{part(signature)}"


def viewer(token: str, key: SigningKey | None = None, **oidc: Any) -> Viewer:  # noqa: ANN401 - fields
    """Return who a token is about, as the console does it; no key of the token is chosen by it."""
    assert tokens.kid_of(token) == "k"
    fields = {name: getattr(_OIDC, name) for name in _OIDC.__struct_fields__}
    return tokens.viewer_of(token, key or key_of(_RSA), Oidc(**fields | oidc))


def refusal(token: str, key: SigningKey | None = None, **oidc: Any) -> str:  # noqa: ANN401 - fields
    """Return why a token is refused; the reason has nothing of it."""
    with pytest.raises(TokenError) as caught:
        viewer(token, key, **oidc)
    assert not any(len(each) > 20 and each in str(caught.value) for each in token.split("."))
    return str(caught.value)


@pytest.mark.parametrize(
    ("private", "algorithm"),
    [
        *((_RSA, each) for each in ("RS256", "RS512", "PS256")),
        *((_EC, "ES256"), (ec.generate_private_key(ec.SECP384R1()), "ES384")),
        (ed25519.Ed25519PrivateKey.generate(), "EdDSA"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_a_token_that_the_issuer_signed_names_its_viewer(
    private: PrivateKey, algorithm: str
) -> None:
    found = viewer(signed(private, algorithm), key_of(private))
    assert (found.name, found.acts) == ("ann@example.com", False)
    assert found.seconds is not None
    assert 590 < found.seconds <= 660


def test_a_token_without_a_signature_is_refused() -> None:
    for name in ("none", "None", "NONE", "nOnE", ""):
        head = part({"alg": name, "typ": "JWT", "kid": "k"})
        for signature in ("", part(b"x" * 256)):
            assert "algorithm" in refusal(f"{head}.{part(claims_of())}.{signature}")
    header, claims, signature = signed().split(".")
    assert "signature" in refusal(f"{header}.{claims}.")
    assert "signature" in refusal(f"{header}.{part(claims_of(sub='root'))}.{signature}")


@pytest.mark.parametrize("form", ["pem", "der", "jwk"])
def test_a_public_key_is_no_shared_secret(form: str) -> None:
    """HS256 with what everybody knows: the library itself must not be asked for it."""
    public = _RSA.public_key()
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    secret = {
        "pem": public.public_bytes(serialization.Encoding.PEM, kind),
        "der": public.public_bytes(serialization.Encoding.DER, kind),
        "jwk": json.dumps(jwk_of(_RSA, "k")).encode(),
    }[form]
    for name, digest in (("HS256", hashlib.sha256), ("HS512", hashlib.sha512)):
        text = f"{part({'alg': name, 'kid': 'k'})}.{part(claims_of())}"
        signature = hmac.new(secret, text.encode(), digest).digest()
        assert "algorithm" in refusal(f"{text}.{part(signature)}")


def test_a_key_is_used_for_its_own_algorithms_only() -> None:
    assert "algorithm" in refusal(signed(_EC, "ES256"))
    assert "algorithm" in refusal(signed(_RSA, "RS512"), key_of(_RSA, alg="RS256"))
    assert "algorithm" in refusal(signed(_RSA, "PS256"), key_of(_RSA, alg="RS256"))
    assert viewer(signed(_RSA, "RS256"), key_of(_RSA, alg="RS256")).name


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"iss": "https://accounts.example.com/"}, "another issuer"),
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"iss": None}, "no exp, iss or aud"),
        ({"aud": "lockstep2"}, "another audience"),
        ({"aud": ["a", "b"]}, "another audience"),
        ({"aud": []}, "no exp, iss or aud"),
        ({"aud": None}, "no exp, iss or aud"),
        ({"aud": {"lockstep": 1}}, "another audience"),
        ({"exp": -61}, "expired"),
        ({"exp": None}, "no exp, iss or aud"),
        ({"exp": "soon"}, "not valid"),
        ({"nbf": 600}, "not valid yet"),
        ({"iat": 600}, "not valid yet"),
        ({"sub": 7}, "not valid"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else each,
)
def test_a_token_for_others_or_for_another_time_is_refused(
    changed: dict[str, Any], why: str
) -> None:
    assert why in refusal(signed(**changed))
    assert viewer(signed(aud=["other", "lockstep"])).name


def test_clocks_may_differ_by_a_minute() -> None:
    assert viewer(signed(exp=-30)).name
    assert viewer(signed(nbf=30, iat=30)).name
    late = viewer(signed(exp=-30)).seconds
    assert late is not None
    assert 0 < late <= 30


def test_a_stream_ends_after_a_day_however_long_a_token_is_valid() -> None:
    for exp in (10**9, 10**30):
        assert viewer(signed(exp=exp)).seconds == 86_400


def test_keys_that_a_token_brings_or_names_are_not_used() -> None:
    own = jwk_of(_OTHER, "k")
    for headers in (
        {"jwk": own},
        {"jku": "https://evil.example/keys"},
        {"x5u": "https://evil.example/cert"},
        {"x5c": ["MIIB"]},
    ):
        assert "signature" in refusal(signed(_OTHER, headers=headers))
    for critical in (["exp"], ["b64"], []):
        refusal(signed_as({"alg": "RS256", "kid": "k", "crit": critical, "b64": True}, claims_of()))


@pytest.mark.parametrize(
    "token",
    [
        *("", ".", "..", "a.b.c", "a.b.c.d", "ann@example.com", "é.é.é"),
        "x" * 20_000,
        f"{part(b'[' * 5_000)}.e30.e30",
        f"{part(b'7' * 5_000)}.e30.e30",
        f"{part([1])}.e30.e30",
        f"{part({'alg': 'RS256'})}.e30.e30",
        f"{part({'alg': 'RS256', 'kid': 7})}.e30.e30",
        f"{part({'alg': 'RS256', 'kid': ['k']})}.e30.e30",
    ],
    ids=lambda each: each[:12],
)
def test_what_is_no_token_is_refused_before_a_key_is_looked_for(token: str) -> None:
    with pytest.raises(TokenError):
        tokens.kid_of(token)


def test_signed_claims_that_are_no_claims_are_refused() -> None:
    head = {"alg": "RS256", "kid": "k"}
    assert viewer(signed_as(head, claims_of())).name
    for body in (b"[" * 5_000, b"7", b"null", b'{"exp": 1e400}', b"{", b"\xff"):
        refusal(signed_as(head, body))
    for changed in ({"iss": [_ISSUER]}, {"iss": {_ISSUER: 1}}, {"exp": float("inf")}):
        refusal(signed_as(head, claims_of() | changed))


# -- who -------------------------------------------------------------------------------------------


def test_lists_name_emails_groups_and_subs() -> None:
    for viewers in (("email:ann@example.com",), ("email:x@y", "group:eng"), ("sub:248289",)):
        found = viewer(signed(), viewers=viewers, actors=("group:other",))
        assert (found.name, found.acts) == ("ann@example.com", False)
    assert viewer(signed(), viewers=("sub:1",), actors=("group:oncall",)).acts
    assert viewer(signed(), actors=("email:ANN@example.com",)).acts
    for viewers in (
        *(("email:bob@example.com",), ("group:ann@example.com",), ("email:248289",)),
        *(("group:en",), ("group:ENG",), ("sub:eng",), ("group:[",)),
    ):
        with pytest.raises(TokenError) as caught:
            viewer(signed(), viewers=viewers)
        assert caught.value.status == 403
        assert not viewer(signed(), actors=viewers).acts


def test_an_email_that_nobody_verified_or_that_only_looks_the_same_is_not_on_a_list() -> None:
    actors = ("email:ann@example.com", "email:kim@example.com")
    for value in (False, "false", None, 0, "yes"):
        token = jwt.encode(
            claims_of() | {"email_verified": value}, _RSA, algorithm="RS256", headers={"kid": "k"}
        )
        found = viewer(token, actors=actors)
        assert (found.name, found.acts) == ("sub:248289", False), value
    for value in (True, "true"):
        assert viewer(signed(email_verified=value), actors=actors).acts
    # The Kelvin sign is a k in lower case.
    assert not viewer(signed(email="\N{KELVIN SIGN}im@example.com"), actors=actors).acts
    assert not viewer(signed(email=["ann@example.com"]), actors=actors).acts
    assert not viewer(signed(email=None, sub="ann@example.com"), actors=actors).acts
    assert not viewer(signed(email=None, groups=["ann@example.com"]), actors=actors).acts


def test_groups_are_in_the_claim_that_is_configured() -> None:
    for value in ("oncall", ["a", "oncall"], ["a", 7, None, "oncall"]):
        claims: dict[str, Any] = {"groups": None, "cognito:groups": value}
        token = signed(**claims)
        assert viewer(token, groups_claim="cognito:groups", actors=("group:oncall",)).acts
        assert not viewer(token, actors=("group:oncall",)).acts
    for other in ({"oncall": True}, 7, [["oncall"]]):
        assert not viewer(signed(groups=other), actors=("group:oncall",)).acts


def test_a_token_that_names_nobody_is_refused_and_a_name_forges_no_line() -> None:
    assert "names nobody" in refusal(signed(email=None, sub=None))
    assert "names nobody" in refusal(signed(email="x@y", email_verified=False, sub=""))
    assert viewer(signed(email=None)).name == "sub:248289"
    found = viewer(signed(email=None, sub="CN=Ann, OU=x, 10.0.0.1")).name
    assert found == '"sub:CN=Ann, OU=x, 10.0.0.1"'
    for sub in ("a\nan action starts", 'a", 10.0.0.1', "\u202ea", "a\0", "a" * 5_000):
        found = viewer(signed(email=None, sub=sub)).name
        assert found.isprintable()
        assert found.isascii()
        assert len(found) < 300
        assert found.startswith('"') or "," not in found


# -- keys ------------------------------------------------------------------------------------------


def test_keys_that_sign_no_tokens_are_left_out() -> None:
    private = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(_RSA)) | {"kid": "private"}
    given = [
        jwk_of(_RSA, "good"),
        jwk_of(_OTHER, "good"),  # the first of a name counts
        jwk_of(rsa_key(1024), "short"),
        jwk_of(_EC, "other curve", crv="P-384"),
        jwk_of(_EC, "secp", crv="secp256k1"),
        jwk_of(_RSA, "encrypts", use="enc"),
        jwk_of(_RSA, "symmetric", alg="HS256"),
        jwk_of(_RSA, "none", alg="none"),
        {"kty": "oct", "kid": "shared", "k": "c2VjcmV0"},
        {"kty": "oct", "kid": "shared", "k": "c2VjcmV0", "alg": "RS256"},
        {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
        {name: each for name, each in jwk_of(_RSA, "").items() if name != "kid"},
        *(private, 7, None, [], "RSA"),
    ]
    found = tokens.keys_of(orjson.dumps({"keys": given}))
    assert set(found) == {"good"}
    assert viewer(signed(), found["good"]).name
    assert found["good"].algorithms == ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")


@pytest.mark.parametrize(
    "document",
    [b"", b"{}", b"[]", b'{"keys": 7}', b'{"keys": []}', b'{"keys": {}}', b"<html>", b"\xff", b"["],
)
def test_a_document_without_keys_is_refused(document: bytes) -> None:
    with pytest.raises(UnavailableError, match="no key with a kid"):
        tokens.keys_of(document)
