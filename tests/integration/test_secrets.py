"""Commands that call servers print no secret of the configuration, whatever servers answer."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cdc.cli import main
from tests.unit.test_config_secrecy import MARKER, configuration, written


@pytest.mark.long("the other commands", sample=["doctor", "setup", "slot status"])
@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["doctor", "--json"],
        ["status"],
        ["status", "--json"],
        ["setup"],
        ["slot", "status"],
        ["snapshot", "public.users"],
    ],
    ids=" ".join,
)
def test_a_command_prints_and_logs_no_secret(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    command: list[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    given = configuration()
    # librdkafka refuses unknown options before it connects.
    given["log"]["kafka"] = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "me",
        "sasl.password": given["log"]["kafka"]["sasl.password"],
    }
    code = main.run([*command, *written(tmp_path / "lockstep.yaml", given)])
    captured = capfd.readouterr()
    assert code != 70, captured.err
    assert captured.out + captured.err
    assert MARKER not in captured.out + captured.err
    assert MARKER not in caplog.text


def test_a_setting_that_librdkafka_refuses_is_named_without_its_value(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = configuration()
    for name, value in (("sasl.oauthbearer.config", MARKER), ("any.name", MARKER)):
        given["log"]["kafka"] = {
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "OAUTHBEARER",
            "enable.sasl.oauthbearer.unsecure.jwt": True,
            name: value,
        }
        main.run(["status", *written(tmp_path / "lockstep.yaml", given)])
        captured = capfd.readouterr()
        assert captured.err
        assert MARKER not in captured.out + captured.err
