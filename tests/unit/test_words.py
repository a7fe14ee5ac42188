"""Code, tests and pages use plain, present-day words (CONTRIBUTING.md).

A word is here when it once made a sentence hard to read and a usual one says the same. Looked at
are comments, docstrings, text with spaces (errors, hints, logs, descriptions), identifiers and thus
names of tests, text that could be one (outside of tests), the pages with their titles, the
console's page, and file names. Text in backticks, code blocks and generated pages are not: what is
in them is looked at where it is defined.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTEAD = {
    "anew": "again, from scratch",
    "aside": "in the background, shadow build",
    "astride": "spans",
    "begun": "started",
    "behind": "after, above; a lag",
    "beside": "alongside, next to, in addition to",
    "besides": "in addition to, other than",
    "buried": "rejected, stored as a dead letter",
    "bury": "reject, store as a dead letter",
    "door": "commit metadata, listener",
    "doors": "listeners",
    "foretold": "warned before",
    "gone": "deleted, missing",
    "heal": "repair",
    "heals": "repairs",
    "hear": "receive",
    "heard": "received",
    "heed": "honour",
    "heeded": "honoured",
    "held against": "compared with, checked against",
    "hurt": "inject faults",
    "live snapshot": "incremental snapshot",
    "looks after": "maintains, polls",
    "mend": "fix, repair",
    "mended": "fixed, repaired",
    "news": "what was applied",
    "owed": "pending",
    "said": "reported, published",
    "settle": "reconcile, poll commits",
    "settled": "reconciled, committed",
    "settles": "reconciles",
    "settling": "reconciling",
    "shelf": "dead letters",
    "stand": "is in, is at",
    "standing": "is in, is at; a state",
    "stands": "is in, is at",
    "stood": "was in, was at",
    "tell": "report, describe, show; distinguish",
    "telling": "reporting, describing",
    "tells": "reports, describes, shows",
    "told": "reported, described, shown",
    "whoever": "say who",
    "whole": "complete, full",
}
# Usual phrases of such a word.
PHRASES = (
    "cache-aside",  # the pattern's name
    "whole number",
    "stands for",  # a placeholder
    "stand for",
    "stands in for",  # a test's replacement
    "stand in for",
    "stands by",  # a standby
    "behind a proxy",  # a server, of what forwards to it
    "behind a pooler",
    "behind an alias",
    "behind the alias",
    "behind one address",
)
# Names that are not ours to choose, or that stored data has.
NAMES = {
    "is_whole",  # a column of `_frontiers` in users' Delta tables
    "anew",  # a member of snapshot commands and records in the log
    "tell",  # a file object's method
}
# Text that names an object of the frozen migrations, the column `is_whole`, or the part "gone" of
# snapshot records in the log.
TEXTS = {
    "cdc/snapshot/initial/handover.py": {"gone"},
    "cdc/snapshot/initial/leftovers.py": {"gone"},
    "cdc/snapshot/initial/records.py": {"gone"},
    "cdc/snapshot/initial/session.py": {"gone"},
    "jobs/documents/mirror_cuts.py": {"whole"},
    "sinks/delta/frontier_rows.py": {"whole"},
    "sinks/delta/frontiers.py": {"whole"},
    "tests/integration/test_authority.py": {"tell"},
    "tests/integration/test_migrations.py": {"tell"},
}
# Frozen, because databases have run them, or recorded with the servers' answers to them.
FROZEN = ("migrations/versions/", "tests/golden/scenario.py")
GENERATED = {"docs/CLI.md", "docs/CONFIG.md", "docs/COSTS.md"}
FOLDERS = (
    *("lockstep", "cdc", "sinks", "jobs", "migrations", "benchmarks", "docs", "tests", "scripts"),
    "compose",
)
_SUFFIXES = {".py", ".lua", ".md", ".yaml", ".sql", ".js", ".html", ".css", ".java"}
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
_WORD = re.compile(rf"(?<![A-Za-z])({'|'.join(INSTEAD)})(?![A-Za-z])", re.IGNORECASE)
_ANY = re.compile(r"|".join(INSTEAD).replace(" ", r"\s"), re.IGNORECASE)
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def files() -> Iterator[str]:
    """Yield the names of the committed files that people read."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        path = Path(name)
        if name.startswith(FROZEN) or name in GENERATED or path == Path(__file__).relative_to(ROOT):
            continue
        inside = len(path.parts) == 1 or path.parts[0] in FOLDERS
        if (ROOT / name).is_file() and inside and (path.suffix in _SUFFIXES or name == "Makefile"):
            yield name


def found_in(name: str) -> Iterator[tuple[int, str]]:
    """Yield the words of a file that have a usual one, with their lines."""
    yield from ((0, word) for word in hard(Path(name).stem.replace("-", " ").replace("_", " ")))
    text = (ROOT / name).read_text("utf-8")
    if not _ANY.search(text):
        return
    if name.endswith(".py"):
        yield from ((line, word) for line, part in prose(text) for word in hard(part))
        named = names(text) if not name.startswith("tests/") else identifiers(text)
        yield from ((line, word) for line, part in named for word in parts(part))
        return
    if name.endswith(".md"):
        text = _CODE.sub(lambda code: "\n" * code.group().count("\n"), text)
    if name.endswith((".lua", ".sql", ".yaml")):
        text = "\n".join(re.sub(r"^.*?(--|#|$)", "", line) for line in text.splitlines())
    for number, line in enumerate(text.splitlines(), start=1):
        yield from ((number, word) for word in hard(line))


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a module, and its text that has spaces, with their first lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # What follows a pragma is the linter's.
        if token.type == tokenize.COMMENT and not token.string.startswith("# type"):
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def identifiers(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def names(text: str) -> Iterator[tuple[int, str]]:
    """Yield a module's identifiers, and its text that could be one."""
    yield from identifiers(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and str(node.value).isidentifier():
            yield node.lineno, str(node.value)


def hard(text: str) -> list[str]:
    """Return the words that have a usual one."""
    text = " ".join(_CODE.sub("", text).split())
    for phrase in PHRASES:
        text = text.replace(phrase, "").replace(phrase.capitalize(), "")
    return _WORD.findall(text)


def parts(identifier: str) -> list[str]:
    """Return the words of an identifier that have a usual one."""
    if identifier in NAMES:
        return []
    return [part for part in _PART.findall(identifier) if part.lower() in INSTEAD]


def test_everything_is_in_plain_words() -> None:
    found = [
        f"{name}:{line}: {word} ({INSTEAD[word.lower()]})"
        for name in files()
        for line, word in found_in(name)
        if word not in TEXTS.get(name, ())
    ]
    assert not found, "\n".join(found)


def test_a_hard_word_is_found() -> None:
    assert hard("It is made anew, `aside`, with a cache-aside; whoever it is.") == [
        "anew",
        "whoever",
    ]
    assert parts("_toldAside") == ["told", "Aside"]
    assert parts("Tolder") == parts("is_whole") == []
    assert [word for _, text in prose('raise X(f"{a} is gone")') for word in hard(text)] == ["gone"]


def test_an_exception_is_still_needed() -> None:
    for name, words in TEXTS.items():
        assert words <= {word for _, word in found_in(name)}, name
