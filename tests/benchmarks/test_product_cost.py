"""Products of two libraries at tiny sizes: both measured, in the same matrix."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import agreement, candidates, product, product_tables, workloads
from benchmarks.environment import describe
from krylov_descent.curvature.products import CurvatureKind

# Importing curvlinops compiles something with it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)
CPU = torch.device("cpu")


def tiny() -> workloads.Workload:
    return workloads.autoencoder_workload(CPU, (20, 10, 4), 30)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    pytest.importorskip("curvlinops")
    # The compiled form, which takes half a minute to compile, answers as one that cannot be.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", refuse)
        found = product.measure_workload(tiny(), candidates.KINDS, 3, 3)
    return {"environment": describe(CPU), **found}


def refuse(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("no compiler\nand more")


def test_every_curvature_is_timed_in_both_libraries(measured: dict[str, Any]) -> None:
    rows = {(row["library"], row["curvature"]): row for row in measured["rows"]}
    kinds = {"gauss-newton", "hessian", "fisher"}
    libraries = (candidates.OURS, candidates.EAGER)
    assert set(rows) >= {(library, kind) for library in libraries for kind in kinds}
    assert measured["settings"]["parameters"] == 2 * (20 * 10 + 10 * 4) + 10 + 4 + 10 + 20
    for library in libraries:
        for kind in kinds:
            row = rows[library, kind]
            assert len(row["runs"]) == 3
            gradients = row["gradients"]
            assert 0 < gradients["low"] <= gradients["median"] <= gradients["high"]


def test_what_the_other_library_cannot_do_is_reported(measured: dict[str, Any]) -> None:
    failed = {
        (row["library"], row["curvature"]): row["failed"]
        for row in measured["rows"]
        if "failed" in row
    }
    kinds = ("gauss-newton", "hessian")
    assert failed == {(candidates.COMPILED, kind): "no compiler" for kind in kinds}
    table = product_tables.autoencoder_table({"autoencoder": measured}, CPU)
    assert table.count("fails") == 2


def test_all_networks_are_in_one_table_and_the_missing_ones_named(measured: dict[str, Any]) -> None:
    measured["rows"][0]["memory"] = {"bytes": 10, "gradients": 2.5}
    lines = product_tables.models_table({"cnn": measured}, CPU).splitlines()
    assert lines[2].startswith("| CNN | Gauss-Newton |")
    assert "| 2.50 | – | – |" in lines[2]
    assert "| GRU | *not measured yet* |" in "\n".join(lines)


def constant(product: Tensor, library: str, kind: CurvatureKind) -> candidates.Candidate:
    return candidates.Candidate(library, kind, lambda work: lambda: lambda v: product)


def test_libraries_that_disagree_are_not_compared() -> None:
    both = [
        constant(torch.arange(3.0), candidates.OURS, "gauss-newton"),
        constant(torch.ones(3), candidates.EAGER, "gauss-newton"),
    ]
    with pytest.raises(RuntimeError, match="do not measure the same matrix"):
        agreement.build(both, tiny(), torch.ones(3))


def test_finite_differences_decide_who_is_wrong() -> None:
    work, vector = tiny(), torch.randn(tiny().parameters)
    right = candidates.ours(["hessian"])[0].build(work)()(vector)
    wrong = right + 0.1 * right.norm() * torch.nn.functional.normalize(right.flip(0), dim=0)
    truth = agreement.central_difference(work, vector)
    torch.testing.assert_close(right.double(), truth, rtol=1e-3, atol=1e-6)
    found = agreement.build(
        [
            constant(right, candidates.OURS, "hessian"),
            constant(wrong, candidates.EAGER, "hessian"),
        ],
        work,
        vector,
    )
    assert found[0].off is None
    assert found[1].off == pytest.approx(0.1, abs=0.02)
    with pytest.raises(RuntimeError, match="do not measure the same matrix"):
        agreement.build(
            [
                constant(wrong, candidates.OURS, "hessian"),
                constant(right, candidates.EAGER, "hessian"),
            ],
            work,
            vector,
        )


def test_a_missing_peer_is_skipped_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = product.measure_workload(tiny(), candidates.KINDS, 1, 2, peer="no-such-package")
    assert found["skipped"] == ["no-such-package"]
    assert {row["library"] for row in found["rows"]} == {candidates.OURS}
    assert "no-such-package skipped: it is not installed" in capsys.readouterr().out
    section = {"environment": describe(CPU), **found}
    assert "curvlinops" not in product_tables.autoencoder_table({"autoencoder": section}, CPU)


@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_both_libraries_have_every_network(name: str) -> None:
    pytest.importorskip("curvlinops")
    small: dict[str, workloads.Workload] = {
        "autoencoder": tiny(),
        "cnn": workloads.convolutional_workload(CPU, 4),
        "gru": workloads.recurrent_workload(CPU, 4, 3),
        "transformer": workloads.attentive_workload(CPU, 4, 3),
    }
    kinds = product.OTHER_CURVATURES
    both = candidates.ours(kinds) + candidates.theirs(kinds)[: len(kinds)]
    vector = torch.randn(small[name].parameters)
    # Raises where the two do not agree.
    built = agreement.build(both, small[name], vector)
    assert all(found.prepare is not None for found in built)
