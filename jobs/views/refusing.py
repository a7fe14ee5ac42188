"""What a view may not contain: refused by name, with the reason and what to write instead.

Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlglot import exp

from cdc.errors import ConfigError


class UnsupportedError(ConfigError):
    """A view has something whose answer would not, or not provably, be Postgres' own."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"a view can't have {what}", hint=hint)


class FunctionRefusal(NamedTuple):
    """Why a function or an operator is in no view, and what to write instead of it."""

    reason: str
    rewrite: str


_AT_THE_READER: Final = "select what it is computed of, and compute it where the view is read"
_GROUPS: Final = (
    (
        ("now() current_date current_time localtimestamp localtime"
        " clock_timestamp() statement_timestamp() transaction_timestamp() timeofday()"),
        "which depends on the time of the query",
        "compare with a column, or filter where the view is read",
    ),
    (
        ("random() random_normal() setseed() gen_random_uuid() uuid_generate_v4() uuidv4() uuidv7()"
        " nextval() currval() lastval() setval()"),
        "whose answer is another one each time",
        "store the value in a column, and select that",
    ),
    (
        ("current_user session_user current_catalog current_schema version()"
        " current_setting() pg_backend_pid() inet_client_addr() txid_current()"
        " pg_current_xact_id() pg_typeof() pg_sleep()"),
        "which depends on the session, not on rows",
        "leave it out: a view's rows are the same for every reader",
    ),
    (
        "to_char()",
        "whose texts depend on the server's locale",
        "select the value, or its parts by extract(), and format it where the view is read",
    ),
    (
        "to_date() to_timestamp() to_number()",
        "whose patterns Spark reads in another way",
        ("store the value as a date, timestamp or numeric, and select that; of seconds write"
        " timestamp '1970-01-01' + n * interval '1 second'"),
    ),
    (
        "age() justify_days() justify_hours() justify_interval() make_interval()",
        "whose interval a store has no type for",
        "subtract dates, or extract(epoch FROM …) of timestamps",
    ),
    (
        "date_part()",
        "whose float8 loses digits",
        "write extract(… FROM …), which is numeric",
    ),
    (
        "date_bin() make_time() make_timestamp() make_timestamptz() isfinite() timezone() overlaps",
        "for which Spark has nothing of the same meaning",
        "write date_trunc(), make_date(), AT TIME ZONE 'UTC' and comparisons",
    ),
    (
        "initcap()",
        "which depends on the collation",
        'select the text as it is, or lower(… COLLATE "C")',
    ),
    (
        "ILIKE",
        "which depends on the collation",
        'write lower(… COLLATE "C") LIKE …, which knows the letters of ASCII',
    ),
    (
        ("~ ~* similar_to regexp_replace() regexp_match() regexp_matches() regexp_substr()"
        " regexp_count() regexp_instr() regexp_split_to_array()"
        " regexp_split_to_table()"),
        "a regular expression, whose dialects differ",
        "write LIKE, split_part(), strpos() or replace()",
    ),
    (
        "format() quote_literal() quote_ident() quote_nullable()",
        "for which Spark has nothing of the same meaning",
        "write concat() or ||",
    ),
    (
        ("md5() sha224() sha256() sha384() sha512() digest() encode() decode() convert_to()"
        " convert_from() octet_length() bit_length() ascii() chr() to_hex() crc32() hashtext()"
        " normalize() unistr()"),
        "which depends on the database's encoding, or has no type in a store",
        _AT_THE_READER,
    ),
    (
        "overlay()",
        "for which Spark has nothing of the same meaning",
        "write left(…) || … || substring(…)",
    ),
    (
        ("generate_series() generate_subscripts() unnest() jsonb_array_elements()"
        " jsonb_array_elements_text() jsonb_each() jsonb_each_text() jsonb_object_keys()"
        " jsonb_path_query() jsonb_to_record() jsonb_to_recordset() jsonb_populate_record()"
        " jsonb_populate_recordset() json_array_elements() json_array_elements_text() json_each()"
        " json_each_text() json_object_keys() json_to_record() json_to_recordset()"
        " string_to_table()"),
        "which makes several rows of one, and these have no key",
        "keep a table with a row for each and join it, or make the view in Python (docs/CODE.md)",
    ),
    (
        ("array[] array_length() array_to_string() string_to_array() array_position()"
        " array_append() array_cat() array_remove() array_upper() cardinality() &&"),
        "of an array, which a view only selects as it is",
        "keep a table with a row for each element, and join or count its rows",
    ),
    (
        ("json_build_object() jsonb_build_object() json_build_array() jsonb_build_array() to_json()"
        " to_jsonb() row_to_json() array_to_json() json_arrayagg() json_objectagg()"),
        "a document, in which Spark writes numbers and times in another way",
        ("select the columns, which a store has as one row, or make the view in Python"
        " (docs/CODE.md)"),
    ),
    (
        ("jsonb_set() jsonb_insert() jsonb_strip_nulls() jsonb_pretty() jsonb_path_exists()"
        " jsonb_path_match() jsonb_path_query_array() jsonb_path_query_first() json_array_length()"
        " json_typeof() json_value() json_query() json_exists()"),
        "for which Spark has nothing that keeps numbers as they are",
        "write -> and ->> of a jsonb column, and make documents where the view is read",
    ),
    ("jsonb_extract_path()", "another form of #>", "write … #> '{a,b}'"),
    ("jsonb_extract_path_text()", "another form of #>>", "write … #>> '{a,b}'"),
    ("@?", "a JSON path, whose dialects differ", "compare members that ->> selects"),
    (
        "@@",
        "a JSON path or a text search, whose dialects differ",
        "compare members that ->> selects, or search in OpenSearch",
    ),
    (
        "#-",
        "for which Spark has nothing that keeps numbers as they are",
        "select the members that are to be there",
    ),
    (
        ("to_tsvector() to_tsquery() plainto_tsquery() phraseto_tsquery() websearch_to_tsquery()"
        " ts_rank() ts_headline() similarity() word_similarity()"),
        "a text search, which depends on the server's dictionaries",
        "send the view to OpenSearch, and search there",
    ),
    (
        "xmlelement() xmlforest() xmlagg() xpath()",
        "a document, for which a store has no type",
        _AT_THE_READER,
    ),
    (
        ("corr() covar_pop() covar_samp() regr_avgx() regr_avgy() regr_count() regr_intercept()"
        " regr_r2() regr_slope() regr_sxx() regr_sxy() regr_syy()"),
        "a float8, which depends on the order of the rows",
        "select the sums of the products as numeric(p,s), and divide where the view is read",
    ),
    (
        "percentile_cont()",
        "a float8, whose last digit depends on the machine",
        "write percentile_disc(), which is a value of a row",
    ),
    ("any_value()", "which may be any of several values", "write min() or max()"),
    (
        ("sqrt() cbrt() exp() ln() log() sin() cos() tan() cot() asin() acos() atan()"
        " atan2() sinh() cosh() tanh() pi() degrees() radians()"),
        "whose last digits differ",
        _AT_THE_READER,
    ),
    ("power()", "whose last digits differ", "write the product: a * a"),
    ("div()", "whose operands lose digits", "write a / b between integers"),
    (
        ("gcd() lcm() factorial() width_bucket() scale() min_scale() trim_scale() num_nulls()"
        " num_nonnulls() << >>"),
        "for which Spark has nothing of the same meaning",
        "write it by CASE and arithmetic, or compute it where the view is read",
    ),
    (
        "grouping()",
        "a part of GROUPING SETS",
        "write a query for each grouping, with UNION ALL",
    ),
    ("row()", "a row as a value", "compare the columns, with AND and OR, or select each"),
    ("any() all()", "of a query or an array", "write IN, NOT IN, EXISTS or NOT EXISTS"),
    (
        "[]",
        "a subscript",
        "write -> or ->> for a jsonb, and select an array as it is",
    ),
)  # fmt: skip
# By name; a function's ends in parentheses.
REFUSED: Final = {
    name: FunctionRefusal(reason, rewrite)
    for names, reason, rewrite in _GROUPS
    for name in names.split()
}
# Those that sqlglot knows by another name than Postgres', or that are no functions.
_NAMES: Final = {
    "CurrentTimestamp": "now()", "RegexpLike": "~", "RegexpILike": "~*", "SimilarTo": "similar_to",
    "ILike": "ILIKE", "Array": "array[]", "ArrayOverlaps": "&&", "JSONBPathExists": "@?",
    "MatchAgainst": "@@", "JSONBDeleteAtPath": "#-", "Overlaps": "overlaps", "Bracket": "[]",
    "Any": "any()", "All": "all()", "BitwiseLeftShift": "<<", "BitwiseRightShift": ">>",
    "Pow": "power()", "IntDiv": "div()", "Explode": "unnest()", "Unnest": "unnest()",
    "ArrayAgg": "array_agg()", "JSONObjectAgg": "json_objectagg()",
    "JSONArray": "json_build_array()", "JSONObject": "json_build_object()", "Rand": "random()",
    "ToNumber": "to_number()", "Hex": "to_hex()",
    "CurrentTime": "current_time", "ArrayPosition": "array_position()",
    "Uuid": "gen_random_uuid()", "ArraySize": "array_length()",
}  # fmt: skip


def written(node: exp.Expr) -> str:
    """Return an expression's name as Postgres has it: of a function, with parentheses."""
    if (name := _NAMES.get(type(node).__name__)) is not None:
        return name
    called, is_call, _ = node.sql(dialect="postgres").partition("(")
    if (
        isinstance(node, exp.Binary) and not isinstance(node, exp.AggFunc)
    ) or not called.isidentifier():
        return node.key.upper()
    return f"{called.lower()}()" if is_call else called.lower()


def expect_known(query: exp.Expr) -> None:
    """Raise UnsupportedError for the first part of a query that is refused wherever it is."""
    for node in query.walk():
        # What has an array may be an operator of jsonb.
        if isinstance(node, exp.Array) or (
            not isinstance(node, exp.Func) and type(node).__name__ not in _NAMES
        ):
            continue
        name = written(node)
        if (found := REFUSED.get(name)) is not None:
            raise UnsupportedError(f"{name}, {found.reason}", found.rewrite)


def unknown(node: exp.Expr) -> UnsupportedError:
    """Return the error for an expression that has no rule."""
    if isinstance(node, exp.Tuple):
        return UnsupportedError("a comparison of rows", "compare the columns, with AND and OR")
    if (found := REFUSED.get(written(node))) is not None:
        return UnsupportedError(f"{written(node)}, {found.reason}", found.rewrite)
    return UnsupportedError(
        f"{written(node)}, which has no rule that gives Postgres' own answer",
        "write it by what docs/VIEWS.md lists, or make the view in Python (docs/CODE.md)",
    )
