"""Where the data files come from, where they lie, and whether they are whole.

A data folder is laid out as `<folder>/mnist/train-images-idx3-ubyte.gz`. It is, in this order, the
`folder` argument, the environment variable KRYLOV_DESCENT_DATA, or the user's cache. A file that
is already there is only read, so the folder may be read-only; a missing one is downloaded into it.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.download import DataError, download, sha256_of

__all__ = [
    "FOLDER_VARIABLE",
    "SOURCES",
    "DataError",
    "FileStatus",
    "Source",
    "data_folder",
    "fetch",
    "inventory",
    "locate",
]

FOLDER_VARIABLE = "KRYLOV_DESCENT_DATA"

# The site of the MNIST authors no longer serves the files.
MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://raw.githubusercontent.com/fgnt/mnist/master/",
)


@dataclass(frozen=True)
class Source:
    """One data file: `name` is its path below the data folder.

    A file without `mirrors` can only be put there by hand; one without `sha256` cannot be checked.
    """

    name: str
    size: int | None
    sha256: str | None
    mirrors: tuple[str, ...] = ()


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


def _mnist(file: str, size: int, sha256: str) -> Source:
    return Source(f"mnist/{file}", size, sha256, tuple(mirror + file for mirror in MNIST_MIRRORS))


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        _mnist(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _mnist(
            "train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        _mnist(
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        _mnist(
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        # The original CURVES: no stable address and no published checksum. The generator in
        # problems/curves.py needs no file.
        Source("curves/digs3pts_1.mat", None, None),
    )
}


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder to look in: the argument, KRYLOV_DESCENT_DATA, or the user's cache."""
    chosen = folder or os.environ.get(FOLDER_VARIABLE)
    return Path(chosen).expanduser() if chosen else _user_cache() / "krylov-descent"


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
        _download(source, path, progress)
        return path
    found = sha256_of(path)
    if source.sha256 is not None and found != source.sha256:
        raise DataError(
            f"{path} is damaged (sha256 expected {source.sha256[:12]}…, found {found[:12]}…): "
            f"get it anew with `ksd data fetch {source.name}`, or put a good copy in its place."
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
    for status in inventory(folder, names=names, verify=True, sources=sources):
        if not status.present or status.ok is False:
            _download(sources[status.name], status.path, progress)
    return inventory(folder, names=names, verify=True, sources=sources)


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
        downloadable=bool(source.mirrors),
    )


def _download(source: Source, path: Path, progress: bool) -> None:
    if not source.mirrors or source.sha256 is None or source.size is None:
        raise DataError(
            f"{source.name} is not on this machine and has no public download: put it at {path}."
        )
    download(source.mirrors, path, sha256=source.sha256, size=source.size, progress=progress)


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
