"""The command `ksd`, of which rank 1 is killed in the middle of a step, unless it is started anew.

Run by torchrun, which asks rank 0 to end when it sees rank 1 dead, be it a moment before rank 0 has
seen that itself and said so: rank 0 ends of its own accord here. The words after the script are the
command's.
"""

import os
import signal
import sys
from typing import Any

import torch
from torch import nn

from krylov_descent.cli import main

FORWARD_PASSES = 60  # well after the first checkpoint, and in the middle of a search


def die_after(passes: int) -> None:
    """Kill this process at its so-manieth forward pass of a whole model."""
    left = [passes]

    def count(module: nn.Module, *_: Any) -> None:
        if isinstance(module, nn.Sequential):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    nn.modules.module.register_module_forward_hook(count)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "1":
            die_after(FORWARD_PASSES)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main(sys.argv[1:])
