"""What is in the cache is complete and matches the lock, wherever it came from."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cdc.errors import LocalStackError
from cdc.runtime import artifacts, extras
from cdc.runtime.artifacts import Artifact, ArtifactCache, lock_sections, parse_lock
from cdc.runtime.extras import MissingExtraError
from cdc.runtime.progress import Progress

BODY = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(BODY).hexdigest()


@dataclass
class Repository:
    """A Maven repository of one file, with the faults that a test chooses."""

    url: str = ""
    asked: list[str | None] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)
    spoil: int = 0
    status: int = 200


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    served = Repository()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            served.asked.append(wanted)
            start = int(re.findall(r"\d+", wanted)[0]) if wanted else 0
            body = BODY[start:]
            if served.spoil:
                served.spoil -= 1
                body = b"!" + body[1:]
            status = served.status if served.status != HTTPStatus.OK or not start else 206
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: served.cut_after.pop(0)] if served.cut_after else body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("LOCKSTEP_MAVEN", served.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("cdc.runtime.artifacts.time.sleep", lambda _: None)
    monkeypatch.setattr(artifacts, "lock_sections", lambda: {"one": (artifact(),)})
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


def artifact() -> Artifact:
    return Artifact("org.example", "thing", "1.0", len(BODY), SHA256)


class Counted(Progress):
    def __init__(self) -> None:
        self.expected = 0
        self.arrived = 0

    def expect(self, size: int) -> None:
        self.expected += size

    def got(self, size: int) -> None:
        self.arrived += size


def test_a_file_is_fetched_once(repository: Repository, tmp_path: Path) -> None:
    progress = Counted()
    cache = ArtifactCache(tmp_path, progress)
    folder = cache.fetch("one")
    assert [file.name for file in folder.iterdir()] == ["thing-1.0.jar"]
    assert (folder / "thing-1.0.jar").read_bytes() == BODY
    assert cache.fetch("one") == folder
    assert repository.asked == [None]
    assert progress.expected == progress.arrived == len(BODY)


def test_a_cut_download_resumes_where_it_stopped(repository: Repository, tmp_path: Path) -> None:
    repository.cut_after = [300_000, 200_000]
    progress = Counted()
    folder = ArtifactCache(tmp_path, progress).fetch("one")
    assert (folder / "thing-1.0.jar").read_bytes() == BODY
    assert repository.asked[0] is None
    assert all(asked is not None for asked in repository.asked[1:])


def test_bad_bytes_never_get_the_name(repository: Repository, tmp_path: Path) -> None:
    repository.spoil = 100
    with pytest.raises(LocalStackError, match="sha256 is not the locked one"):
        ArtifactCache(tmp_path, Progress()).fetch("one")
    assert not list(tmp_path.rglob("*.jar"))


def test_bad_bytes_are_fetched_again(repository: Repository, tmp_path: Path) -> None:
    repository.spoil = 1
    folder = ArtifactCache(tmp_path, Progress()).fetch("one")
    assert (folder / "thing-1.0.jar").read_bytes() == BODY
    assert repository.asked == [None, None]


def test_what_is_not_there_is_asked_for_once(repository: Repository, tmp_path: Path) -> None:
    repository.status = 404
    with pytest.raises(LocalStackError, match=r"org\.example:thing:1\.0 could not be fetched"):
        ArtifactCache(tmp_path, Progress()).fetch("one")
    assert len(repository.asked) == 1


def test_two_who_want_one_file_fetch_it_once(repository: Repository, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=ArtifactCache(tmp_path, Progress()).fetch, args=["one"])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert repository.asked == [None]


def test_an_install_without_the_extra_shows_which(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="needs maven_artifact, requests") as caught:
        ArtifactCache(tmp_path, Progress()).fetch("one")
    assert "lockstep-cdc[local]" in caught.value.hint


def test_a_derived_folder_is_complete_or_absent(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, Progress())

    def broken(target: Path) -> None:
        target.mkdir()
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - the one raised above
        cache.derive("thing", broken)
    assert not (tmp_path / "thing").exists()


def test_the_lock_names_every_server_and_every_major() -> None:
    sections = lock_sections()
    assert {"kafka", "opensearch", "janino", "redis"} <= sections.keys()
    for major in range(14, 19):
        assert f"postgres-{major}-amd64" in sections
    for rows in sections.values():
        assert rows
        assert all(re.fullmatch("[0-9a-f]{64}", each.sha256) for each in rows)


def test_a_lock_line_is_coordinates_bytes_sha256() -> None:
    text = f"# comment\n\n[one]\norg.example:thing:1.0 {len(BODY)} {SHA256}\n"
    assert parse_lock(text) == {"one": (artifact(),)}
