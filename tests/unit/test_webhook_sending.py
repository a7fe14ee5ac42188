"""Where webhooks may be sent, how they are signed, and what an answer means."""

from __future__ import annotations

import ipaddress
import json
import time
from datetime import UTC, datetime

import msgspec
import pytest
from standardwebhooks import Webhook as Receiver

from cdc.config.webhooks import Webhook as WebhookSettings
from cdc.deliver import addresses, checks, webhooks
from cdc.deliver.sender import answer, key_of, signature
from cdc.errors import ConfigError
from cdc.log.group_states import GroupState
from cdc.log.partitions import OffsetRange
from cdc.operate.doctor.log_retention import check_webhooks
from cdc.operate.findings import Severity
from cdc.operate.webhooks import WebhookStatus
from tests.unit.test_control_doctor import CONFIG

_SECRET = "whsec_" + "QUJD" * 10
_INTERNAL = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::"),
)


@pytest.mark.parametrize("address", _INTERNAL)
def test_an_internal_address_is_not_sent_to_however_it_is_written(address: str) -> None:
    assert not addresses.may_reach(ipaddress.ip_address(address), ())


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_a_public_address_is_sent_to_by_tls_only(address: str) -> None:
    assert addresses.may_reach(ipaddress.ip_address(address), ())
    assert not addresses.may_reach(ipaddress.ip_address(address), (), public=False)


def test_a_network_that_is_allowed_is_sent_to() -> None:
    allowed = addresses.networks(["127.0.0.0/8"])
    assert addresses.may_reach(ipaddress.ip_address("127.0.0.1"), allowed, public=False)
    assert addresses.may_reach(ipaddress.ip_address("::ffff:127.0.0.1"), allowed)
    assert not addresses.may_reach(ipaddress.ip_address("10.0.0.1"), allowed)
    with pytest.raises(ConfigError, match=r"10\.0 in a webhook's `allow`"):
        addresses.networks(["10.0"])


def test_a_host_with_internal_addresses_only_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="localhost has only addresses that are not public"):
        addresses.resolve("localhost", 80, ())


def test_the_official_library_verifies_our_signature() -> None:
    at, body = int(datetime.now(UTC).timestamp()), b'{"type":"lockstep.changes","events":[]}'
    other = "whsec_" + "REVG" * 10
    signed = signature([key_of(other), key_of(_SECRET)], "shop.1", at, body)
    headers = {
        "webhook-id": "shop.1",
        "webhook-timestamp": str(at),
        "webhook-signature": signed,
    }
    for secret in (_SECRET, other):
        assert Receiver(secret).verify(body, headers) == json.loads(body)
    with pytest.raises(Exception, match="signature"):
        Receiver(_SECRET).verify(body + b" ", headers)


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_QUJD", "not base64!" * 4, "whsec_" + "QUJD" * 30]
)
def test_a_secret_that_is_none_is_refused_without_its_content(secret: str) -> None:
    with pytest.raises(ConfigError, match="24 to 64 bytes") as refused:
        key_of(secret)
    assert secret == "" or secret not in str(refused.value)


def test_answers_distinguish_an_event_from_a_receiver() -> None:
    assert answer(204, "").delivered
    assert answer(400, "") == answer(400, "9")
    assert not answer(400, "").away
    assert answer(302, "").why == "HTTP 302", "redirects are not followed"
    assert answer(503, "7").away
    assert answer(503, "7").pause == 7
    assert answer(429, "1e9").pause == 0
    assert answer(429, "99999999").pause == 3_600
    assert answer(410, "").over


def test_a_receiver_that_is_away_is_tried_again_however_long_that_lasts() -> None:
    """A night has a thousand failures in a row."""
    waits = [webhooks.away_seconds(failures) for failures in range(8, 2_000)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1.0, 30.0)


SECRET = f"whsec_{'QUJD' * 10}"


@pytest.mark.parametrize(
    ("changed", "severity", "says"),
    [
        ({}, Severity.OK, "billing: 1 secrets, and its url may be sent to"),
        ({"secrets": ["whsec_short"]}, Severity.ERROR, "a webhook's secret is none of 24 to 64"),
        ({"allow": []}, Severity.ERROR, "127.0.0.1 has only addresses that are in no network"),
        ({"url": "https://127.0.0.1/", "allow": []}, Severity.ERROR, "that are not public"),
        ({"allow": ["10.0.0.0/99"]}, Severity.ERROR, "10.0.0.0/99 in a webhook's `allow`"),
        ({"url": "https://none.invalid/"}, Severity.WARNING, "none.invalid is not found"),
        ({"url": "https://example.com/hök"}, Severity.ERROR, "cannot be in a request"),
        ({"url": "https://example.com/a b"}, Severity.ERROR, "cannot be in a request"),
        ({"url": "https://example.com/?q=\u00e4"}, Severity.ERROR, "cannot be in a request"),
        ({"url": "https://example.com:99999/"}, Severity.ERROR, "has a port that is none"),
        ({"url": "https://example.com:x/"}, Severity.ERROR, "has a port that is none"),
    ],
)
def test_the_doctor_checks_secrets_and_whether_the_url_may_be_sent_to(
    changed: dict[str, object], severity: Severity, says: str
) -> None:
    plain = {
        "url": "http://127.0.0.1:9/hook",
        "secrets": [SECRET],
        "tables": ["public.t"],
        "allow": ["127.0.0.0/8"],
    }
    settings = msgspec.convert({"billing": plain | changed}, dict[str, WebhookSettings])
    [found] = checks.examine(msgspec.structs.replace(CONFIG, webhooks=settings))
    assert (found.check, found.severity) == ("webhook", severity)
    assert says in found.what
    assert found.fix or severity is Severity.OK
    assert "QUJD" not in found.what


@pytest.mark.parametrize(
    ("lag_hours", "severity"), [(0.0, Severity.OK), (1.0, Severity.OK), (50.0, Severity.WARNING)]
)
def test_the_doctor_compares_a_webhooks_lag_with_the_retention(
    lag_hours: float, severity: Severity
) -> None:
    group = GroupState("webhook.billing", 1, {("t", 0): 5}, {("t", 0): OffsetRange(0, 6)})
    since_us = int((time.time() - lag_hours * 3_600) * 1e6)
    status = WebhookStatus("billing", group, since_us=since_us)
    config = msgspec.structs.replace(
        CONFIG, log=msgspec.structs.replace(CONFIG.log, retention_hours=100)
    )
    [found] = check_webhooks(config, [status])
    assert (found.check, found.severity) == ("webhook_lag", severity)
    assert found.fix or severity is Severity.OK
