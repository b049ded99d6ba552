"""Recorded curvature products are those of the dense matrix and of the plain product."""

import pytest
import torch
from torch import nn

from krylov_descent import Objective
from krylov_descent.curvature.products import Curvature, CurvatureKind
from tests.engines import RECORDING, device_of, objective_on, recorded_in
from tests.optimizers.nets import classes, net


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("kind", ["gauss-newton", "hessian", "fisher"])
def test_recorded_products_are_the_plain_ones_at_every_point(
    kind: CurvatureKind, engine: str
) -> None:
    model, device = net(torch.float64).to(device_of(engine)), device_of(engine)
    inputs, targets = (t.to(device) for t in classes(60, torch.float64))
    ours = objective_on(engine, model, nn.CrossEntropyLoss())
    theirs = Objective(model, nn.CrossEntropyLoss())
    vectors = torch.randn(3, ours.parameters.numel, dtype=torch.float64).to(device)
    curvature, expected = Curvature(kind), Curvature(kind)
    for count in (60, 60, 40):  # recorded at the first, replayed, and recorded anew
        data = inputs[:count], targets[:count]
        product, plain = curvature.at(ours, data), expected.at(theirs, data)
        found = [product(vector) for vector in vectors]  # none overwrites another
        for one, vector in zip(found, vectors, strict=True):
            torch.testing.assert_close(one, plain(vector), rtol=1e-10, atol=1e-13)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    assert f"product {kind}" in recorded_in(ours)
