"""The events are the same however the daemon connects and whatever code reads the socket."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.alike import Another, content, quiesced
from tests.fixtures.daemon import PipelineUnderTest
from tests.fixtures.standby import NewPair, majors
from tests.fixtures.tiers import need_program

_PASSWORD = "it's a \\secret"
_WHO = """
local all all trust
host all postgres 127.0.0.1/32 trust
host all reader 127.0.0.1/32 scram-sha-256
"""
_ROW = (
    "INSERT INTO users SELECT {0}, 1, string_agg(md5(i::text), '') FROM generate_series(1, {1}) i"
)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for a socket, whose path may have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        yield Path(folder)


def certified(folder: Path) -> dict[str, str]:
    """Make a key with a certificate for loopback; return the server's settings."""
    need_program("openssl")
    key, certificate, who = folder / "key.pem", folder / "cert.pem", folder / "pg_hba.conf"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(
        ["openssl", "req", "-x509", *curve, *name, "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    who.write_text(_WHO, "ascii")
    return {
        "ssl": "on",
        "ssl_cert_file": str(certificate),
        "ssl_key_file": str(key),
        "hba_file": str(who),
        "password_encryption": "scram-sha-256",
        "logical_decoding_work_mem": "64kB",
        # No reconnect is expected, however long a busy machine stops a daemon.
        "wal_sender_timeout": "10min",
    }


def way(line: PipelineUnderTest) -> tuple[bool, str | None]:
    """Return whether its walsender uses TLS, and the client address that it sees."""
    encrypted, address = line.query(
        "SELECT ssl, host(client_addr) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)"
        " WHERE pid = %s",
        line.slot("active_pid"),
    )
    return encrypted, address


@pytest.mark.majors
@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_tls_tcp_and_unix_sockets_bring_the_same_events(
    major: int, new_pair: NewPair, another: Another, tmp_path: Path, short_path: Path
) -> None:
    settings = {**certified(tmp_path), "unix_socket_directories": str(short_path)}
    _, unix = new_pair(
        major,
        "CREATE TABLE users (id int PRIMARY KEY, n int NOT NULL, note text)",
        f"CREATE ROLE reader SUPERUSER LOGIN PASSWORD '{_PASSWORD.replace(chr(39), chr(39) * 2)}'",
        standby=False,
        settings=settings,
        streaming="on",
    )
    unix.database.execute("ALTER TABLE users ALTER note SET STORAGE EXTERNAL")
    as_reader = {"user": "reader", "password": _PASSWORD}
    verified = {"sslmode": "verify-full", "sslrootcert": settings["ssl_cert_file"]}
    tls = another(unix, {**as_reader, **verified}, streaming="on")
    tcp = another(unix, {**as_reader, "sslmode": "disable"}, streaming="off")
    local = another(unix, {"host": str(short_path)}, streaming="off")
    lines = [tls, tcp, local]
    for line in lines:
        line.start()
    for line in lines:
        line.daemon.wait_ready()
    assert [way(line) for line in lines] == [
        (True, "127.0.0.1"),
        (False, "127.0.0.1"),
        (False, None),
    ]
    # Rows near the sizes of TLS records and of libpq's buffer; then one of megabytes; then many.
    tcp.database.execute(
        *(_ROW.format(number, 200 + 37 * number) for number in range(1, 31)),
        _ROW.format(100, 100_000),
        "INSERT INTO users SELECT i, 1, 'n' || i FROM generate_series(1000, 20000) i",
        "UPDATE users SET n = 2 WHERE id < 1500",
    )
    quiesced(lines)
    complete = content(tcp)
    assert content(tls) == content(local) == complete
    for line in lines:
        assert line.daemon.metric("lockstep_reconnects_total") == 0
        assert line.daemon.term() == 0
