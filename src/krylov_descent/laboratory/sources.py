"""Where the data files lie, how they get there, and whether they are whole.

A data folder is laid out as `<folder>/mnist/train-images-idx3-ubyte.gz`. It is, in this order, the
`folder` argument, the environment variable KRYLOV_DESCENT_DATA, or the user's cache. A file that
is already there is only read, so the folder may be read-only; a missing one is downloaded into it,
or made from public files.
"""

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.data_files import SOURCES, Rebuild, Source
from krylov_descent.laboratory.download import DataError, download, sha256_of, write_whole

__all__ = [
    "FOLDER_VARIABLE",
    "SOURCES",
    "DataError",
    "FileStatus",
    "Source",
    "data_folder",
    "derived_folder",
    "fetch",
    "fetch_command",
    "inventory",
    "locate",
]

FOLDER_VARIABLE = "KRYLOV_DESCENT_DATA"

SCRATCH = "originals"


@dataclass(frozen=True)
class FileStatus:
    """What `ksd data list` and `ksd data verify` show of one file.

    `ok` is None when the file is absent, or not looked into, or has no known sha256.
    """

    name: str
    path: Path
    present: bool
    size: int | None
    ok: bool | None
    downloadable: bool


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder to look in: the argument, KRYLOV_DESCENT_DATA, or the user's cache."""
    chosen = folder or os.environ.get(FOLDER_VARIABLE)
    return Path(chosen).expanduser() if chosen else _user_cache() / "krylov-descent"


def derived_folder() -> Path:
    """Where to keep what is computed from the data: in the user's cache.

    A data folder has nothing but data, which may be shared or read-only.
    """
    return _user_cache() / "krylov-descent"


def locate(
    name: str,
    folder: str | Path | None = None,
    *,
    progress: bool = True,
    sources: dict[str, Source] = SOURCES,
) -> Path:
    """The path of a checked data file, downloaded first where it is missing.

    Args:
        name: one of `SOURCES`, such as "mnist/train-images-idx3-ubyte.gz".
        folder: see `data_folder`.
        progress: show a progress bar while downloading.
        sources: the registry to look the name up in.

    Raises:
        DataError: missing and not to be had, damaged, unreadable, or not to be written.
    """
    source = _source(name, sources)
    path = data_folder(folder) / source.name
    if not _is_file(path):
        _obtain(source, path, progress, sources)
        return path
    found = sha256_of(path)
    if source.sha256 is not None and found != source.sha256:
        raise DataError(
            f"{path} is damaged (sha256 expected {source.sha256[:12]}…, found {found[:12]}…): "
            f"get it anew with `{fetch_command(folder, source.name)}`, or put a good copy in its "
            "place."
        )
    return path


def fetch(
    names: Iterable[str],
    folder: str | Path | None = None,
    *,
    progress: bool = True,
    sources: dict[str, Source] = SOURCES,
) -> list[FileStatus]:
    """Download what is missing or damaged; a damaged file stays until a good one replaces it.

    Args:
        names: of files, or of folders such as "mnist" for all files in it.
        folder: see `data_folder`.
        progress: show progress bars.
        sources: the registry to look the names up in.

    Returns:
        the status of each file named, in the order of the registry.
    """
    names = list(names)
    for name in _expand(names, sources):
        # Looked at one by one: a rebuilt file may bring the next one with it.
        (status,) = inventory(folder, names=[name], verify=True, sources=sources)
        if not status.present or status.ok is False:
            _obtain(sources[name], status.path, progress, sources)
    return inventory(folder, names=names, verify=True, sources=sources)


def fetch_command(folder: str | Path | None, *names: str) -> str:
    """The shell line that fetches files into the folder that was asked for."""
    given = ["--data", str(folder)] if folder else []
    return shlex.join(["ksd", "data", "fetch", *names, *given])


def inventory(
    folder: str | Path | None = None,
    *,
    names: Iterable[str] | None = None,
    verify: bool = False,
    sources: dict[str, Source] = SOURCES,
) -> list[FileStatus]:
    """The state of the data files, all of them or those named (see `fetch`).

    With `verify` each file present is read whole and compared with its sha256.
    """
    base = data_folder(folder)
    wanted = list(sources) if names is None else _expand(names, sources)
    return [_status(sources[name], base / name, verify) for name in wanted]


def _status(source: Source, path: Path, verify: bool) -> FileStatus:
    present = _is_file(path)
    ok = None
    if present and verify and source.sha256 is not None:
        ok = sha256_of(path) == source.sha256
    return FileStatus(
        name=source.name,
        path=path,
        present=present,
        size=path.stat().st_size if present else None,
        ok=ok,
        downloadable=bool(source.mirrors or source.rebuild),
    )


def _obtain(source: Source, path: Path, progress: bool, sources: dict[str, Source]) -> None:
    if source.rebuild is not None:
        _rebuild(source.rebuild, path.parent, progress, sources)
        return
    if not source.mirrors or source.sha256 is None or source.size is None:
        raise DataError(
            f"{source.name} is not on this machine and has no public download: put it at {path}."
        )
    download(source.mirrors, path, sha256=source.sha256, size=source.size, progress=progress)


def _rebuild(rebuild: Rebuild, folder: Path, progress: bool, sources: dict[str, Source]) -> None:
    """Make all files of a folder; the public ones stay in the scratch folder until that is done."""
    scratch = folder / SCRATCH
    for file, content in rebuild(scratch, progress).items():
        expected = sources[f"{folder.name}/{file}"].sha256
        found = hashlib.sha256(content).hexdigest()
        if expected is not None and found != expected:
            raise DataError(
                f"{folder / file} cannot be rebuilt: its sha256 should be {expected[:12]}…, but is "
                f"{found[:12]}…. The files it was made from are in {scratch}: delete those that "
                "may be damaged and try again, or put a good copy in its place."
            )
        write_whole(content, folder / file)
    shutil.rmtree(scratch)


def _source(name: str, sources: dict[str, Source]) -> Source:
    if name not in sources:
        raise unknown_name("data file", name, sources)
    return sources[name]


def _expand(names: Iterable[str], sources: dict[str, Source]) -> list[str]:
    """Names of files, and of folders of files, as names of files in the registry's order."""
    folders = {name.split("/")[0] for name in sources}
    wanted = set(names)
    for name in wanted - folders - set(sources):
        raise unknown_name("data file", name, [*folders, *sources])
    return [name for name in sources if name in wanted or name.split("/")[0] in wanted]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError as error:
        raise DataError(
            f"Cannot look into {path.parent} (no permission): choose another folder with "
            f"{FOLDER_VARIABLE}."
        ) from error


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
