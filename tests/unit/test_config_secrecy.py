"""No secret of the configuration is shown: every place that may hold one is found by its type."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import msgspec
import pytest
import yaml

from cdc.cli import main
from cdc.config import Config, Mask, load
from cdc.config.schema import is_struct, plain
from cdc.config.secrecy import NeverShown, OptionMap, PartlyShown, Section, secrecy_of
from cdc.errors import Exit

MARKER: Final = "hunter2"
# What each address looks like with a password in it: one for every field of this type.
ADDRESSES: Final = {
    "source.dsn": "postgresql://me:{0}@localhost:1/shop?sslpassword={0}&sslmode=disable",
    "snapshot.dsn": "host=localhost port=1 user=me password='{0} x' sslpassword={0}",
    "followers.redis.redis.url": "redis://me:{0}@localhost:1/0?password={0}",
    "followers.opensearch.opensearch.url": "http://me:{0}@localhost:1/?token={0}#{0}",
    "followers.sql.sql.url": "postgresql://me:{0}@localhost:1/copy?sslpassword={0}",
    # These take no login: a value that has one is refused, below.
    "log.bootstrap_servers": "localhost:1",
    "http.listen": "",
    "console.listen": "",
    "console.oidc.keys": "/run/issuer/keys.json",
    "delta.path": "/lake/shop",
    "tracing.endpoint": "http://me:{0}@localhost:1/v1/traces?token={0}",
    "archive.path": "/lake/archive",
    "keyring.path": "/lake/keys.sqlite",
    "followers.delta.delta.path": "/lake/other",
}
STORES: Final = ("delta", "redis", "opensearch", "sql", "plugin")


def secret() -> str:
    """Return a text that occurs nowhere else, long enough for every field."""
    return f"{MARKER}-{next(_numbers)}-" + "x" * 32


_numbers = itertools.count()


def filled(kind: Any, at: tuple[str, ...]) -> Any:  # noqa: ANN401, PLR0911 - what YAML takes
    """Return a value for a type, with a secret wherever one is possible; None if none is."""
    note = secrecy_of(kind)
    if isinstance(note, NeverShown):
        return secret()
    if isinstance(note, PartlyShown):
        return ADDRESSES[".".join(at)].format(secret())
    if isinstance(note, OptionMap):
        inner = plain(get_args(plain(kind))[1])
        if get_origin(inner) is dict:
            return {"public.users": {"a": {"password": secret(), "b": [secret()]}}}
        free = {"list": [secret()], "analysis": {"x": {"y": secret()}}} if inner is object else {}
        return {"any.name": secret(), "sasl.password": secret(), "AWS_SECRET": secret(), **free}
    kind = plain(kind)
    if kind is Mask:
        return {"hmac": secret()}
    if is_struct(kind):
        return section(kind, at)
    entry = plain(get_args(kind)[1]) if get_origin(kind) is dict else None
    if at == ("followers",):
        return {store: follower(entry, store) for store in STORES}
    if at == ("tables",):
        return {"public.users": section(entry, at)}
    return {"email": filled(entry, at)} if entry is Mask else None


def section(kind: Any, at: tuple[str, ...]) -> dict[str, Any]:  # noqa: ANN401 - a type
    found = {f.encode_name: filled(f.type, (*at, f.encode_name)) for f in fields(kind)}
    return {name: value for name, value in found.items() if value is not None}


def follower(kind: Any, store: str) -> dict[str, Any]:  # noqa: ANN401 - a type
    at = ("followers", store)
    return {f.name: filled(f.type, (*at, f.name)) for f in fields(kind) if f.name == store}


def fields(kind: Any) -> tuple[msgspec.structs.FieldInfo, ...]:  # noqa: ANN401 - a type
    return msgspec.structs.fields(kind)


def configuration() -> dict[str, Any]:
    """Return a configuration that loads, with a secret in every place that may hold one."""
    given = section(Config, ())
    given["pipeline"] = "shop"
    given["followers"]["opensearch"]["opensearch"]["user"] = "me"
    given["followers"]["plugin"]["plugin"]["kind"] = "files"
    given["keyring"]["plugin"] = "vault"
    return given


def places(value: object, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all values that hold a secret."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from places(each, (*at, name))
    elif MARKER in str(value):
        yield at


def written(path: Path, given: object) -> list[str]:
    path.write_text(yaml.safe_dump(given, sort_keys=False), encoding="utf-8")
    return ["-c", str(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lockstep.yaml"


def test_every_place_for_a_secret_is_filled() -> None:
    found = {".".join(at) for at in places(configuration())}
    assert {
        "source.dsn",
        "snapshot.dsn",
        "control.secret",
        "log.kafka.sasl.password",
        "tables.public.users.mask.email.hmac",
        "followers.delta.delta.storage.AWS_SECRET",
        "followers.redis.redis.url",
        "followers.opensearch.opensearch.url",
        "followers.opensearch.opensearch.password",
        "followers.opensearch.opensearch.settings.any.name",
        "followers.opensearch.opensearch.mappings.public.users.a.password",
        "followers.sql.sql.url",
        "followers.plugin.plugin.options.any.name",
        "keyring.options.any.name",
    } <= found


@pytest.mark.parametrize("json", [False, True])
def test_config_show_prints_no_secret(
    path: Path, capsys: pytest.CaptureFixture[str], *, json: bool
) -> None:
    at = written(path, configuration())
    assert main.run(["config", "show", *at, *(["--json"] if json else [])]) == Exit.OK
    shown = capsys.readouterr()
    assert MARKER not in shown.out + shown.err
    assert shown.out.count("***") >= len(list(places(configuration())))
    assert "followers.delta.delta.storage.AWS_SECRET" in shown.out
    assert "me:***@localhost:1/shop?sslpassword=***&sslmode=disable" in shown.out


def test_a_configurations_text_holds_no_secret(path: Path) -> None:
    written(path, configuration())
    config = load(path, {})
    assert MARKER not in repr(config)
    assert MARKER not in str(config.followers["delta"])


def test_what_is_harmless_is_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = configuration()
    given["log"]["kafka"] = {"security.protocol": "sasl_ssl", "linger.ms": 5}
    given["followers"]["delta"]["delta"]["storage"] = {"AWS_REGION": "eu-central-1"}
    given["followers"]["opensearch"]["opensearch"]["settings"] = {"index.number_of_shards": 3}
    assert main.run(["config", "show", *written(path, given)]) == Exit.OK
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "log.kafka.security.protocol sasl_ssl" in shown
    assert "log.kafka.linger.ms 5" in shown
    assert "storage.AWS_REGION eu-central-1" in shown
    assert "settings.index.number_of_shards 3" in shown


ALL: Final = [".".join(at) for at in places(configuration())]
# Values of a wrong type; a number is a password that lacks its quotes.
WRONG: Final = ([MARKER], {"a": MARKER}, 918273645, 918273645.5, MARKER, f"{MARKER}://{MARKER}")


@pytest.mark.parametrize("place", ALL)
def test_an_error_about_a_secret_does_not_quote_it(
    path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    for wrong in WRONG:
        given = configuration()
        holder, at = given, next(at for at in places(given) if ".".join(at) == place)
        for name in at[:-1]:
            holder = holder[name]
        holder[at[-1]] = wrong
        code = main.run(["config", "check", *written(path, given)])
        captured = capsys.readouterr()
        output = captured.out + captured.err
        assert MARKER not in output
        assert "918273645" not in output
        if code != Exit.OK:
            assert code == Exit.CONFIG
            assert place in output


@pytest.mark.parametrize("place", ALL)
def test_an_unset_reference_in_a_secret_names_the_variable_only(path: Path, place: str) -> None:
    given = configuration()
    holder, at = given, next(at for at in places(given) if ".".join(at) == place)
    for name in at[:-1]:
        holder = holder[name]
    holder[at[-1]] = MARKER + "${" + f"a {MARKER}" + "}" + "${NOT_SET}"
    written(path, given)
    with pytest.raises(Exception, match="NOT_SET is not set") as raised:
        load(path, {})
    assert MARKER not in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source.dsn", f"postgresql://me:{MARKER}@{MARKER}@h/d"),
        ("source.dsn", f"postgresql://me:{MARKER}/x@h/d"),
        ("source.dsn", f"postgresql://me:{MARKER}#x@h/d"),
        ("source.dsn", f"postgresql://me:{MARKER}?x@h/d"),
        ("source.dsn", f"host=h password='{MARKER}"),
        ("source.dsn", f"password:{MARKER}"),
        ("snapshot.dsn", f"postgresql://me:{MARKER}:{MARKER}/@h/d"),
        ("log.bootstrap_servers", f"SASL_SSL://me:{MARKER}@h:1"),
        ("log.bootstrap_servers", f"username=me,password={MARKER}"),
        ("http.listen", f"me:{MARKER}@h:1"),
        ("delta.path", f"s3a://key:{MARKER}@lake/shop"),
        ("delta.path", f"abfss://lake@shop/x?sig={MARKER}"),
    ],
)
def test_an_address_that_is_refused_is_not_quoted(
    path: Path, capsys: pytest.CaptureFixture[str], field: str, value: str
) -> None:
    given = configuration()
    section_, name = field.split(".")
    given[section_][name] = value
    assert main.run(["config", "check", *written(path, given)]) == Exit.CONFIG
    output = capsys.readouterr().err
    assert field in output
    assert MARKER not in output


@pytest.mark.parametrize("store", ["redis", "opensearch", "sql"])
def test_a_password_that_a_client_would_take_for_a_port_is_refused(path: Path, store: str) -> None:
    given = configuration()
    scheme = {"redis": "redis", "opensearch": "http", "sql": "postgresql"}[store]
    given["followers"][store][store]["url"] = f"{scheme}://me:{MARKER}/x@h/0"
    written(path, given)
    with pytest.raises(Exception, match="write @ as %40") as raised:
        load(path, {})
    assert MARKER not in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        *(f"password: {sign}{MARKER}" for sign in "*!&@%`|>{[,]}?"),
        f"password: '{MARKER}",
        f'password: "\\q{MARKER}"',
        f"password: a: {MARKER}",
        f"password: !{MARKER}!x y",
        f"password: &a {MARKER}\n    user: &a x",
        f"password:{MARKER}",
        f"? [{MARKER}]\n    : x",
        f"{{password:{MARKER}: x}}",
    ],
)
def test_a_line_that_is_no_yaml_is_named_and_not_quoted(
    path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path.write_text(
        "pipeline: shop\nsource: {dsn: 'host=h'}\nlog: {bootstrap_servers: 'h:1'}\n"
        f"followers:\n  search:\n   opensearch:\n    url: http://h\n    user: me\n    {line}\n",
        encoding="utf-8",
    )
    code = main.run(["config", "check", "-c", str(path)])
    output = capsys.readouterr().err
    assert MARKER not in output
    assert code == Exit.OK or "lockstep.yaml:" in output


# --- no field is forgotten ---

_REVEALS = re.compile(r"pass|secret|token|credential|jaas|pem|\bkey|dsn|url|listen|servers|path")
# Files, templates and sections whose names look like secrets.
_HARMLESS: Final = {"password_file", "token_file", "key", "keyring"}
# Maps whose entries name tables and columns.
_NAMES: Final = {"aliases", "by"}


def structs(kind: Any, seen: set[Any]) -> Iterator[Any]:  # noqa: ANN401 - types
    kind = plain(kind)
    if is_struct(kind) and kind not in seen:
        seen.add(kind)
        yield kind
        for field in fields(kind):
            yield from structs(field.type, seen)
    for each in get_args(kind):
        yield from structs(each, seen)


def test_every_field_that_is_named_like_a_secret_and_every_free_map_is_noted() -> None:
    for struct in structs(Config, set()):
        for field in fields(struct):
            kind = plain(field.type)
            entry = get_args(kind)[1] if get_origin(kind) is dict else None
            if _REVEALS.search(field.name) and field.name not in _HARMLESS and struct is not Mask:
                assert secrecy_of(field.type), f"{struct.__name__}.{field.name}: say what is secret"
            if entry is not None and field.name not in _NAMES:
                of = plain(entry)
                known = is_struct(of) or of == tuple[str, ...]
                assert known or secrecy_of(field.type), f"{struct.__name__}.{field.name}: a map"


def test_a_section_with_a_secret_hides_it_in_its_text() -> None:
    for struct in structs(Config, set()):
        if any(secrecy_of(field.type) for field in fields(struct)):
            assert issubclass(struct, Section), struct.__name__
