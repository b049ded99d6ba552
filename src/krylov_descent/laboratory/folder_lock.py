"""A run folder has one writer: the process that holds the lock on a file in it.

The system gives the lock back when a process ends, however it ends. Where the system has no such
locks, as on Windows, every process may write.
"""

import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

try:
    import fcntl
except ImportError:
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

NAME = "lock"
_held: dict[Path, int] = {}  # file descriptors of this process


class FolderInUseError(OSError):
    """Another process writes to the folder; the text says which."""


def take(folder: Path) -> None:
    """Lock a folder, which is made; a process may do so again.

    Raises:
        FolderInUseError: another process has it.
        OSError: the folder cannot be written.
    """
    folder = folder.resolve()
    if not HAS_LOCKS or folder in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            owner = os.read(file, 1000).decode(errors="replace").strip()
            os.close(file)
            raise FolderInUseError(owner or "another process") from problem
        if _is_at(path, file):
            break
        os.close(file)  # its owner removed it in between
    who = f"process {os.getpid()} on {socket.gethostname()}"
    os.ftruncate(file, 0)
    os.write(file, f"{who} since {datetime.now().astimezone():%Y-%m-%d %H:%M:%S}".encode())
    _held[folder] = file


def release(folder: Path) -> None:
    """Give a folder back, if this process has it."""
    folder = folder.resolve()
    file = _held.pop(folder, None)
    if file is not None:
        with suppress(OSError):
            (folder / NAME).unlink()
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
