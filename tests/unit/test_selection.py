"""The configuration decides for any table what is captured, and how; errors name the section."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import Config, Mask, load, read, show
from cdc.config.patterns import parse_table_pattern
from cdc.errors import ConfigError

HEAD = """\
pipeline: shop
source:
  dsn: postgresql://me@localhost/shop
  tables: [public.*, "*.orders", "tenant_*.item"]
  exclude: [public.audit_*, other.orders]
log:
  bootstrap_servers: localhost:9092
"""
KEY = "0123456789abcdef"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lockstep.yaml"


def config(path: Path, tables: str = "", head: str = HEAD) -> Config:
    path.write_text(head + tables, "utf-8")
    return load(path, {"HMAC_KEY": KEY})


def refusal(path: Path, tables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(path, tables)
    return caught.value.what


@pytest.mark.parametrize(
    ("text", "taken", "not_taken"),
    [
        ("public.users", ("public", "users"), ("public", "users2")),
        ("public.*", ("public", "anything at all"), ("publi", "c")),
        ("public.log_*", ("public", "log_2024"), ("public", "logs")),
        ("*.users", ("x.y", "users"), ("x", "Users")),
        ("t_*.*_log", ("t_1", "a_log"), ("t", "a_log")),
        ('"a.b"."c ""d"""', ("a.b", 'c "d"'), ("a", 'b.c "d"')),
        ("Été.Straße", ("Été", "Straße"), ("été", "straße")),
        ('public."*"', ("public", "*"), ("public", "x")),
        (
            "public.a.*".replace(".a.", '."a.".').removesuffix(".*"),
            ("public", "a."),
            ("public", "ab"),
        ),
    ],
)
def test_table_patterns_name_what_the_catalog_holds(
    text: str, taken: tuple[str, str], not_taken: tuple[str, str]
) -> None:
    pattern = parse_table_pattern(text)
    assert pattern.matches(*taken)
    assert not pattern.matches(*not_taken)
    assert pattern.exact in {None, taken}


@pytest.mark.parametrize("text", ["users", "a.b.c", ".a", "a.", 'a."b', "", "a b.c"])
def test_what_is_no_table_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="table pattern"):
        parse_table_pattern(text)


def test_excluded_tables_are_left_out_of_what_is_included(path: Path) -> None:
    selection = config(path).selection
    assert selection.includes("public", "users")
    assert selection.includes("any", "orders")
    assert selection.includes("tenant_1", "item")
    assert not selection.includes("tenant_1", "items")
    assert not selection.includes("public", "audit_log")
    assert not selection.includes("other", "orders")
    assert not selection.includes("lockstep", "orders"), "ours, unless the schema is named"
    assert config(
        path, head=HEAD.replace("other", "x").replace("public.*", "lockstep.*")
    ).selection.includes("lockstep", "orders")
    assert selection.schemas is None
    assert config(path, head=HEAD.replace(', "*.orders", "tenant_*.item"', "")).selection.schemas


TABLES = """\
tables:
  public.*:
    exclude: [secret_*]
    mask: {email: null, city: {truncate: 2}}
  public.users:
    key: [tenant, id]
    where: region = 'eu'
    mask:
      email: {hmac: "${HMAC_KEY}"}
      zip: {fixed: 0}
  public.people:
    columns: [id, "name*", '"odd*"']
    mask: {city: keep}
"""


def test_sections_that_match_are_combined(path: Path) -> None:
    users = config(path, TABLES).selection.of(("public", "users"))
    assert (users.key, users.where) == (("tenant", "id"), "region = 'eu'")
    assert not users.captures("secret_code")
    assert users.captures("email")
    assert users.mask("email") == Mask("hmac", KEY)
    assert users.mask("city") == Mask("truncate", 2)
    assert users.mask("zip") == Mask("fixed", 0)
    assert users.mask("id") is None


def test_a_section_of_many_tables_requires_no_column_of_any(path: Path) -> None:
    selection = config(path, TABLES).selection
    assert selection.of(("public", "users")).hidden == {"email", "zip"}
    assert selection.of(("public", "people")).hidden == frozenset()


def test_only_the_named_columns_are_captured_and_keep_removes_a_mask(path: Path) -> None:
    people = config(path, TABLES).selection.of(("public", "people"))
    assert [c for c in ("id", "name_last", "odd*", "odd1", "secret_x") if people.captures(c)] == [
        "id",
        "name_last",
        "odd*",
    ]
    assert people.mask("city") == Mask("keep")
    assert not people.captures("city"), "it is not among the columns"


def test_a_section_without_settings_is_no_rule(path: Path) -> None:
    assert config(path, "tables: {public.users: , public.orders: {}}").tables == {}


def test_a_partition_is_selected_by_its_own_name_and_by_those_above_it(path: Path) -> None:
    selection = config(path, TABLES).selection
    leaf = selection.of(("parts", "users_2024"), ("public", "users"))
    assert leaf.mask("email") == Mask("hmac", KEY)
    assert selection.of(("parts", "users_2024")).mask("email") is None


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ("{users: {exclude: [a]}}", "tables.users: names no table"),
        ("{public.u: {exclud: [a]}}", "unknown name; did you mean exclude?"),
        ("{public.u: x}", "public.u: expected names with values below it"),
        ("{public.u: {columns: [a], exclude: [b]}}", "are alternatives; keep one"),
        ("{public.u: {columns: []}}", "columns is empty; leave it out"),
        ("{public.u: {where: ''}}", "where is empty; leave it out"),
        ("{public.u: {where: 3}}", "where: given a whole number, '3'; expected text"),
        ("{public.u: {key: [a, a]}}", "key names a column twice"),
        ("{public.u: {key: [a], columns: [b]}}", "key names a, which columns leaves out"),
        ("{public.u: {key: [a], exclude: ['*']}}", "key names a, which exclude leaves out"),
        ("{public.u: {key: [a], mask: {a: null}}}", "mask null makes rows alike"),
        ("{public.u: {key: [a], mask: {'*': {fixed: 1}}}}", "mask fixed makes rows alike"),
        ("{public.u: {key: [a], mask: {a: {truncate: 9}}}}", "mask truncate makes rows alike"),
        ("{public.u: {mask: {a: {}}}}", "expected null, keep, {fixed: value}, {truncate: n}"),
        ("{public.u: {mask: {a: hash}}}", "expected null, keep, {fixed: value}"),
        ("{public.u: {mask: {a: {truncate: -1}}}}", "a length is not negative"),
        ("{public.u: {mask: {a: {truncate: x}}}}", "given text, 'x'; expected a whole number"),
        ("{public.u: {mask: {a: {fixed: 1, truncate: 2}}}}", "a column has one mask"),
        ("{public.u: {mask: {a: {cut: 2}}}}", "unknown name"),
        ("{public.u: {mask: {a: {hmac: '${NOPE}'}}}}", "variable NOPE is not set"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(path: Path, tables: str, says: str) -> None:
    what = refusal(path, f"tables: {tables}\n")
    assert says in what
    assert "one error" in what


@pytest.mark.parametrize("given", ["hunter2", "[hunter2, hunter2, hunter2]"])
def test_an_hmac_key_is_long_and_is_shown_nowhere(path: Path, given: str) -> None:
    what = refusal(path, f"tables: {{public.u: {{mask: {{a: {{hmac: {given}}}}}}}}}\n")
    assert "hunter2" not in what
    path.write_text(HEAD + TABLES, "utf-8")
    effective = read(path, {"HMAC_KEY": KEY})
    rows = {at: (value, origin) for at, value, origin in show(effective)}
    assert rows["tables.public.users.mask.email.hmac"] == ("***", f"{path}:16")
    assert rows["tables.public.*.mask.email"][0] == "null"
    assert KEY not in str(rows)
    assert KEY not in repr(effective)


def test_an_hmac_key_may_come_from_a_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "hmac.key").write_text(f"{KEY}\n", "utf-8")
    tables = "tables: {public.u: {mask: {a: {hmac: '${file:hmac.key}'}}}}\n"
    assert config(path, tables).selection.of(("public", "u")).mask("a") == Mask("hmac", KEY)
