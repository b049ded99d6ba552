"""Run the tutorials: their output goes into the pages, their pictures beside the pages.

`PYTHONPATH=src python docs/tutorials/run.py`
"""

import contextlib
import io
import os
import re
from pathlib import Path

import matplotlib as mpl
import torch

FOLDER = Path(__file__).parent
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
OUTPUT = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)


def main() -> None:
    """Run the code of every page in the folder of the pages."""
    os.chdir(FOLDER)
    torch.set_num_threads(1)
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the same picture has the same bytes
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            mpl.rc_context({"svg.hashsalt": page.stem, "svg.fonttype": "none"}),
        ):
            exec("\n".join(CODE.findall(text)), {"__name__": page.stem})
        torch.set_default_dtype(torch.float32)
        page.write_text(OUTPUT.sub(printed.getvalue(), text, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
