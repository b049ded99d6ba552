import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp

from krylov_descent.laboratory.speech.mixtures import (
    FEWEST_FRAMES,
    VARIANCE_FLOOR,
    GaussianMixtures,
    single_gaussians,
)


def mixtures(
    states: int = 3, components: int = 2, dimension: int = 4, offset: float = 0.0
) -> GaussianMixtures:
    generator = np.random.default_rng(0)
    shape = (states, components, dimension)
    weights = generator.dirichlet(np.ones(components), states)
    return GaussianMixtures(
        log_weights=torch.from_numpy(np.log(weights)),
        means=torch.from_numpy(offset + generator.standard_normal(shape)),
        variances=torch.from_numpy(generator.uniform(0.05, 2.0, shape)),
        floor=torch.full((dimension,), 1e-3, dtype=torch.float64),
    )


def by_scipy(model: GaussianMixtures, frames: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """[n, S, M] log of weight times density."""
    x = frames.astype(np.float64)[:, None, None, :]
    densities = stats.norm.logpdf(x, model.means.numpy(), model.variances.sqrt().numpy())
    found: npt.NDArray[np.float64] = densities.sum(-1) + model.log_weights.numpy()
    return found


def draw(count: int = 500, dimension: int = 4, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)


# Offsets of a thousand standard deviations leave float32 frames three digits: less is asked there.
@pytest.mark.parametrize(("offset", "tolerance"), [(0.0, 1e-4), (30.0, 1e-3)])
def test_log_likelihoods_are_those_of_scipy(offset: float, tolerance: float) -> None:
    model, frames = mixtures(offset=offset), draw() + np.float32(offset)
    expected = logsumexp(by_scipy(model, frames), axis=2)
    found = model.log_likelihoods(frames).numpy()
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    some = model.log_likelihoods(frames, [2, 0]).numpy()
    np.testing.assert_allclose(some, found[:, [2, 0]], rtol=1e-3, atol=1e-4)


def test_frames_beyond_one_chunk_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, frames = mixtures(), draw(50)
    labels = np.arange(50) % 3
    whole = model.log_likelihoods(frames), model.fit(frames, labels).means
    monkeypatch.setattr("krylov_descent.laboratory.speech.mixtures.CHUNK", 7)
    torch.testing.assert_close(model.log_likelihoods(frames), whole[0])
    torch.testing.assert_close(model.fit(frames, labels).means, whole[1])


def test_single_gaussians_have_the_mean_and_variance_of_their_frames() -> None:
    frames = draw(300) * np.array([0.1, 1, 10, 100], np.float32) + 5
    labels = np.random.default_rng(1).integers(0, 2, 300)
    model = single_gaussians(frames, labels, states=2)
    for state in range(2):
        own = frames[labels == state].astype(np.float64)
        np.testing.assert_allclose(model.means[state, 0], own.mean(0), rtol=1e-9)
        np.testing.assert_allclose(model.variances[state, 0], own.var(0), rtol=1e-6)
    np.testing.assert_allclose(model.floor, VARIANCE_FLOOR * frames.var(0), rtol=1e-3)


def test_one_step_of_em_is_the_textbooks() -> None:
    model, frames = mixtures(), draw()
    labels = np.random.default_rng(1).integers(0, 3, len(frames))
    found = model.fit(frames, labels)
    for state in range(3):
        own = frames[labels == state].astype(np.float64)
        joint = by_scipy(model, own.astype(np.float32))[:, state]
        share = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
        for m in range(2):
            r = share[:, m]
            mean = (r @ own) / r.sum()
            variance = (r @ (own - mean) ** 2) / r.sum()
            assert found.log_weights[state, m].exp().item() == pytest.approx(r.mean())
            np.testing.assert_allclose(found.means[state, m], mean, rtol=1e-9)
            np.testing.assert_allclose(found.variances[state, m], variance, rtol=1e-9)


def test_em_ends_where_scikit_learns_does() -> None:
    mixture = pytest.importorskip("sklearn.mixture")
    generator = np.random.default_rng(0)
    frames = np.concatenate(
        [generator.normal(m, s, (400, 2)) for m, s in ((-2.0, 0.5), (1.0, 1.0))]
    ).astype(np.float32)
    labels = np.zeros(len(frames), np.int64)
    found = single_gaussians(frames, labels, states=1).split().fit(frames, labels, iterations=200)
    theirs = mixture.GaussianMixture(
        2, covariance_type="diag", tol=1e-12, max_iter=1000, reg_covar=0, means_init=found.means[0]
    ).fit(frames.astype(np.float64))
    np.testing.assert_allclose(found.means[0], theirs.means_, atol=1e-4)
    np.testing.assert_allclose(found.variances[0], theirs.covariances_, atol=1e-4)
    np.testing.assert_allclose(found.log_weights[0].exp(), theirs.weights_, atol=1e-4)


def test_growth_finds_the_clusters_that_are_there() -> None:
    generator = np.random.default_rng(0)
    centres = np.array([[-8.0, -8], [-4, -2], [3, 4], [9, 6]])
    frames = (
        centres[generator.integers(0, 4, 2000)] + generator.standard_normal((2000, 2))
    ).astype(np.float32)
    labels = np.zeros(2000, np.int64)
    model = single_gaussians(frames, labels, states=1)
    likelihoods = []
    for _ in range(2):
        model = model.split()
        for _ in range(30):
            model = model.fit(frames, labels)
            likelihoods.append(model.log_likelihoods(frames).mean().item())
    found = model.means[0].numpy()
    for centre in centres:
        assert np.abs(found - centre).sum(1).min() < 0.3
    assert (np.diff(likelihoods) > -1e-5).all()  # EM never loses likelihood


def test_a_split_changes_little_and_doubles_the_components() -> None:
    model, frames = mixtures(), draw()
    twice = model.split()
    assert twice.components == 4
    torch.testing.assert_close(twice.log_weights.exp().sum(1), torch.ones(3, dtype=torch.float64))
    before, after = model.log_likelihoods(frames), twice.log_likelihoods(frames)
    assert 0 < (before - after).abs().mean() < 0.5


def test_variances_stay_above_the_floor() -> None:
    frames = draw(100)
    labels = np.zeros(100, np.int64)
    labels[:50] = 1
    frames[:50, 0] = 3.0  # state 1 never varies in the first coefficient
    model = single_gaussians(frames, labels, states=2)
    assert model.variances[1, 0, 0] == model.floor[0] > 0
    assert (model.variances >= model.floor).all()


def test_a_state_with_hardly_any_frames_keeps_what_it_has() -> None:
    frames = draw(100)
    labels = np.zeros(100, np.int64)
    labels[: int(FEWEST_FRAMES) - 1] = 1
    model = single_gaussians(frames, labels, states=3)
    for state in (1, 2):
        np.testing.assert_allclose(model.means[state, 0], frames.mean(0), atol=1e-6)
        np.testing.assert_allclose(model.variances[state, 0], frames.var(0), rtol=1e-5)


def test_components_without_frames_are_given_up_and_stay_harmless() -> None:
    frames = draw(40)
    labels = np.zeros(40, np.int64)
    model = single_gaussians(frames, labels, states=1).split()
    model.means[0, 1] += 1e3
    model = model.fit(frames, labels)
    assert model.log_weights[0].tolist() == [0.0, -torch.inf]
    assert model.log_likelihoods(frames).isfinite().all()
    again = model.split().fit(frames, labels, iterations=3)
    assert again.log_likelihoods(frames).isfinite().all()
    # Four frames over eight components: none is left with enough, so nothing changes.
    few = model.split().split()
    torch.testing.assert_close(few.fit(frames[:4], labels[:4]).log_weights, few.log_weights)


def test_constant_coefficients_are_named() -> None:
    frames = draw(50)
    frames[:, 2] = 1.0
    with pytest.raises(ValueError, match=r"`frames`: coefficients \[2\] are constant"):
        single_gaussians(frames, np.zeros(50, np.int64), states=1)
    frames[3, 0] = np.nan
    with pytest.raises(ValueError, match=r"coefficients \[0, 2\]"):
        single_gaussians(frames, np.zeros(50, np.int64), states=1)


@pytest.mark.gpu
def test_the_gpu_computes_the_same() -> None:
    frames, labels = draw(2000), np.arange(2000) % 5
    cpu = single_gaussians(frames, labels, 5).split().fit(frames, labels, 3)
    gpu = single_gaussians(frames, labels, 5, "cuda").split().fit(frames, labels, 3)
    torch.testing.assert_close(gpu.means.cpu(), cpu.means)
    torch.testing.assert_close(
        gpu.log_likelihoods(frames).cpu(), cpu.log_likelihoods(frames), rtol=1e-3, atol=1e-3
    )
