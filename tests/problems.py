"""Small models × losses in float64; their dense references are in `tests.dense`.

problem = make("lstm", "cross-entropy")     # any pair of PAIRS
Objective(problem.model, problem.loss).value(problem.data)  ==  dense.value(problem)
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.loss_cases import CLASSES, LOSSES, Loss, LossCase, Tree

SAMPLES, STEPS = 5, 2

# Models ---------------------------------------------------------------------------------------


class Applied(nn.Module):
    """Modules by name and the function that calls them."""

    def __init__(self, function: Callable[..., Tree], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleDict(parts)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tree:
        return self.function(self.parts, *args, **kwargs)


def _linear() -> tuple[nn.Module, Tree]:
    return nn.Linear(4, CLASSES), torch.randn(SAMPLES, 4)


def _mlp() -> tuple[nn.Module, Tree]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, CLASSES))
    return model, torch.randn(SAMPLES, 4)


def _frozen() -> tuple[nn.Module, Tree]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model, torch.randn(SAMPLES, 4)


def _conv() -> tuple[nn.Module, Tree]:
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, CLASSES))
    return model, torch.randn(SAMPLES, 1, 3, 3)


def _embedding() -> tuple[nn.Module, Tree]:
    model = Applied(
        lambda parts, tokens: parts["linear"](torch.tanh(parts["table"](tokens)).mean(1)),
        table=nn.Embedding(6, 3),
        linear=nn.Linear(3, CLASSES),
    )
    # The same word twice in one sample, and words that no sample has.
    return model, torch.tensor([[0, 0, 1], [1, 2, 2], [0, 3, 1], [3, 3, 3], [1, 0, 2]])


def _layernorm() -> tuple[nn.Module, Tree]:
    parts = nn.Linear(4, 3), nn.LayerNorm(3), nn.Softplus(), nn.Linear(3, CLASSES)
    return nn.Sequential(*parts), torch.randn(SAMPLES, 4)


def _recurrent(cell: nn.RNNBase) -> tuple[nn.Module, Tree]:
    model = Applied(
        lambda parts, x: parts["linear"](parts["cell"](x)[0][:, -1]),
        cell=cell,
        linear=nn.Linear(2, CLASSES),
    )
    return model, torch.randn(SAMPLES, 3, 2)


def _sequence() -> tuple[nn.Module, Tree]:
    """One prediction per time step: outputs [N, classes, time]."""
    model = Applied(
        lambda parts, x: parts["linear"](parts["cell"](x)[0]).transpose(1, 2),
        cell=nn.RNN(2, 2, batch_first=True),
        linear=nn.Linear(2, CLASSES),
    )
    return model, torch.randn(SAMPLES, STEPS, 2)


def _attention() -> tuple[nn.Module, Tree]:
    model = Applied(
        lambda parts, x: parts["linear"](parts["attend"](x, x, x, need_weights=False)[0].mean(1)),
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
        linear=nn.Linear(4, CLASSES),
    )
    return model, torch.randn(SAMPLES, 3, 4)


def _transformer() -> tuple[nn.Module, Tree]:
    layer = nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, activation="gelu", batch_first=True)
    model = Applied(
        lambda parts, x: parts["linear"](parts["layer"](x).flatten(1)),
        layer=layer,
        linear=nn.Linear(2 * STEPS, CLASSES),
    )
    return model, torch.randn(SAMPLES, STEPS, 2)


def _tied() -> tuple[nn.Module, Tree]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, CLASSES))
    model[2].weight = model[0].weight
    return model, torch.randn(SAMPLES, 3)


def _called_twice() -> tuple[nn.Module, Tree]:
    layer = nn.Linear(3, CLASSES)
    return nn.Sequential(layer, nn.Tanh(), layer), torch.randn(SAMPLES, 3)


def _nested() -> tuple[nn.Module, Tree]:
    """Inputs in a dict, outputs in a tuple with a dict."""

    def function(parts: nn.ModuleDict, left: Tensor, right: tuple[Tensor, Tensor]) -> Tree:
        hidden = torch.tanh(parts["left"](left) + parts["right"](right[0] * right[1]))
        return parts["head"](hidden), {"rest": hidden[:, :2]}

    model = Applied(function, left=nn.Linear(4, 3), right=nn.Linear(2, 3), head=nn.Linear(3, 1))
    right = (torch.randn(SAMPLES, 2), torch.randn(SAMPLES, 2))
    return model, {"left": torch.randn(SAMPLES, 4), "right": right}


MODELS: dict[str, Callable[[], tuple[nn.Module, Tree]]] = {
    "linear": _linear,
    "mlp": _mlp,
    "frozen": _frozen,
    "conv": _conv,
    "embedding": _embedding,
    "layernorm": _layernorm,
    "rnn": lambda: _recurrent(nn.RNN(2, 2, batch_first=True)),
    "gru": lambda: _recurrent(nn.GRU(2, 2, batch_first=True)),
    "lstm": lambda: _recurrent(nn.LSTM(2, 2, batch_first=True)),
    "sequence": _sequence,
    "attention": _attention,
    "transformer": _transformer,
    "tied": _tied,
    "called-twice": _called_twice,
    "nested": _nested,
}


# Problems -------------------------------------------------------------------------------------

# Torch's losses take one tensor, so nested outputs go with callables only.
PAIRS = [
    (model, loss)
    for model in MODELS
    for loss in LOSSES
    if model != "nested" or loss in ("per-sample", "mean")
]


@dataclass(frozen=True)
class Problem:
    """A model, its data and a loss, with the outputs as a pure function of named parameters."""

    model: nn.Module
    inputs: Tree
    case: LossCase
    functional: Callable[[dict[str, Tensor]], Tree]

    @property
    def loss(self) -> Loss:
        return self.case.loss

    @property
    def data(self) -> tuple[Tree, Tree]:
        return self.inputs, self.case.targets

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def call(model: nn.Module, inputs: Tree) -> Tree:
    """What the library does by default with inputs."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


class _Called(nn.Module):
    """`call` as a module, with the model below it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tree) -> Tree:
        return call(self.model, inputs)


def make(model: str, loss: str, seed: int = 0) -> Problem:
    """The problem of these names; the global random state stays as it is."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module, inputs = MODELS[model]()
            with torch.no_grad():
                case = LOSSES[loss](call(module, inputs))
    finally:
        torch.set_default_dtype(default)
    holder = _Called(module)

    def functional(values: dict[str, Tensor]) -> Tree:
        named = {f"model.{name}": value for name, value in values.items()}
        # On a copy: functional_call damages a model that has one module under two names.
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.functional_call(copy.deepcopy(holder), named, (inputs,))

    return Problem(module, inputs, case, functional)


def physics_informed() -> Problem:
    """u'' = -sin x by a small net: the residuals are outputs, so the forward differentiates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        x = torch.rand(SAMPLES, 1, dtype=torch.float64)
        model = PhysicsInformed(net)

    def residual_of_one(values: dict[str, Tensor], x: Tensor) -> Tensor:
        def u(x: Tensor) -> Tensor:
            inner = {name.removeprefix("net."): value for name, value in values.items()}
            found: Tensor = torch.func.functional_call(net, inner, (x.reshape(1, 1),))
            return found.squeeze()

        second: Tensor = torch.func.grad(torch.func.grad(u))(x)
        return second + x.sin()

    def functional(values: dict[str, Tensor]) -> Tensor:
        return torch.stack([residual_of_one(values, row) for row in x[:, 0].unbind()]).unsqueeze(1)

    case = LossCase(
        nn.MSELoss(), torch.zeros(SAMPLES, 1).double(), lambda z: (z**2).sum(1), SAMPLES
    )
    return Problem(model, x, case, functional)


class PhysicsInformed(nn.Module):
    """Residuals [N, 1] of u'' = -sin x at points x [N, 1]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return second + x.sin()
