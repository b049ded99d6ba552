"""CURVES (re-created): its calibration to the published statistics, and the original's loader."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import scipy.io
import torch
from torch.profiler import ProfilerActivity, profile

from krylov_descent.laboratory.problems import curves
from krylov_descent.laboratory.problems.curves import draw_curves, load_curves, read_original
from krylov_descent.laboratory.sources import DataError

Images = npt.NDArray[np.float64]


def squared_error_about_the_mean(images: Images) -> float:
    return float(((images - images.mean(0)) ** 2).sum(1).mean())


def cross_entropy_of_the_mean(images: Images) -> float:
    mean = images.mean(0).clip(1e-12, 1 - 1e-12)
    return float(-(images * np.log(mean) + (1 - images) * np.log1p(-mean)).sum(1).mean())


def entropy_of_the_pixels(images: Images) -> float:
    inner = images.clip(1e-12, 1 - 1e-12)
    return float(-(inner * np.log(inner) + (1 - inner) * np.log1p(-inner)).sum(1).mean())


def principal_component_error(train: Images, test: Images, components: int) -> float:
    mean = train.mean(0)
    _, vectors = np.linalg.eigh(np.cov(train, rowvar=False))
    kept = vectors[:, -components:]
    centred = test - mean
    return float(((centred - centred @ kept @ kept.T) ** 2).sum(1).mean())


@pytest.fixture(scope="module")
def full_size() -> tuple[Images, Images]:
    problem = load_curves()
    assert len(problem.train[0]) == 20_000
    assert len(problem.test[0]) == 10_000
    return problem.train[0].numpy().astype(float), problem.test[0].numpy().astype(float)


def test_the_first_three_published_statistics_are_met_within_five_per_cent(
    full_size: tuple[Images, Images],
) -> None:
    train, _ = full_size
    assert squared_error_about_the_mean(train) == pytest.approx(16.9, rel=0.05)
    assert cross_entropy_of_the_mean(train) == pytest.approx(124.9, rel=0.05)
    assert entropy_of_the_pixels(train) == pytest.approx(54.6, rel=0.05)


def test_principal_components_find_it_as_hard_as_the_original(
    full_size: tuple[Images, Images],
) -> None:
    assert principal_component_error(*full_size, components=18) == pytest.approx(5.90, rel=0.05)


def test_curves_run_from_left_to_right_within_the_frame(full_size: tuple[Images, Images]) -> None:
    images = full_size[1].reshape(-1, 28, 28)
    assert 0 <= images.min() <= images.max() <= 1
    inked = images.max(1) > 0.2
    columns = np.arange(28)
    leftmost = np.where(inked, columns, 99).min(1)
    rightmost = np.where(inked, columns, -1).max(1)
    assert np.percentile(leftmost, [5, 95]) == pytest.approx([4, 7], abs=2)
    assert np.percentile(rightmost, [5, 95]) == pytest.approx([16, 21], abs=3)
    assert images[:, :, -3:].max() < 0.5  # nothing is cut off at the right


def test_an_image_is_the_sum_of_its_dabs() -> None:
    """Against one dab after the other in float64."""
    count = 3
    image = draw_curves(count, seed=5, stream=1).numpy()
    uniform = np.random.default_rng([5, 1]).random((count, 6))
    rows, columns = np.mgrid[:28, :28]
    for i in range(count):
        x = [
            low + (high - low) * u
            for (low, high), u in zip(curves.X_RANGES, uniform[i, :3], strict=True)
        ]
        low, high = curves.Y_RANGE
        y = low + (high - low) * uniform[i, 3:]
        horizontal, vertical = np.polyfit([0, 0.5, 1], x, 2), np.polyfit([0, 0.5, 1], y, 2)
        density = np.zeros((28, 28))
        for t in np.linspace(0, 1, curves.DABS):
            distance = np.hypot(columns - np.polyval(horizontal, t), rows - np.polyval(vertical, t))
            density += curves.DAB_INK * np.exp(-(distance**2) / (2 * curves.DAB_DEVIATION**2))
        np.testing.assert_allclose(image[i], 1 - np.exp(-density.ravel()), atol=2e-5)


def test_the_seed_decides_and_more_images_begin_with_the_same() -> None:
    many = draw_curves(2_500, seed=1)
    assert many.dtype == torch.float32
    torch.testing.assert_close(draw_curves(1_100, seed=1), many[:1_100], rtol=0, atol=1e-6)
    assert torch.equal(draw_curves(2_500, seed=1), many)
    assert not torch.equal(draw_curves(10, seed=2), many[:10])
    assert not torch.equal(draw_curves(10, seed=1, stream=1), many[:10])
    assert draw_curves(0, seed=1).shape == (0, 784)


def test_a_hundred_images_take_no_more_operations_than_one() -> None:
    """So the paper's 30,000 images take seconds: operations are as many as blocks of images."""
    counts = []
    for images in (1, 100):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            draw_curves(images, seed=0)
        counts.append(sum(event.count for event in seen.key_averages()))
    assert counts[0] == counts[1] > 0


def test_the_splits_share_no_image() -> None:
    problem = load_curves(size="small")
    assert problem.validation is not None
    seen = {
        image.numpy().tobytes()
        for images, _ in (problem.train, problem.validation, problem.test)
        for image in images
    }
    assert len(seen) == 2_000 + 500 + 1_000


def write_original(folder: Path, train: Images, test: Images) -> None:
    (folder / "curves").mkdir()
    variables = {"bdata": train, "bdatatest": test}
    scipy.io.savemat(folder / "curves" / "digs3pts_1.mat", variables)


def test_the_original_file_is_read_with_the_last_tenth_held_out(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    train, test = generator.random((50, 784)), generator.random((20, 784))
    write_original(tmp_path, train, test)
    problem = load_curves(folder=tmp_path, original=True)
    assert problem.title == "CURVES"
    np.testing.assert_allclose(problem.train[0], train[:45], atol=1e-7)
    assert problem.validation is not None
    np.testing.assert_allclose(problem.validation[0], train[45:], atol=1e-7)
    np.testing.assert_allclose(problem.test[0], test, atol=1e-7)
    everything = load_curves(folder=tmp_path, original=True, validation=0)
    assert len(everything.train[0]) == 50
    assert everything.validation is None
    with pytest.raises(ValueError, match="`validation` must be below 50"):
        load_curves(folder=tmp_path, original=True, validation=50)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (np.zeros((5, 100)), r"`bdata` must be rows of 784 pixels.*found shape \(5, 100\)"),
        (np.full((5, 784), 255.0), r"in \[0, 1\]"),
    ],
)
def test_another_matlab_file_is_refused(tmp_path: Path, train: Images, message: str) -> None:
    write_original(tmp_path, train, np.zeros((5, 784)))
    with pytest.raises(DataError, match=message):
        load_curves(folder=tmp_path, original=True)


@pytest.mark.parametrize("content", [b"", b"not a MATLAB file" * 100])
def test_what_is_no_matlab_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.mat"
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as a MATLAB file"):
        read_original(path)


def test_a_negative_validation_is_refused() -> None:
    with pytest.raises(ValueError, match="`validation`"):
        load_curves(validation=-1)
