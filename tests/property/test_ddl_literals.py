"""No literal of a statement is left, however it is written, and every name is."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cdc.encode.ddl_literals import without_literals

SECRET = "5ecret"

_TEXT = st.lists(st.sampled_from([SECRET, " ", "''", '"', "$$", "$a$", "--", "/*", "é", "\n", "?"]))
_NAMES = ["ALTER TABLE", "e", "x", "é", "😀", "a$b", '"a ""\'$$ b"', "u", "(", "::", "-"]
_WORDS = st.sampled_from(_NAMES)


_LITERALS = st.one_of(
    st.builds(
        lambda head, text: head + "'" + "".join(text) + "'", st.sampled_from(["", "N", "b"]), _TEXT
    ),
    _TEXT.map(lambda text: "E'\\'" + "".join(text) + "\\\\'"),
    _TEXT.map(lambda text: "$q$" + "".join(text) + "$q$"),
    _TEXT.map(lambda text: "$é1$" + "".join(text) + "$é1$"),
    st.just(f"1{SECRET}"),
)
_COMMENTS = st.one_of(st.just(f"-- {SECRET} '\n"), st.just(f"/* {SECRET} ' /* $$ */ {SECRET} */"))


@given(st.lists(st.one_of(_WORDS, _LITERALS, _COMMENTS)))
@example(["DEFAULT", f"'{SECRET}'", f"'{SECRET}'"])
def test_no_literal_and_no_comment_is_left_and_every_word_is(tokens: list[str]) -> None:
    left = without_literals(" ".join(tokens))
    assert SECRET not in left
    assert all(word in left for word in tokens if word in _NAMES)


@given(st.lists(st.one_of(_WORDS, _LITERALS, _COMMENTS), min_size=1), st.integers(0, 400))
def test_a_statement_that_is_cut_off_anywhere_shows_no_literal(
    tokens: list[str], characters: int
) -> None:
    assert SECRET not in without_literals(" ".join(tokens)[:characters])


@given(st.sampled_from(["'a\\", "'a\\''", "'", "$q$", "/* /* */", '"a']))
def test_what_ends_elsewhere_in_another_session_ends_the_text(opens: str) -> None:
    left = without_literals(f"SET x = {opens} {SECRET}")
    assert left == "SET x = ?"
