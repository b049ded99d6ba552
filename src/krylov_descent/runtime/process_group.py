"""The process group of an optimiser, as a user gives it, and this process's place in it."""

from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# A mesh must be one-dimensional; None means all processes. The annotation is a string because a
# torch built without torch.distributed has neither class.
ProcessGroup: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"

FIRST = 0  # the rank whose numbers all ranks use


def place_in(group: Any) -> tuple[int, int]:
    """(rank, size) of this process in a group; None means the group of all processes.

    Raises:
        ValueError: the group was destroyed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return FIRST, 1
    return dist.get_rank(group), dist.get_world_size(group)


def checked_group(given: Any) -> Any:
    """The ProcessGroup from a user's `process_group`; raises TypeError or ValueError."""
    if isinstance(given, vars(dist)["DeviceMesh"]):
        if given.ndim != 1:
            raise ValueError(
                f"`process_group` is a DeviceMesh of {given.ndim} dimensions: give the one along "
                "which the data are divided, mesh[name]"
            )
        given = given.get_group()
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"this process, rank {dist.get_rank()}, is not in `process_group`: make the optimiser "
            "on the ranks of the group only, or give each rank a group that it is in"
        )
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            "`process_group` must be a torch.distributed.ProcessGroup, a DeviceMesh of one "
            f"dimension or None, found {type(given).__name__}"
        )
    return given
