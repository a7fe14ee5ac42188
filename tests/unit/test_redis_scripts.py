"""The scripts that run inside Redis: their files, and what every one of them documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.sinks.redis import scripts

FOLDER = Path(scripts.__file__).with_name("lua")
FILES = sorted(FOLDER.glob("*.lua"))
TEXTS = {name: each for name, each in vars(scripts).items() if name.isupper() and name[0] != "_"}
_TOKEN = re.compile(r"^local TOKEN_LENGTH = (\d+)$", re.MULTILINE)


def test_every_file_is_a_script_and_every_part_is_included() -> None:
    assert {path.stem for path in FILES} == {
        name.lower() for name, each in TEXTS.items() if isinstance(each, str)
    }
    included = {
        found
        for path in FOLDER.rglob("*.lua")
        for found in re.findall(r"^-- include (\S+)$", path.read_text("utf-8"), re.MULTILINE)
    }
    parts = (FOLDER / "parts").glob("*.lua")
    assert included == {f"parts/{path.stem}" for path in parts}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_script_documents_the_keys_and_arguments_that_it_reads(path: Path) -> None:
    text = path.read_text("utf-8")
    header = re.match(r"(?:--.*\n)+", text)
    assert header is not None
    code = text[header.end() :]
    for used in re.findall(r"\b(KEYS|ARGV)\b", code):
        assert f"{used}[" in header.group(), used


@pytest.mark.parametrize("name", [name for name, each in TEXTS.items() if isinstance(each, str)])
def test_a_script_is_sent_complete_and_without_comments(name: str) -> None:
    text = TEXTS[name]
    assert "--" not in text
    assert text.count("local KEYS, ARGV = KEYS, ARGV\n") <= 1, "one guard"
    assert "return" in text


def test_the_scripts_know_a_tokens_length() -> None:
    found = {
        length for path in FOLDER.rglob("*.lua") for length in _TOKEN.findall(path.read_text())
    }
    assert found == {str(scripts.TOKEN_LENGTH)}
