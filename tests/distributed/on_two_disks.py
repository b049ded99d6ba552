"""The command `ksd`, of which rank 1 works in an empty folder, as on another node's disk.

Run by torchrun, in the folder that rank 0 works in. The words after the script are the command's.
"""

import os
import sys
import tempfile

import torch

from krylov_descent.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as empty:
        if os.environ["RANK"] == "1":
            os.chdir(empty)
        main(sys.argv[1:])
