"""The code of a page, run as torchrun starts it."""

import contextlib
import os
import re
from pathlib import Path

import torch

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run(page: Path, rank: int, port: int, log: Path) -> None:
    """What the page's code prints on one of two ranks goes into the log."""
    torch.set_num_threads(1)
    told = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    program = "\n".join(CODE.findall(page.read_text(encoding="utf-8")))
    with log.open("w") as file, contextlib.redirect_stdout(file):
        exec(program, {"__name__": "__main__"})
