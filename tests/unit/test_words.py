"""Comments, docstrings and pages use plain, present-day words (CONTRIBUTING.md).

A word is here when it once made a sentence hard to read and a usual one says the same. Text in
backticks, code blocks, generated pages and the titles of decisions are not looked at.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTEAD = {
    "anew": "again, from scratch",
    "aside": "in the background, shadow build",
    "astride": "spans",
    "begun": "started",
    "beside": "alongside, next to, in addition to",
    "buried": "rejected, stored as a dead letter",
    "bury": "reject, store as a dead letter",
    "foretold": "warned before",
    "heal": "repair",
    "heals": "repairs",
    "heed": "honour",
    "heeded": "honoured",
    "hurt": "inject faults",
    "mend": "fix, repair",
    "mended": "fixed, repaired",
    "owed": "pending",
    "shelf": "dead letters",
    "stood": "was in, was at",
    "tells": "reports, describes, shows",
    "told": "reported, described, shown",
    "whoever": "say who",
}
# The field's own term.
ALLOWED = ("cache-aside",)
GENERATED = {"docs/CLI.md", "docs/CONFIG.md", "docs/COSTS.md"}
FOLDERS = ("lockstep", "cdc", "sinks", "jobs", "migrations", "benchmarks", "docs")
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
_WORD = re.compile(rf"\b({'|'.join(INSTEAD)})\b", re.IGNORECASE)


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))
        yield from sorted((ROOT / folder).rglob("*.lua"))
        yield from sorted((ROOT / folder).rglob("*.md"))
    yield from sorted(ROOT.glob("*.md"))


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file, each piece with its first line's number."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            # What follows a pragma is the linter's.
            if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type")):
                yield token.start[0], token.string
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, kinds) and (found := ast.get_docstring(node)):
                yield getattr(node, "lineno", 1), found
        return
    if path.suffix == ".lua":
        yield from _lua_comments(text)
        return
    text = _CODE.sub(lambda code: "\n" * code.group().count("\n"), text)
    for number, line in enumerate(text.splitlines(), start=1):
        if not (number == 1 and path.parent.name == "adr"):
            yield number, line


def _lua_comments(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("--"):
            yield number, line


def hard(text: str) -> list[str]:
    """Return the words that have a usual one."""
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    return _WORD.findall(_CODE.sub("", text))


def test_prose_is_in_plain_words() -> None:
    found = [
        f"{name}:{line}: {word} ({INSTEAD[word.lower()]})"
        for path in files()
        if (name := str(path.relative_to(ROOT))) not in GENERATED
        for line, text in sentences(path)
        for word in hard(text)
    ]
    assert not found, "\n".join(found)


def test_a_hard_word_is_found() -> None:
    assert hard("It is made anew, `aside`, with a cache-aside; whoever it is.") == [
        "anew",
        "whoever",
    ]
