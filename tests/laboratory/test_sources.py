"""The data folder, the registry and the download, against a real HTTP server on this machine."""

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.sources import (
    FOLDER_VARIABLE,
    SOURCES,
    DataError,
    Source,
    data_folder,
    fetch,
    inventory,
    locate,
)

CONTENT = bytes(range(256)) * 1_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "digits/one.gz"


class Handler(BaseHTTPRequestHandler):
    """/good, /wrong (other bytes), /short (announces more than it sends); the rest is 404."""

    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        body = {"/good": CONTENT, "/wrong": CONTENT[::-1], "/short": CONTENT[:100_000]}
        if self.path not in body:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(body[self.path])

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Handler.requests = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/good"


def registry(*mirrors: str) -> dict[str, Source]:
    return {NAME: Source(NAME, len(CONTENT), SHA256, mirrors)}


def put(folder: Path, content: bytes) -> Path:
    path = folder / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_registry_has_full_checksums_and_mirrors_of_mnist() -> None:
    mnist = [source for source in SOURCES.values() if source.name.startswith("mnist/")]
    assert len(mnist) == 4
    for source in mnist:
        assert source.sha256 is not None
        assert len(bytes.fromhex(source.sha256)) == 32
        assert len(source.mirrors) >= 2
        assert all(mirror.startswith("https://") for mirror in source.mirrors)
        assert all(mirror.endswith(source.name.split("/")[1]) for mirror in source.mirrors)


def test_the_argument_comes_before_the_variable_and_the_variable_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert data_folder().name == "krylov-descent"
    assert data_folder().is_relative_to(tmp_path / "home")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "variable"))
    assert data_folder() == tmp_path / "variable"
    assert data_folder(tmp_path / "argument") == tmp_path / "argument"


def test_a_file_that_is_there_is_only_read(tmp_path: Path, nobody_listens: str) -> None:
    path = put(tmp_path, CONTENT)
    path.chmod(0o444)
    path.parent.chmod(0o555)
    tmp_path.chmod(0o555)
    try:
        assert locate(NAME, tmp_path, sources=registry(nobody_listens)) == path
        assert leftovers(tmp_path) == [path]
    finally:
        tmp_path.chmod(0o755)
        path.parent.chmod(0o755)


def test_a_missing_file_is_downloaded_once(tmp_path: Path, server: str) -> None:
    sources = registry(f"{server}/good")
    path = locate(NAME, tmp_path, progress=False, sources=sources)
    assert path == tmp_path / NAME
    assert path.read_bytes() == CONTENT
    assert locate(NAME, tmp_path, progress=False, sources=sources) == path
    assert Handler.requests == ["/good"]
    assert leftovers(tmp_path) == [path]


def test_progress_names_the_file(
    tmp_path: Path, server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    locate(NAME, tmp_path, progress=True, sources=registry(f"{server}/good"))
    shown = capfd.readouterr()
    assert "one.gz" in shown.err
    assert not shown.out


@pytest.mark.parametrize("bad", ["missing", "short", "wrong"])
def test_the_next_mirror_is_tried_after_a_bad_one(tmp_path: Path, server: str, bad: str) -> None:
    sources = registry(f"{server}/{bad}", f"{server}/good")
    path = locate(NAME, tmp_path, progress=False, sources=sources)
    assert path.read_bytes() == CONTENT
    assert Handler.requests == [f"/{bad}", "/good"]
    assert leftovers(tmp_path) == [path]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("missing", "HTTP 404"),
        ("short", "ended after 100,000 of 256,000 bytes"),
        ("wrong", f"sha256 expected {SHA256[:12]}"),
    ],
)
def test_when_no_mirror_delivers_the_error_says_why_and_nothing_is_left(
    tmp_path: Path, server: str, bad: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        locate(NAME, tmp_path, progress=False, sources=registry(f"{server}/{bad}"))
    assert leftovers(tmp_path) == []


def test_offline_the_error_says_where_to_put_the_file(tmp_path: Path, nobody_listens: str) -> None:
    with pytest.raises(DataError, match="refused") as caught:
        locate(NAME, tmp_path, progress=False, sources=registry(nobody_listens))
    assert f"put the file at {tmp_path / NAME} by hand" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_download_says_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no public download") as caught:
        locate("curves/digs3pts_1.mat", tmp_path)
    assert str(tmp_path / "curves" / "digs3pts_1.mat") in str(caught.value)


def test_a_damaged_file_is_named_with_both_checksums_and_kept(tmp_path: Path, server: str) -> None:
    path = put(tmp_path, CONTENT[:-1])
    found = hashlib.sha256(CONTENT[:-1]).hexdigest()
    with pytest.raises(DataError, match="is damaged") as caught:
        locate(NAME, tmp_path, sources=registry(f"{server}/good"))
    for part in (str(path), SHA256[:12], found[:12], f"ksd data fetch {NAME} --data {tmp_path}"):
        assert part in str(caught.value)
    assert path.read_bytes() == CONTENT[:-1]
    assert Handler.requests == []


def test_fetch_replaces_a_damaged_file_and_only_by_a_good_one(tmp_path: Path, server: str) -> None:
    path = put(tmp_path, b"damaged")
    with pytest.raises(DataError, match="wrong content"):
        fetch([NAME], tmp_path, progress=False, sources=registry(f"{server}/wrong"))
    assert path.read_bytes() == b"damaged"
    (status,) = fetch(["digits"], tmp_path, progress=False, sources=registry(f"{server}/good"))
    assert status.ok is True
    assert path.read_bytes() == CONTENT


def test_fetch_leaves_good_files_alone(tmp_path: Path, server: str) -> None:
    put(tmp_path, CONTENT)
    fetch([NAME], tmp_path, progress=False, sources=registry(f"{server}/good"))
    assert Handler.requests == []


def test_inventory_tells_absent_present_good_and_damaged(tmp_path: Path) -> None:
    sources = {**registry("http://mirror"), "other/two": Source("other/two", None, None)}
    absent, other = inventory(tmp_path, verify=True, sources=sources)
    assert (absent.present, absent.size, absent.ok, absent.downloadable) == (
        False,
        None,
        None,
        True,
    )
    assert other.downloadable is False
    path = put(tmp_path, CONTENT)
    (unchecked,) = inventory(tmp_path, names=[NAME], sources=sources)
    assert (unchecked.present, unchecked.size, unchecked.ok) == (True, len(CONTENT), None)
    assert inventory(tmp_path, verify=True, sources=sources)[0].ok is True
    path.write_bytes(b"x")
    assert inventory(tmp_path, verify=True, sources=sources)[0].ok is False


def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'mnist'"):
        fetch(["mnits"], tmp_path)
    with pytest.raises(UnknownNameError, match="did you mean 'mnist/t10k-labels"):
        locate("mnist/t10k-label", tmp_path)


def test_without_write_permission_the_error_says_so(server: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        superuser = os.geteuid() == 0
        if superuser:  # to whom permissions do not apply
            os.seteuid(65534)
        try:
            with pytest.raises(DataError, match=r"Permission denied.*KRYLOV_DESCENT_DATA"):
                locate(NAME, folder, progress=False, sources=registry(f"{server}/good"))
        finally:
            if superuser:
                os.seteuid(0)
            folder.chmod(0o755)


FULL_DISK = """
import resource, sys
from krylov_descent.laboratory.sources import DataError, Source, locate
url, name, size, sha256, folder = sys.argv[1:]
# No file may grow beyond this: the system refuses the write, as it does on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    locate(name, folder, progress=False, sources={name: Source(name, int(size), sha256, (url,))})
except DataError as error:
    print(error)
"""


def test_a_write_refused_for_lack_of_room_is_explained_and_cleaned_up(
    tmp_path: Path, server: str
) -> None:
    pytest.importorskip("resource", reason="limits on file sizes are a POSIX thing")
    arguments = [f"{server}/good", NAME, str(len(CONTENT)), SHA256, str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *arguments], capture_output=True, text=True, check=True
    )
    assert "Cannot write" in run.stdout
    assert "free some space" in run.stdout
    assert leftovers(tmp_path) == []
