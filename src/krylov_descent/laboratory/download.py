"""One file from the first of several mirrors that has it whole, or many files at once.

The bytes go to a temporary file beside the target, and it takes the target's name only when
its sha256 is the expected one: whoever finds the target finds it complete, and a damaged file
that stood there stays until a good one replaces it.
"""

import contextlib
import errno
import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from krylov_descent.laboratory.waiting import make_room

BLOCK = 1 << 16
SECONDS_OF_SILENCE = 30.0
AT_ONCE = 16
ATTEMPTS = 3
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


class DataError(RuntimeError):
    """A data file that is missing, damaged, unreadable or cannot be written; one sentence."""


class MirrorError(Exception):
    """Why one mirror did not deliver; the next one may."""


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal, read in blocks."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {_reason(error)}.") from error


def download(
    mirrors: Sequence[str], target: Path, *, sha256: str, size: int, progress: bool = True
) -> None:
    """Fetch `target` from the mirrors, in order, and check it.

    Args:
        mirrors: full addresses of the same file.
        target: where it goes; missing folders are made.
        sha256: of the whole file, in hexadecimal.
        size: in bytes, for the progress bar.
        progress: show a progress bar on the standard error stream.

    Raises:
        DataError: no mirror had the file, or it could not be written.
    """
    failures = []
    for url in mirrors:
        with (
            _temporary_beside(target) as (file, temporary),
            _progress_bar(progress, DownloadColumn()) as bar,
        ):
            task = bar.add_task(target.name, total=size)
            try:
                found = _receive(url, file, target, partial(bar.advance, task))
            except MirrorError as error:
                failures.append(f"{urlsplit(url).netloc}: {error}")
                continue
            if found != sha256:
                failures.append(
                    f"{urlsplit(url).netloc}: wrong content "
                    f"(sha256 expected {sha256[:12]}…, found {found[:12]}…)"
                )
                continue
            _publish(file, temporary, target)
            return
    raise DataError(
        f"Cannot download {target.name} ({'; '.join(failures)}): check the connection, or put "
        f"the file at {target} by hand."
    )


def download_all(urls: Mapping[Path, str], *, title: str, progress: bool = True) -> None:
    """Fetch many small files at once; those that are there already stay.

    Each appears under its name only when as much has come as the server announced, so that what
    was interrupted can go on. Whether the content is right is for the caller to find out.

    Args:
        urls: the address of each file.
        title: of the progress bar.
        progress: show it on the standard error stream.

    Raises:
        DataError: a file could not be had, after three attempts, or not be written.
    """
    missing = {target: url for target, url in urls.items() if not target.is_file()}
    with (
        _progress_bar(progress, MofNCompleteColumn()) as bar,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        task = bar.add_task(title, total=len(urls), completed=len(urls) - len(missing))
        waiting = [pool.submit(_fetch_one, url, target) for target, url in missing.items()]
        try:
            for done in as_completed(waiting):
                done.result()
                bar.advance(task)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def write_whole(content: bytes, target: Path) -> None:
    """Write a file that appears under its name only when it is complete.

    Raises:
        DataError: it could not be written.
    """
    with _temporary_beside(target) as (file, temporary):
        with explained_writing(target):
            file.write(content)
        _publish(file, temporary, target)


def _fetch_one(url: str, target: Path) -> None:
    failure = ""
    for _ in range(ATTEMPTS):
        with _temporary_beside(target) as (file, temporary):
            try:
                _receive(url, file, target, lambda received: None)
            except MirrorError as error:
                failure = str(error)
                continue
            _publish(file, temporary, target)
            return
    raise DataError(
        f"Cannot download {url} ({failure}): check the connection and try again, or put the file "
        f"at {target} by hand."
    )


def _receive(url: str, file: BinaryIO, target: Path, advance: Callable[[int], None]) -> str:
    """Stream one address into `file`; the sha256 of what came."""
    digest = hashlib.sha256()
    received = 0
    request = urllib.request.Request(url, headers={"User-Agent": "krylov-descent"})
    with contextlib.ExitStack() as stack:
        try:
            response = stack.enter_context(
                urllib.request.urlopen(request, timeout=SECONDS_OF_SILENCE)
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MirrorError(_reason(error)) from error
        announced = int(response.headers.get("Content-Length") or 0)
        while True:
            try:
                block = response.read(BLOCK)
            except (OSError, http.client.HTTPException) as error:
                raise MirrorError(_reason(error)) from error
            if not block:
                break
            with explained_writing(target):
                file.write(block)
            digest.update(block)
            received += len(block)
            advance(len(block))
    if announced and received < announced:
        raise MirrorError(f"the connection ended after {received:,} of {announced:,} bytes")
    return digest.hexdigest()


@contextlib.contextmanager
def _temporary_beside(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file in the target's folder (a rename must not cross file systems), gone at the end."""
    with explained_writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=".part"
        )
    temporary = Path(name)
    try:
        # Unbuffered: a full disk must show at the write that meets it, not at a later close.
        with open(handle, "wb", buffering=0) as file:
            yield file, temporary
    finally:
        temporary.unlink(missing_ok=True)


def _publish(file: BinaryIO, temporary: Path, target: Path) -> None:
    with explained_writing(target):
        os.fsync(file.fileno())
        file.close()  # some systems refuse to rename an open file
        temporary.chmod(0o644)  # temporary files are private; data may be shared
        temporary.replace(target)


@contextlib.contextmanager
def explained_writing(target: Path) -> Iterator[None]:
    """Turn an error of the file system into a sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            advice = "free some space or choose another folder with KRYLOV_DESCENT_DATA"
        elif error.errno in NO_PERMISSION:
            advice = "choose a folder you may write to with KRYLOV_DESCENT_DATA"
        else:
            advice = "choose another folder with KRYLOV_DESCENT_DATA"
        raise DataError(f"Cannot write {target} ({_reason(error)}): {advice}.") from error


def _reason(error: Exception) -> str:
    """The few words of an error that a person needs."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        return _reason(error.reason)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _progress_bar(enabled: bool, amount: ProgressColumn) -> Progress:
    make_room()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    )
