"""The documentation builds as a site: each link and anchor is there; no other server is asked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What a browser fetches by itself; links that a reader follows are not among it.
_FETCHED = re.compile(r"""<(?:script|img|link|iframe)[^>]+(?:src|href)=["']?(https?://[^"' >]+)""")


def test_the_site_builds_with_all_links_and_asks_no_other_server(tmp_path: Path) -> None:
    config = ROOT / "scripts" / "mkdocs.yml"
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(config)]
    built = subprocess.run(
        [*argv, "-d", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    for source in (ROOT / "docs").rglob("*.md"):
        assert source.with_suffix(".html").name in pages
    fetched = {name: found for name, page in pages.items() if (found := _FETCHED.findall(page))}
    assert not fetched


def test_each_page_is_in_the_navigation_and_in_the_readme() -> None:
    shown = (ROOT / "scripts" / "mkdocs.yml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f": {page.name}" in shown
        assert page.name == "index.md" or f"docs/{page.name}" in readme, page.name
