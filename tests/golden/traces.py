"""Short trainings whose every bit is recorded, to show that a change of the code changed no number.

A case trains a small problem on the CPU for a few steps. Its trace holds, for each step, all fields
of the result except the wall-clock times, and a hash of all parameters after the step. Cases import
`krylov_descent` itself and none of its modules, so that the modules may be moved and renamed.
"""

import copy
import dataclasses
import hashlib
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from krylov_descent import (
    KSD,
    LBFGS,
    Evaluation,
    FirstOrder,
    FisherDiagonal,
    HessianFree,
    KroneckerFactors,
    NonlinearCG,
    Objective,
    StepResult,
)
from tests.distributed.group import Group
from tests.once_differentiable import BackwardOnlyTanh, OnceTanh

Record = dict[str, Any]  # of one step, ready for JSON
Trace = list[list[Record]]  # of each rank, of each step; one rank where there are no ranks
Data = tuple[Tensor, Tensor]
Make = Callable[[nn.Module], Any]  # a model's optimiser

NOT_RECORDED = ("seconds",)
SHOWN = 3  # entries of the parameters that a person can compare


@dataclasses.dataclass(frozen=True)
class Case:
    """A training by name.

    Attributes:
        name: of the case, and of its trace in a recorded file.
        run: trains and returns the trace.
        dtype: of the parameters; sets how far another processor may differ.
    """

    name: str
    run: Callable[[], Trace]
    dtype: torch.dtype = torch.float32


def trace_of(case: Case) -> Trace:
    """The trace of a case, with one thread and a fixed seed of torch's own generator."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return case.run()


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch, because a sum that is split over threads has other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Records -----------------------------------------------------------------------------------------


def record(result: StepResult, model: nn.Module) -> Record:
    """A step's result and the parameters after it; floats as `float.hex` writes them."""
    fields = (field.name for field in dataclasses.fields(result))
    found = {name: _plain(getattr(result, name)) for name in fields if name not in NOT_RECORDED}
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {**found, **_numbers("parameters", parameters)}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value


def _numbers(name: str, vector: Tensor) -> Record:
    """A hash of the bytes of a vector, and its first entries."""
    vector = vector.detach().contiguous()
    return {
        f"{name}_sha256": hashlib.sha256(vector.view(torch.uint8).numpy().tobytes()).hexdigest(),
        f"first_{name}": [float(entry).hex() for entry in vector[:SHOWN]],
    }


# Models and data ---------------------------------------------------------------------------------


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with the same first parameters each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make().to(dtype)


def classifier(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 3))


def wide_classifier() -> nn.Module:
    """98,273 parameters: so many that automatic sets on a CPU need no 1,000 samples."""
    return nn.Sequential(
        nn.Linear(2, 310), nn.Tanh(), nn.Linear(310, 310), nn.Tanh(), nn.Linear(310, 3)
    )


def autoencoder() -> nn.Module:
    sizes = [16, 10, 4, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], sizes[0]))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


class WordModel(nn.Module):
    """Scores of the next word [batch, words, positions], from the word before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 8)
        self.scores = nn.Linear(8, 11)

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.norm(self.embedding(words))))
        scores: Tensor = self.scores(hidden)
        return scores.transpose(1, 2)


class OnceDifferentiable(nn.Module):
    """4-6-3 with an activation that has no second derivative."""

    def __init__(self, activation: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self._activation = activation

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.second(self._activation.apply(self.first(inputs)))
        return scores


class Recurrent(nn.Module):
    """A class for each sequence, from the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4 + 5, 5)
        self.scores = nn.Linear(5, 3)

    def forward(self, sequences: Tensor) -> Tensor:
        state = sequences.new_zeros(len(sequences), 5)
        for inputs in sequences.unbind(1):
            state = torch.tanh(self.step(torch.cat([inputs, state], 1)))
        scores: Tensor = self.scores(state)
        return scores


def second_derivative(model: nn.Module, inputs: Tensor) -> Tensor:
    """u'' of a net u, as a physics-informed forward needs it."""
    with torch.enable_grad():
        inputs = inputs.detach().requires_grad_()
        value = model(inputs)
        (first,) = torch.autograd.grad(value.sum(), inputs, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), inputs, create_graph=True)
    return second


def drawn(seed: int = 2) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=drawn(seed))


def labelled(samples: int = 120, dtype: torch.dtype = torch.float32) -> Data:
    """Three classes that can be learned, but not without error."""
    x = normal(samples, 4)
    scores = (x @ normal(4, 3, seed=3)).sin() + 0.5 * normal(samples, 3, seed=4)
    return x.to(dtype), scores.argmax(1)


def patterns(dtype: torch.dtype = torch.float32) -> Data:
    """Inputs between 0 and 1 of a few underlying numbers, which are their own targets."""
    x = torch.sigmoid(2 * normal(150, 3) @ normal(3, 16, seed=3)).to(dtype)
    return x, x


def images() -> Data:
    x = normal(80, 1, 8, 8)
    return x.float(), (2 * x.mean((1, 2, 3)) + 0.1 * normal(80, seed=3)).gt(0).long()


def words() -> Data:
    """Sequences of words; a quarter of the targets is to be ignored."""
    text = torch.randint(11, (60, 8), generator=drawn())
    targets = (3 * text[:, :-1] + 1) % 11
    ignored = torch.rand(targets.shape, generator=drawn(3)) < 0.25
    return text[:, :-1], targets.masked_fill(ignored, -100)


def at_a_kink() -> tuple[nn.Module, Data]:
    """A net at the minimum of `bent`, exactly, and its data: one sample 200 times."""
    model = nn.Linear(6, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(0.7)
    inputs = torch.linspace(-1, 1, 6).expand(200, 6).clone()
    return model, (inputs, torch.full((200, 1), 0.7))


def bent(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with its minimum at a kink, beside which the gradient never is zero."""
    residual = (outputs - targets).squeeze(1)
    return torch.where(residual > 0, residual, -2 * residual) + residual.square() / 2


def mean_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that returns one number: the mean over the samples."""
    return (outputs - targets).square().mean()


def tiny_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """So small that squares of its gradient are zero in float32."""
    return 1e-26 * functional.cross_entropy(outputs, targets, reduction="none")


class Pairs(Dataset[Data]):
    """A map-style dataset that is not a TensorDataset, so that samples are fetched one by one."""

    def __init__(self, data: Data) -> None:
        self._inputs, self._targets = data

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Data:
        return self._inputs[index], self._targets[index]


class Powers:
    """A preconditioner of a user: a fixed diagonal."""

    def update(self, objective: Objective, data: Any) -> Evaluation:
        found = objective.value_and_gradient(data)
        self._diagonal = torch.linspace(1, 2, len(found.gradient)).to(found.gradient)
        return found

    def solve(self, vector: Tensor) -> Tensor:
        return vector / self._diagonal

    def multiply(self, vector: Tensor) -> Tensor:
        return vector * self._diagonal


# Trainings ---------------------------------------------------------------------------------------


def train(
    model: nn.Module,
    make: Make,
    data: Callable[[int], Any],
    steps: int = 4,
    sets: Callable[[int], dict[str, Any]] = lambda _: {},
) -> Trace:
    """Some steps, and the trace of them.

    Args:
        model: to be trained.
        make: gives its optimiser.
        data: what a step is given as data, by the number of the step.
        steps: how many.
        sets: what a step is given beside the data, by the number of the step.
    """
    optimizer = make(model)
    return [[record(optimizer.step(data(i), **sets(i)), model) for i in range(steps)]]


def ksd(loss: Any, **options: Any) -> Make:
    """KSD with a short search, which does not end where rounding decides.

    Classifiers have the diagonal, unless the options say otherwise.
    """
    settings: dict[str, Any] = {"dimension": 6, "bfgs_iterations": 6, **options}
    if isinstance(loss, nn.CrossEntropyLoss):
        settings.setdefault("preconditioner", "fisher-diagonal")
    return lambda model: KSD(model, loss, **settings)


def on_classes(
    dtype: torch.dtype = torch.float32, samples: int = 120, steps: int = 4, **options: Any
) -> Trace:
    """KSD on the small classifier."""
    data = labelled(samples, dtype)
    options = {"subset_size": (40, 50), **options}
    make = ksd(nn.CrossEntropyLoss(), **options)
    return train(seeded(classifier, dtype), make, lambda _: data, steps)


def on_patterns(dtype: torch.dtype = torch.float32, steps: int = 4, **options: Any) -> Trace:
    """KSD on the autoencoder."""
    data = patterns(dtype)
    options = {"subset_size": 0.4, **options}
    make = ksd(nn.BCEWithLogitsLoss(), **options)
    return train(seeded(autoencoder, dtype), make, lambda _: data, steps)


def on_classes_given_as(give: Callable[[Data], Any], subset_size: Any = (0.3, 0.4)) -> Trace:
    """KSD on the small classifier, with the data in some form.

    Args:
        give: makes of the data what a step is given.
        subset_size: of B and C.
    """
    data = labelled()
    make = ksd(nn.CrossEntropyLoss(), subset_size=subset_size)
    return train(seeded(classifier), make, lambda _: give(data))


def batches_of(data: Data, size: int = 25) -> Iterator[Data]:
    """A stream: batches that can be walked over once."""
    yield from zip(*(tensor.split(size) for tensor in data), strict=True)


def growing_sets() -> Trace:
    """Automatic sets that begin with 300 samples; labels by chance have them doubled."""
    samples = 1800
    inputs = normal(samples, 2).sign().float()
    data = inputs, torch.randint(3, (samples,), generator=drawn(5))
    return train(seeded(wide_classifier), ksd(nn.CrossEntropyLoss()), lambda _: data, steps=5)


def sets_by_hand() -> Trace:
    data = labelled()

    def part(start: int) -> Data:
        return data[0][start : start + 40], data[1][start : start + 40]

    return train(
        seeded(classifier),
        ksd(nn.CrossEntropyLoss()),
        lambda _: data,
        sets=lambda i: {"curvature_data": part(10 * i), "objective_data": part(10 * i + 40)},
    )


def weight_decay_in_groups() -> Trace:
    def make(model: nn.Module) -> KSD:
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.05}, {"params": biases, "lr": 0.7}]
        optimizer = ksd(ENTROPY, params=groups)(model)
        assert isinstance(optimizer, KSD)
        return optimizer

    data = labelled()
    return train(seeded(classifier), make, lambda _: data)


def frozen_layer() -> Trace:
    model = seeded(autoencoder)
    next(model.parameters()).requires_grad_(False)
    data = patterns()
    return train(model, ksd(nn.BCEWithLogitsLoss()), lambda _: data)


def physics(preconditioner: str) -> Trace:
    """u'' = -sin on an interval: a forward that differentiates, so squares are an estimate."""
    x = torch.linspace(-2, 2, 40, dtype=torch.float64).unsqueeze(1)
    model = seeded(
        lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), torch.float64
    )
    make = ksd(nn.MSELoss(), forward=second_derivative, preconditioner=preconditioner)
    return train(model, make, lambda _: (x, -x.sin()))


def convolutions(**options: Any) -> Trace:
    data = images()
    make = ksd(nn.CrossEntropyLoss(), subset_size=40, **options)
    return train(seeded(convolutional), make, lambda _: data)


def text() -> Trace:
    data = words()
    make = ksd(nn.CrossEntropyLoss(ignore_index=-100), subset_size=30)
    return train(seeded(WordModel), make, lambda _: data)


def sequences() -> Trace:
    inputs, targets = normal(60, 5, 4).float(), labelled(60)[1]
    make = ksd(nn.CrossEntropyLoss(), subset_size=30, previous_steps=1)
    return train(seeded(Recurrent), make, lambda _: (inputs, targets))


def regression(loss: Any, dtype: torch.dtype = torch.float32) -> Trace:
    inputs = normal(90, 4).to(dtype)
    targets = inputs[:, :3].sin()
    return train(seeded(classifier, dtype), ksd(loss), lambda _: (inputs, targets))


def without_second_derivatives(activation: type[torch.autograd.Function]) -> Trace:
    """Curvature products by forward mode or by differences; KSD warns that it takes them."""
    data = labelled(dtype=torch.float64)
    make = ksd(nn.CrossEntropyLoss(), subset_size=50, preconditioner="identity")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model has no second derivative")
        # Torch itself uses what it deprecates when it first differentiates forward.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        model = seeded(partial(OnceDifferentiable, activation), torch.float64)
        return train(model, make, lambda _: data)


def bent_regression(samples: int, make: Make) -> Trace:
    """A convex function full of kinks: searches end at them and go on with a bundle of gradients.

    Args:
        samples: how many. With these few ones line searches fail at kinks, which they seldom do.
        make: gives the optimiser.
    """
    inputs = normal(samples, 6)
    targets = (inputs @ normal(6, 1, seed=3)).sin()
    model = seeded(partial(nn.Linear, 6, 1), torch.float64)
    return train(model, make, lambda _: (inputs, targets))


def kinks(dtype: torch.dtype) -> Trace:
    """A ReLU net with few samples, and a search that is long enough to meet kinks."""
    data = labelled(40, dtype)
    make = ksd(nn.CrossEntropyLoss(), dimension=10, bfgs_iterations=10)
    model = seeded(partial(classifier, nn.ReLU), dtype)
    return train(model, make, lambda _: data, steps=6)


def refused() -> Trace:
    """Refused steps make the sets larger and the basis longer; steps taken undo that."""
    model, (inputs, targets) = at_a_kink()
    make = ksd(bent, subset_size=20, dimension=2, preconditioner="identity")
    return train(model, make, lambda i: (inputs, targets + (i >= 4) * i), steps=6)


def stationary() -> Trace:
    data = labelled()
    return train(seeded(classifier), ksd(lambda z, _: 0.0 * z.sum(1)), lambda _: data, steps=2)


def not_finite() -> Trace:
    """A step with a NaN in the data between two without."""
    inputs, targets = labelled()
    broken = inputs.clone()
    broken[3, 1] = math.nan
    make = ksd(nn.CrossEntropyLoss(), subset_size=40)
    return train(
        seeded(classifier), make, lambda i: (broken if i == 1 else inputs, targets), steps=3
    )


def scaled_loss() -> Trace:
    data = labelled()
    return train(seeded(classifier), ksd(tiny_loss, subset_size=50), lambda _: data)


def resumed(make: Make, dtype: torch.dtype = torch.float32) -> Trace:
    """Two steps, a checkpoint of model and optimiser, and two steps of what was loaded from it."""
    data = labelled(dtype=dtype)
    model = seeded(classifier, dtype)
    optimizer = make(model)
    first = [record(optimizer.step(data), model) for _ in range(2)]
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    parameters, state = torch.load(file, weights_only=True)
    model = copy.deepcopy(model)
    model.load_state_dict(parameters)
    optimizer = make(model)
    optimizer.load_state_dict(state)
    return [first + [record(optimizer.step(data), model) for _ in range(2)]]


def other_optimizer(make: Make, dtype: torch.dtype = torch.float32, steps: int = 3) -> Trace:
    data = labelled(dtype=dtype)
    return train(seeded(classifier, dtype), make, lambda _: data, steps)


def schedule() -> Trace:
    """A learning rate that a scheduler of torch changes from step to step."""
    data, model = labelled(), seeded(classifier)
    optimizer = ksd(ENTROPY)(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    records = []
    for _ in range(4):
        records.append(record(optimizer.step(data), model))
        scheduler.step()
    return [records]


def objective() -> Trace:
    """Value, gradient and squares of an objective of the user's."""
    model, data = seeded(autoencoder, torch.float64), patterns(torch.float64)
    function = Objective(model, nn.BCEWithLogitsLoss(), micro_batch=40)
    value = function.value(data)
    first, second = function.value_and_gradient(data), function.value_gradient_and_squares(data)
    return [
        [
            {"loss": value.hex()},
            {"loss": first.value.hex(), **_numbers("gradient", first.gradient)},
            {
                "loss": second.value.hex(),
                **_numbers("gradient", second.gradient),
                **_numbers("squares", second.squares),
            },
        ]
    ]


# Ranks -------------------------------------------------------------------------------------------


def on_two_ranks(kind: str, **options: Any) -> Trace:
    """Three steps on two ranks with shards of different sizes; a trace for each rank."""
    group = Group(2)
    try:
        found: Trace = group.run(steps_of_a_rank, kind, options)
    finally:
        group.close()
    return found


def steps_of_a_rank(kind: str, options: dict[str, Any]) -> list[Record]:
    """What one of two ranks does."""
    rank = torch.distributed.get_rank()
    part = slice(50) if rank == 0 else slice(50, None)
    inputs, targets = labelled(dtype=torch.float64)
    make: Any = {"ksd": KSD, "hessian-free": HessianFree, "nonlinear-cg": NonlinearCG}[kind]
    (records,) = train(
        seeded(classifier, torch.float64),
        lambda model: make(model, nn.CrossEntropyLoss(), weight_decay=1e-3, **options),
        lambda _: (inputs[part], targets[part]),
        steps=3,
    )
    return records


KSD_ON_RANKS: dict[str, Any] = {"dimension": 6, "subset_size": (40, 50), "bfgs_iterations": 6}

F64 = torch.float64
ENTROPY = nn.CrossEntropyLoss()
CASES = [
    Case("gauss-newton, float32", on_patterns),
    Case("gauss-newton, float64", partial(on_patterns, F64), F64),
    Case("hessian", partial(on_classes, F64, curvature="hessian"), F64),
    Case("fisher", partial(on_classes, F64, curvature="fisher"), F64),
    Case("identity", partial(on_patterns, preconditioner="identity")),
    Case("diagonal as an object", lambda: on_patterns(preconditioner=FisherDiagonal(1e-3))),
    Case("preconditioner of a user", lambda: on_classes(preconditioner=Powers())),
    Case(
        "kronecker, float32",
        lambda: on_patterns(steps=5, preconditioner=KroneckerFactors(1e-4, after=2)),
    ),
    Case(
        "kronecker, float64",
        lambda: on_classes(F64, 120, 5, preconditioner=KroneckerFactors(1e-4, after=2)),
        F64,
    ),
    Case(
        "kronecker and convolutions",
        lambda: convolutions(preconditioner=KroneckerFactors(1e-4, after=1)),
    ),
    Case("sets: auto, all samples", partial(on_classes, subset_size="auto")),
    Case("sets: auto, growing", growing_sets),
    Case("sets: fixed", partial(on_classes, samples=2400, subset_size="fixed")),
    Case("sets: as in the paper", partial(on_classes, subset_size="paper")),
    Case("sets: a fraction", partial(on_classes, subset_size=0.25)),
    Case("sets: a pair", partial(on_classes, subset_size=(0.5, 35))),
    Case("sets: by hand", sets_by_hand),
    Case("data: a stream", partial(on_classes_given_as, batches_of)),
    Case(
        "data: a DataLoader",
        partial(on_classes_given_as, lambda data: DataLoader(Pairs(data), 25, shuffle=True)),
    ),
    Case("data: a Dataset", partial(on_classes_given_as, Pairs)),
    Case("data: a TensorDataset", partial(on_classes_given_as, lambda data: TensorDataset(*data))),
    Case("small micro-batches", partial(on_patterns, micro_batch=7)),
    Case("graphs not kept", partial(on_patterns, activation_memory=5_000)),
    Case("weight decay in groups", weight_decay_in_groups),
    Case("a frozen layer", frozen_layer),
    Case("half of a step", partial(on_patterns, lr=0.5)),
    Case("a schedule", schedule),
    Case("basis in bfloat16", partial(on_patterns, basis_dtype=torch.bfloat16)),
    Case("long search", partial(on_classes, F64, dimension=20, bfgs_iterations=30), F64),
    Case("a forward that differentiates", partial(physics, "identity"), F64),
    Case("squares by random signs", partial(physics, "fisher-diagonal"), F64),
    Case("products by forward mode", partial(without_second_derivatives, OnceTanh), F64),
    Case("products by differences", partial(without_second_derivatives, BackwardOnlyTanh), F64),
    Case("convolutions", partial(convolutions, preconditioner="fisher-diagonal")),
    Case("words, some ignored", text),
    Case("sequences", sequences),
    Case("a loss that returns a mean", partial(regression, mean_of_squares)),
    Case("squared error", partial(regression, nn.MSELoss(), F64), F64),
    Case("kinks, float32", partial(kinks, torch.float32)),
    Case("kinks, float64", partial(kinks, F64), F64),
    Case("bent loss", partial(bent_regression, 8, ksd(bent, dimension=2, bfgs_iterations=30)), F64),
    Case(
        "bent loss, nonlinear-cg",
        partial(bent_regression, 10, lambda model: NonlinearCG(model, bent, iterations=8)),
        F64,
    ),
    Case("refused steps", refused),
    Case("a gradient of zero", stationary),
    Case("not finite", not_finite),
    Case("a loss with small squares", scaled_loss),
    Case("resumed", partial(resumed, ksd(ENTROPY, subset_size=50), F64), F64),
    Case(
        "resumed, kronecker",
        partial(
            resumed,
            lambda model: KSD(
                model,
                ENTROPY,
                dimension=6,
                bfgs_iterations=6,
                preconditioner=KroneckerFactors(after=1),  # one for each optimiser
            ),
        ),
    ),
    Case("resumed, first-order", partial(resumed, lambda model: FirstOrder(model, ENTROPY))),
    Case(
        "hessian-free",
        partial(other_optimizer, lambda model: HessianFree(model, ENTROPY, cg_iterations=20), F64),
        F64,
    ),
    Case(
        "hessian-free, chunks",
        partial(
            other_optimizer,
            lambda model: HessianFree(model, ENTROPY, damping=1.0, chunk_size=50, cg_iterations=9),
        ),
    ),
    Case(
        "nonlinear-cg",
        partial(other_optimizer, lambda model: NonlinearCG(model, ENTROPY, iterations=4), F64),
        F64,
    ),
    Case(
        "nonlinear-cg, hestenes-stiefel",
        partial(
            other_optimizer,
            lambda model: NonlinearCG(model, ENTROPY, formula="hestenes-stiefel", iterations=4),
        ),
    ),
    Case(
        "l-bfgs",
        partial(other_optimizer, lambda model: LBFGS(model, ENTROPY, iterations=5), F64),
        F64,
    ),
    Case(
        "adam",
        partial(other_optimizer, lambda model: FirstOrder(model, ENTROPY, batch_size=32, lr=0.01)),
    ),
    Case(
        "sgd with a linear schedule",
        partial(
            other_optimizer,
            lambda model: FirstOrder(
                model,
                ENTROPY,
                "torch.optim.SGD",
                batch_size=32,
                schedule="linear",
                epochs=4,
                clip_norm=0.5,
                lr=0.1,
                momentum=0.9,
            ),
        ),
    ),
    Case("an objective by itself", objective, F64),
    Case(
        "two ranks, replicated",
        partial(on_two_ranks, "ksd", **KSD_ON_RANKS, preconditioner="fisher-diagonal"),
        F64,
    ),
    Case("two ranks, sharded", partial(on_two_ranks, "ksd", **KSD_ON_RANKS, basis="sharded"), F64),
    Case(
        "two ranks, kronecker",
        lambda: on_two_ranks("ksd", **KSD_ON_RANKS, preconditioner=KroneckerFactors(1e-4, after=1)),
        F64,
    ),
    Case(
        "two ranks, hessian-free",
        partial(on_two_ranks, "hessian-free", cg_iterations=12, chunk_size=25),
        F64,
    ),
    Case("two ranks, nonlinear-cg", partial(on_two_ranks, "nonlinear-cg", iterations=3), F64),
]
