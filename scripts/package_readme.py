"""Use README.md as the package's readme, with links that work outside a checkout.

Relative links do not work on a package index. If `[project.urls]` names the `Source`, they become
links to its files; otherwise each is replaced by its text. Pictures of the checkout are left out.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)\s]+\)\n*")


class PackageReadme(MetadataHookInterface):
    """Put the readme into the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        source = metadata.get("urls", {}).get("Source")
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": without_relative_links(text, source),
        }


def without_relative_links(text: str, source: str | None) -> str:
    """Return `text` with its relative links made absolute, or plain text if `source` is None."""

    def link(match: re.Match[str]) -> str:
        name, target = match.groups()
        return f"[{name}]({source.rstrip('/')}/blob/main/{target})" if source else name

    return _LINK.sub(link, _PICTURE.sub("", text))
