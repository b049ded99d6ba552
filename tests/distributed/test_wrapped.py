"""Models in torch's wrappers, parameters divided among ranks, and distributed checkpoints."""

from pathlib import Path

import pytest
import torch

from tests.distributed import wrapped
from tests.distributed.group import Group


@pytest.mark.parametrize(
    ("case", "name"),
    [*((case, "ksd") for case in wrapped.WRAPPED), ("DDP inside", "hf"), ("replicate", "ncg")],
)
def test_ddp_is_set_aside_wherever_it_is(case: str, name: str, trio: Group) -> None:
    for inside, bare in trio.run(wrapped.steps_of_wrapped, case, name):
        torch.testing.assert_close(inside, bare, rtol=0, atol=1e-10)


def test_ddp_inside_the_model_is_itself_again_after_a_step(pair: Group) -> None:
    assert pair.run(wrapped.ddp_is_ddp_again) == [[True, True], [True, True]]


@pytest.mark.parametrize(
    ("case", "beginning"),
    [
        ("FSDP2", "the parameter 0.weight is a DTensor, as `fully_shard` (FSDP2)"),
        ("FSDP1", "`model` is a FullyShardedDataParallel (FSDP1)"),
        ("FSDP1 inside", "the module 0 of `model` is a FullyShardedDataParallel (FSDP1)"),
        ("tensor parallel", "the parameter 0.weight is a DTensor"),
        ("frozen tensor parallel", "the parameter 0.weight is a DTensor"),
    ],
)
def test_parameters_divided_among_ranks_are_refused_with_what_to_do(
    case: str, beginning: str, pair: Group
) -> None:
    for told in pair.run(wrapped.make_with_sharded, case):
        assert told.startswith(beginning)
        assert "KSD(basis='sharded') divides the vectors of the basis" in told


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", ["ksd", "hf", "ncg"])
def test_a_checkpoint_of_three_ranks_goes_on_on_two_and_on_one(
    name: str, trio: Group, pair: Group, tmp_path: Path
) -> None:
    expected = trio.run(wrapped.save_and_go_on, name, tmp_path)[0]
    for found in [*pair.run(wrapped.load_and_go_on, name, tmp_path)]:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    alone = wrapped.load_and_go_on(name, tmp_path)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-10)
