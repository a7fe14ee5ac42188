"""Configuration errors name exactly what is wrong, all at once, and never a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import Config, load, read, show, without_passwords
from cdc.config.schema import settable, variable_of
from cdc.config.template import render
from cdc.errors import ConfigError, Exit

MINIMAL = """\
pipeline: shop
source:
  dsn: postgresql://me@localhost/shop
log:
  bootstrap_servers: localhost:9092
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lockstep.yaml"


def loaded(path: Path, text: str = MINIMAL, **env: str) -> Config:
    path.write_text(text, encoding="utf-8")
    return load(path, env)


def refusal(path: Path, text: str = MINIMAL, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(path, text, **env)
    assert caught.value.exit_code is Exit.CONFIG
    return caught.value.what


def test_names_follow_the_pipeline_unless_given(path: Path) -> None:
    config = loaded(path)
    assert (config.slot, config.publication, config.prefix) == (
        "lockstep_shop",
        "lockstep_shop",
        "shop",
    )
    config = loaded(path, LOCKSTEP_SOURCE_SLOT="s", LOCKSTEP_LOG_PREFIX="p")
    assert (config.slot, config.prefix) == ("s", "p")


def test_every_finding_is_reported_at_once_with_its_line(path: Path) -> None:
    what = refusal(
        path,
        """\
pipeline: My-Shop
source:
  dsn: postgresql://me@localhost/shop
  slto: x
  tables: public.*
  slot: Bad
log:
  bootstrap_servers: localhost
  partitions: many
  kafka:
    acks: 1
batch:
  max_events: 0
log_level: loud
""",
        LOCKSTEP_BATCH_MAX_WAIT="5",
    )
    for line in (
        "lockstep.yaml has 10 errors",
        ":4: source.slto: unknown name; did you mean slot?",
        ":5: source.tables: given text, 'public.*'; expected a list of text, not empty",
        ":8: log.bootstrap_servers: 'localhost' is no address; expected host:port",
        ":9: log.partitions: given text, 'many'; expected a whole number from 1 to 10000",
        ":11: log.kafka.acks: is set by Lockstep",
        ":13: batch.max_events: given a whole number, '0'; expected a whole number from 1",
        ":14: log_level: given text, 'loud'; expected one of debug, error, info, warning",
        "LOCKSTEP_BATCH_MAX_WAIT: the environment sets no such field",
        "did you mean LOCKSTEP_BATCH_MAX_WAIT_MS?",
    ):
        assert line in what


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("LOCKSTEP_PIPELINE", "My-Shop", "cannot name a pipeline; expected 1 to 54 of a-z 0-9 _"),
        ("LOCKSTEP_PIPELINE", "x" * 55, "cannot name a pipeline"),
        ("LOCKSTEP_SOURCE_DSN", "", "expected text, not empty"),
        ("LOCKSTEP_SOURCE_DSN", "localhost", "neither a URL"),
        ("LOCKSTEP_SOURCE_DSN", "host=x hunter2", "libpq cannot read it"),
        ("LOCKSTEP_SOURCE_DSN", "postgresql://h/%zz", "libpq cannot read it"),
        ("LOCKSTEP_SOURCE_DSN", "nosuch=1", "libpq cannot read it"),
        ("LOCKSTEP_SOURCE_DSN", "host=x replication=database", "must not set `replication`"),
        ("LOCKSTEP_SOURCE_SLOT", "Bad", "cannot name a slot; expected 1 to 63 of a-z 0-9 _"),
        ("LOCKSTEP_SOURCE_PUBLICATION", "x" * 64, "cannot name a publication"),
        ("LOCKSTEP_SOURCE_TABLES", "", "expected a list of text, not empty"),
        ("LOCKSTEP_SOURCE_TABLES", "users", "'users' names no table; expected schema.table"),
        ("LOCKSTEP_SOURCE_TABLES", "a.b.c", "names no table"),
        ("LOCKSTEP_SOURCE_TABLES", "pg_catalog.*", "does not publish its catalogs"),
        ("LOCKSTEP_LOG_BOOTSTRAP_SERVERS", "a:1,b", "'b' is no address"),
        ("LOCKSTEP_LOG_BOOTSTRAP_SERVERS", "a:0", "a port is a number from 1 to 65535"),
        ("LOCKSTEP_LOG_PREFIX", "a.b", "cannot start a topic's name"),
        ("LOCKSTEP_LOG_PARTITIONS", "0", "expected a whole number from 1 to 10000"),
        ("LOCKSTEP_LOG_RETENTION_HOURS", "0", "0 would delete events at once"),
        ("LOCKSTEP_LOG_RETENTION_HOURS", "nan", "0 would delete events at once"),
        ("LOCKSTEP_BATCH_MAX_BYTES", "1", "expected a whole number from 65536"),
        ("LOCKSTEP_HTTP_LISTEN", "8080", "'8080' is no address"),
        ("LOCKSTEP_HTTP_LISTEN", "localhost:70000", "a port is a number from 0 to 65535"),
        ("LOCKSTEP_LOG_KAFKA__TRANSACTIONAL_ID", "x", "exactly-once depends on it"),
    ],
)
def test_what_postgres_and_kafka_would_refuse_is_refused_here(
    path: Path, variable: str, value: str, says: str
) -> None:
    what = refusal(path, **{variable: value})
    assert variable in what
    assert says in what
    assert "one error" in what
    assert "hunter2" not in what


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("LOCKSTEP_LOG_PARTITIONS", "12", "log.partitions", 12),
        ("LOCKSTEP_LOG_RETENTION_HOURS", "-1", "log.retention_hours", -1.0),
        ("LOCKSTEP_LOG_LEVEL", "debug", "log_level", "debug"),
        ("LOCKSTEP_SOURCE_TABLES", "a.b, c.*", "source.tables", ["a.b", "c.*"]),
        ("LOCKSTEP_HTTP_LISTEN", "", "http.listen", ""),
        ("LOCKSTEP_CONSOLE_LISTEN", "[::1]:8600", "console.listen", "[::1]:8600"),
        ("LOCKSTEP_HTTP_LISTEN", "[::1]:0", "http.listen", "[::1]:0"),
        ("LOCKSTEP_LOG_KAFKA__SECURITY_PROTOCOL", "ssl", "log.kafka.security.protocol", "ssl"),
        ("LOCKSTEP_ARCHIVE_STORAGE__AWS_REGION", "eu", "archive.storage.AWS_REGION", "eu"),
    ],
)
def test_the_environment_wins_over_the_file(
    path: Path, variable: str, value: str, field: str, expected: object
) -> None:
    path.write_text(MINIMAL, encoding="utf-8")
    rows = {at: (shown, origin) for at, shown, origin in show(read(path, {variable: value}))}
    assert rows[field] == (expected, variable)


def test_a_plugins_option_keeps_its_name(path: Path) -> None:
    path.write_text(MINIMAL + "keyring: {plugin: vault}\n", encoding="utf-8")
    options = read(path, {"LOCKSTEP_KEYRING_OPTIONS__ROLE_ID": "x"}).config.keyring.options
    assert options == {"role_id": "x"}


def test_each_field_has_a_variable_of_its_own() -> None:
    fields = list(settable())
    variables = [variable_of(at) for at, field in fields if not field.is_section]
    assert len(set(variables)) == len(variables)
    prefixes = tuple(f"{variable_of(at)}__" for at, field in fields if field.is_map)
    assert not [each for each in variables if each.startswith(prefixes)]


def test_other_variables_of_ours_are_not_fields(path: Path) -> None:
    loaded(path, LOCKSTEP_CONFIG="x", LOCKSTEP_HOME="y", LOCKSTEP_FAILPOINT="z")


def test_references_are_filled_in_anywhere_in_a_text(path: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("pw\n", encoding="utf-8")
    config = loaded(
        path,
        """\
pipeline: shop
source:
  dsn: "postgresql://me:${file:secret}@${HOST}/$${x}"
log:
  bootstrap_servers: localhost:9092
  partitions: ${COUNT}
""",
        HOST="db",
        COUNT="7",
    )
    assert config.source.dsn == "postgresql://me:pw@db/${x}"
    assert config.log.partitions == 7


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("${NOPE}", "the environment variable NOPE is not set"),
        ("${file:nope}", "cannot read ${file:nope}: No such file or directory"),
        ("${a b}", "`${` starts neither ${VARIABLE} nor ${file:PATH}; $${ escapes it"),
    ],
)
def test_a_reference_to_nothing_is_one_finding(path: Path, reference: str, says: str) -> None:
    what = refusal(path, MINIMAL.replace("localhost:9092", f'"{reference}"'))
    assert says in what
    assert "one error" in what


def test_no_secret_is_shown(path: Path) -> None:
    text = MINIMAL.replace("me@localhost", "me:hunter2@localhost/x?sslpassword=hunter2")
    text += "  kafka: {sasl.password: hunter2, ssl.key.pem: hunter2, sasl.username: me}\n"
    path.write_text(text, encoding="utf-8")
    assert "hunter2" not in str(show(read(path, {})))
    for wrong in ("partitions: 0", "kafka: {sasl.password: [hunter2]}"):
        assert "hunter2" not in refusal(path, text.split("  kafka:")[0] + f"  {wrong}\n")
    assert "hunter2" not in refusal(path, LOCKSTEP_SOURCE_DSN="password:hunter2")


@pytest.mark.parametrize(
    ("dsn", "masked"),
    [
        ("postgresql://me:p:w@h:1/d", "postgresql://me:***@h:1/d"),
        ("postgresql://me@h/d?password=pw&user=y", "postgresql://me@h/d?password=***&user=y"),
        ("host=h password=pw user=me", "host=h password=*** user=me"),
        (r"password = 'p\'w x' host=h", "password = *** host=h"),
        ("postgresql://me@h/d", "postgresql://me@h/d"),
        ("postgresql://me:p?w/x#y@z@h/d", "postgresql://me:***@h/d"),
        (
            "postgresql://h/d?sslmode=require&secret=x&y#z",
            "postgresql://h/d?sslmode=require&secret=***&***#***",
        ),
        ("redis://:pw@h:1/0", "redis://:***@h:1/0"),
        ("s3a://lake/shop", "s3a://lake/shop"),
        ("host=h passwd=pw sslpassword='p w' pw", "host=h passwd=*** sslpassword=*** ***"),
        ("pw@host", "***@host"),
        ("/data/lake", "/data/lake"),
    ],
)
def test_passwords_in_a_dsn_are_masked(dsn: str, masked: str) -> None:
    assert without_passwords(dsn) == masked


def test_the_password_file_is_read_each_time_and_relative_to_the_configuration(
    path: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one\n", encoding="utf-8")
    config = loaded(path, LOCKSTEP_SOURCE_PASSWORD_FILE="secret")
    assert config.password == "one"
    secret.write_text("two\n", encoding="utf-8")
    assert config.password == "two"
    secret.unlink()
    with pytest.raises(ConfigError, match=r"cannot read source\.password_file"):
        _ = config.password


def test_a_console_that_other_machines_reach_needs_a_token(path: Path, tmp_path: Path) -> None:
    for listen in ("0.0.0.0:8600", "[::]:8600", "cdc.example:8600"):
        what = refusal(path, LOCKSTEP_CONSOLE_LISTEN=listen)
        assert "set console.token_file" in what
        config = loaded(path, LOCKSTEP_CONSOLE_LISTEN=listen, LOCKSTEP_CONSOLE_TOKEN_FILE="token")
        assert config.console.token_file == str(tmp_path / "token")
        named = {
            "LOCKSTEP_CONSOLE_OIDC_ISSUER": "https://accounts.example.com",
            "LOCKSTEP_CONSOLE_OIDC_AUDIENCE": "lockstep",
        }
        assert loaded(path, LOCKSTEP_CONSOLE_LISTEN=listen, **named).console.oidc.issuer
    for listen in ("", "127.0.0.1:0", "localhost:8600", "[::1]:8600"):
        assert loaded(path, LOCKSTEP_CONSOLE_LISTEN=listen).console.listen == listen


def test_an_issuer_needs_an_audience_and_private_places(path: Path, tmp_path: Path) -> None:
    def given(issuer: str = "https://a.example", **more: str) -> dict[str, str]:
        fields = {"audience": "lockstep", "issuer": issuer} | more
        return {f"LOCKSTEP_CONSOLE_OIDC_{name.upper()}": each for name, each in fields.items()}

    oidc = loaded(path, **given(keys="keys.json", viewers="email:a@b, group:x y")).console.oidc
    assert oidc.keys == str(tmp_path / "keys.json")
    assert oidc.viewers == ("email:a@b", "group:x y")
    keys = "https://a.example/keys"
    assert loaded(path, **given("cdc.example.com", keys=keys)).console.oidc.keys == keys
    assert loaded(path, **given("http://127.0.0.1:1")).console.oidc.issuer
    assert "set audience" in refusal(path, LOCKSTEP_CONSOLE_OIDC_ISSUER="https://a.example")
    for issuer in (
        "a.example",
        "http://a.example",
        "https://me:pw@a.example",
        "https://[",
        "x://a",
    ):
        assert "no https URL" in refusal(path, **given(issuer))
    for keys in ("http://a.example/k", "ftp://a.example/k", "https:///k", "https://a b/"):
        assert "expected a file, or an https URL" in refusal(path, **given(keys=keys))
    for people in ("ann@example.com", "email:", "group:a,sub:", "user:ann"):
        assert "names nobody" in refusal(path, **given(actors=people))
    assert "header" in refusal(path, **given(header="a: b"))


def test_a_password_is_given_once(path: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("pw", encoding="utf-8")
    text = MINIMAL.replace("me@", "me:pw@")
    assert "has a password already" in refusal(path, text, LOCKSTEP_SOURCE_PASSWORD_FILE="secret")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pipeline: [", "lockstep.yaml:1:12: not YAML"),
        ("pipeline: a\npipeline: b", ":2: pipeline: given twice"),
        ("log: {prefix: a}\nlog: {partitions: 2}", ":2: log: given twice"),
        ("- a", ":1: the file: expected names with values below it"),
        ("source: x", ":1: source: expected names with values below it"),
        ("pipeline: &a [*a]", "pipeline: given something else"),
        ("pipeline: 2026-01-01", "pipeline: given something else, '2026-01-01'; expected text"),
        ("pipeline: !!python/object:os.system x", "pipeline: given something else"),
        ("", "pipeline: missing; expected text, here or in LOCKSTEP_PIPELINE"),
        ("\0", "not YAML"),
        ("sauce: x", "sauce: unknown name; did you mean source?"),
    ],
)
def test_what_is_not_a_configuration_is_a_finding_not_a_crash(
    path: Path, text: str, says: str
) -> None:
    assert says in refusal(path, text)


def test_settings_of_an_unreadable_file_are_not_reported_missing(path: Path) -> None:
    """Settings that the file may contain are not reported as missing."""
    assert "missing" not in refusal(path, f"{MINIMAL}\nfollowers: [")


def test_the_error_about_a_missing_file_says_how_to_write_one(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration") as caught:
        load(path, {})
    assert "cdc init" in caught.value.hint


def test_an_empty_value_of_an_optional_field_is_its_default(path: Path) -> None:
    config = loaded(path, MINIMAL.replace("log:", "  slot:\nlog:\n  prefix: null"))
    assert (config.slot, config.prefix) == ("lockstep_shop", "shop")


def test_the_file_that_init_writes_loads_and_names_every_field(path: Path) -> None:
    values = {
        "pipeline": "shop",
        "source.dsn": "postgresql://me@localhost/shop",
        "log.bootstrap_servers": "localhost:9092",
    }
    text = render(values)
    assert loaded(path, text) == loaded(path)
    for at, field in settable():
        assert f"{at[-1]}:" in text, field
    # Every commented field can be uncommented as it is.
    switched = "\n".join(
        line.replace("# ", "", 1) if ": " in line and line.lstrip().startswith("# ") else line
        for line in text.splitlines()
        if not line.lstrip().startswith("# ") or line.lstrip("# ").split(":")[0].isidentifier()
    )
    secret = path.parent / "postgres"
    secret.write_text("pw", encoding="utf-8")
    switched = switched.replace("/run/secrets/postgres", str(secret))
    (path.parent / "views").mkdir()
    (path.parent / "views/totals.sql").write_text("-- key: id\nSELECT id FROM orders")
    secrets = {
        "KAFKA_PASSWORD": "pw",
        "HMAC_KEY": "k" * 16,
        "REDIS_PASSWORD": "pw",
        "HOOK_SECRET": "whsec",
    }
    secrets |= {"LOCKSTEP_SECRET": "s" * 32}
    config = loaded(path, switched, **secrets)
    assert config.slot == "lockstep_shop"
    assert set(config.followers) == {"mirror", "cache", "search"}
    assert set(config.views) == {"order_totals", "totals"}


@pytest.mark.parametrize("written", ["off", "on", "parallel", '"on"'])
def test_a_choice_spelled_on_or_off_is_not_read_as_a_boolean(path: Path, written: str) -> None:
    """YAML 1.1 reads `off` as false; in Postgres and in this field it is the word off."""
    text = MINIMAL.replace("shop\nlog:", f"shop\n  streaming: {written}\nlog:")
    assert loaded(path, text).source.streaming == written.strip('"')


def test_a_boolean_is_not_a_choice(path: Path) -> None:
    text = MINIMAL.replace("shop\nlog:", "shop\n  streaming: yes\nlog:")
    assert "given a yes or no, 'yes'; expected one of off, on, parallel" in refusal(path, text)
