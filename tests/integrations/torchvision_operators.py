"""Makes torchvision importable beside a torch for which it was not built.

Lightning and Transformers import torchvision where it is installed. The pins have it, because
BackPACK needs it. Beside a torch for CPUs the one from PyPI cannot load its library, and stops at
operators that the library would declare.
"""

import torch

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[torch.library.Library] = []  # a library that is collected takes its operators back


def declare_if_missing() -> None:
    """Declare the operators without an implementation, if torchvision cannot be imported."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(name + SIGNATURE)
        _kept.append(library)
