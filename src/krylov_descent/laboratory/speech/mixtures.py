"""Mixtures of diagonal Gaussians, one for each HMM state, and their estimation by EM.

With s the state, m the component, a log density is linear in [x, x²]:

    log w_sm N(x; μ_sm, σ²_sm) = c_sm + [x, x²] · [μ_sm/σ²_sm, −1/(2σ²_sm)]

so those of all frames under all components are one matrix product, on the CPU or a GPU.
Mixtures grow from one Gaussian a state by splitting: each component becomes two, a fifth of its
standard deviation to either side, and EM draws them apart. Nothing is random.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Of the variance of all frames: no component may become narrower in any coefficient.
VARIANCE_FLOOR = 0.01
# A component with fewer frames than this cannot be estimated and is given up.
FEWEST_FRAMES = 4.0
SPLIT = 0.2
# After each split.
EM_ITERATIONS = 4
# Frames whose densities are held at once.
CHUNK = 32_768


@dataclass(frozen=True, eq=False)
class GaussianMixtures:
    """S mixtures of M Gaussians in d dimensions; float64, all on one device.

    Attributes:
        log_weights: [S, M], −inf for a component that was given up.
        means: [S, M, d].
        variances: [S, M, d], diagonals.
        floor: [d], the least variance.
    """

    log_weights: Tensor
    means: Tensor
    variances: Tensor
    floor: Tensor

    @property
    def components(self) -> int:
        """M."""
        return self.log_weights.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the mixtures are, and where densities are computed."""
        return self.means.device

    def log_likelihoods(
        self, frames: npt.NDArray[np.float32], states: Sequence[int] | None = None
    ) -> Tensor:
        """log p(x | s) of frames [n, d] under all states, or those asked for: [n, S] float32.

        2·n·S·M·d multiplications. Frames are taken relative to the mean of the means, so that
        float32 loses nothing to an offset they share.
        """
        chosen = slice(None) if states is None else torch.tensor(list(states), device=self.device)
        log_weights, variances = self.log_weights[chosen], self.variances[chosen]
        centre = self.means.mean((0, 1))
        linear, constants = _linear_form(log_weights, self.means[chosen] - centre, variances)
        linear, constants = linear.float(), constants.float()
        found = torch.empty(len(frames), len(log_weights), device=self.device)
        for start in range(0, len(frames), CHUNK):
            x = _tensor(frames[start : start + CHUNK], self.device) - centre.float()
            joint = torch.addmm(constants, torch.cat([x, x.square()], 1), linear)
            joint = joint.unflatten(1, log_weights.shape)
            found[start : start + CHUNK] = joint.logsumexp(2)
        return found

    def shared(self, owners: npt.NDArray[np.int64]) -> "GaussianMixtures":
        """Mixtures of other states, state s of which has that of `owners[s]`."""
        index = torch.from_numpy(owners).to(self.device)
        return GaussianMixtures(
            self.log_weights[index], self.means[index], self.variances[index], self.floor
        )

    def split(self) -> "GaussianMixtures":
        """Twice as many components, each pair a little apart along all coefficients."""
        apart = SPLIT * self.variances.sqrt()
        return GaussianMixtures(
            log_weights=torch.cat([self.log_weights - math.log(2)] * 2, 1),
            means=torch.cat([self.means + apart, self.means - apart], 1),
            variances=torch.cat([self.variances] * 2, 1),
            floor=self.floor,
        )

    def fit(
        self,
        frames: npt.NDArray[np.float32],
        labels: npt.NDArray[np.int64],
        iterations: int = 1,
    ) -> "GaussianMixtures":
        """The mixtures after EM on the frames [n, d] of each state, given by labels [n].

        A state without enough frames keeps what it has.
        """
        new = self.log_weights.clone(), self.means.clone(), self.variances.clone()
        order = np.argsort(labels, kind="stable")
        borders = np.searchsorted(labels[order], np.arange(len(self.means) + 1))
        for state in range(len(self.means)):
            own = order[borders[state] : borders[state + 1]]
            if len(own) < FEWEST_FRAMES:
                continue
            mixture = new[0][state], new[1][state], new[2][state]
            x = _tensor(frames[own], self.device)
            for _ in range(iterations):
                mixture = _maximize(_statistics(mixture, x), mixture, self.floor)
            for part, value in zip(new, mixture, strict=True):
                part[state] = value
        return GaussianMixtures(*new, self.floor)


def single_gaussians(
    frames: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    states: int,
    device: torch.device | str = "cpu",
) -> GaussianMixtures:
    """One Gaussian a state, of its frames' mean and variance.

    A state without enough frames gets those of all frames, as HTK's flat start does.

    Args:
        frames: [n, d].
        labels: [n], the state of each frame.
        states: how many there are.
        device: where the mixtures, and later the densities, are.
    """
    total, squares = torch.zeros(2, frames.shape[1], dtype=torch.float64, device=device)
    for start in range(0, len(frames), CHUNK):
        x = _tensor(frames[start : start + CHUNK], total.device).double()
        total += x.sum(0)
        squares += x.square().sum(0)
    mean = total / len(frames)
    variance = squares / len(frames) - mean.square()
    if not bool((variance > 0).all()):
        constant = torch.nonzero(~(variance > 0)).flatten().tolist()
        raise ValueError(
            f"`frames`: coefficients {constant} are constant or not finite, so they have no "
            "Gaussian; leave them out"
        )
    everywhere = GaussianMixtures(
        log_weights=torch.zeros(states, 1, dtype=torch.float64, device=device),
        means=mean.expand(states, 1, -1).clone(),
        variances=variance.expand(states, 1, -1).clone(),
        floor=VARIANCE_FLOOR * variance,
    )
    return everywhere.fit(frames, labels)


def grown_mixtures(
    frames: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    states: int,
    components: int,
    device: torch.device | str = "cpu",
) -> GaussianMixtures:
    """Mixtures of frames whose states are settled: split and fitted until there are enough.

    Args:
        frames: [n, d].
        labels: [n], the state of each frame.
        states: how many there are.
        components: Gaussians a state, a power of two.
        device: where the mixtures, and later the densities, are.
    """
    mixtures = single_gaussians(frames, labels, states, device)
    for _ in range(doublings(components)):
        mixtures = mixtures.split().fit(frames, labels, EM_ITERATIONS)
    return mixtures


def doublings(components: int) -> int:
    """How often one Gaussian is split to become so many.

    Raises:
        ValueError: it never does.
    """
    if components < 1 or components.bit_count() != 1:
        raise ValueError(f"`components` must be 1, 2, 4, 8, …, found {components}")
    return components.bit_length() - 1


_Mixture = tuple[Tensor, Tensor, Tensor]  # log weights [M], means [M, d], variances [M, d]


def _linear_form(log_weights: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix [2d, S·M] and the constants [S·M] of the log densities."""
    precisions = 1 / variances
    constants = log_weights - 0.5 * (
        (means.square() * precisions).sum(-1)
        + variances.log().sum(-1)
        + means.shape[-1] * math.log(2 * math.pi)
    )
    linear = torch.cat([means * precisions, -0.5 * precisions], -1)
    return linear.flatten(0, -2).T, constants.flatten()


def _statistics(mixture: _Mixture, frames: Tensor) -> Tensor:
    """E-step: sums of responsibility times [1, x, x²] over a state's frames [n, d], [M, 1 + 2d]."""
    linear, constants = _linear_form(*mixture)
    sums = torch.zeros(len(constants), 1 + len(linear), dtype=torch.float64, device=linear.device)
    for chunk in frames.split(CHUNK):
        x = chunk.double()
        powers = torch.cat([torch.ones_like(x[:, :1]), x, x.square()], 1)
        responsibilities = torch.softmax(torch.addmm(constants, powers[:, 1:], linear), 1)
        sums += responsibilities.T @ powers
    return sums


def _maximize(sums: Tensor, mixture: _Mixture, floor: Tensor) -> _Mixture:
    """M-step; a component with hardly any frames keeps its place and loses its weight."""
    counts = sums[:, :1]
    if not bool((counts >= FEWEST_FRAMES).any()):
        return mixture
    first, second = (sums[:, 1:] / counts.clamp_min(FEWEST_FRAMES)).chunk(2, 1)
    alive = counts >= FEWEST_FRAMES
    kept = torch.where(alive[:, 0], counts[:, 0], 0.0)
    return (
        (kept / kept.sum()).log(),
        torch.where(alive, first, mixture[1]),
        torch.where(alive, torch.maximum(second - first.square(), floor), mixture[2]),
    )


def _tensor(frames: npt.NDArray[np.float32], device: torch.device) -> Tensor:
    """A chunk on the device; the copy is because memory-mapped frames are read-only."""
    return torch.from_numpy(np.array(frames, dtype=np.float32)).to(device)
