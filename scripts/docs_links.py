"""Links of docs/ that leave it, on the site: to the source, or their text where none is published.

A hook of MkDocs (`scripts/mkdocs.yml`). In a checkout, and on the host of the source, they are
links to files.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
_TEXT: Final = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
_SOURCE: Final = tomllib.loads(_TEXT)["project"].get("urls", {}).get("Source")
_FOLDER: Final = re.compile(r"\[([^\]]+)\]\(adr/\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:  # noqa: ANN401 - of MkDocs
    """Return a page's text with these links replaced."""
    up = "../" * (page.file.src_uri.count("/") + 1)
    leaves = re.compile(rf"\[([^\]]+)\]\({re.escape(up)}([^)\s]+)\)")
    markdown = _FOLDER.sub(r"[\1](adr/0001-two-part-resume-record.md)", markdown)
    return leaves.sub(rf"[\1]({_SOURCE}/blob/main/\2)" if _SOURCE else r"\1", markdown)
