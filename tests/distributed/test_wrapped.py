"""Models in DistributedDataParallel, parameters cut by FSDP2, and distributed checkpoints."""

from pathlib import Path

import pytest
import torch

from tests.distributed import wrapped
from tests.distributed.group import Group


def test_a_model_in_ddp_is_unwrapped(pair: Group) -> None:
    for inside, bare in pair.run(wrapped.step_in_ddp):
        assert torch.equal(inside, bare)


def test_parameters_cut_by_fsdp_are_refused_with_what_to_do(pair: Group) -> None:
    for told in pair.run(wrapped.make_with_fsdp):
        assert "`fully_shard`" in told
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
