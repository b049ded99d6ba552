"""The idx reader on small files; the real MNIST where KRYLOV_DESCENT_DATA names its folder."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from krylov_descent.laboratory.problems.mnist import (
    load_autoencoder,
    load_classifier,
    load_pretrained_classifier,
    read_idx,
    read_mnist,
)
from krylov_descent.laboratory.sources import FOLDER_VARIABLE, DataError

real_mnist = pytest.mark.skipif(
    not os.environ.get(FOLDER_VARIABLE),
    reason=f"needs the real MNIST: set {FOLDER_VARIABLE} to the folder that holds mnist/",
)


def write_idx(path: Path, array: npt.NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.mark.parametrize("shape", [(7,), (5, 3, 4), (0, 28, 28)])
def test_an_idx_file_is_read_as_it_was_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    write_idx(tmp_path / "a.gz", array)
    np.testing.assert_array_equal(read_idx(tmp_path / "a.gz"), array)


def zipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # the same in every process, as names of tests must be


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"plain text", "cannot be read as a gzip file"),
        (zipped(b"some bytes that compress")[:-12], "cannot be read as a gzip file"),
        (zipped(b""), "begins with nothing"),
        (zipped(b"\0\0\x0d\x01" + bytes(8)), "begins with 00 00 0d 01"),
        (zipped(b"\0\0\x08\x03" + bytes(6)), "ends within its header"),
        (
            zipped(b"\0\0\x08\x01\0\0\0\x05" + bytes(4)),
            r"header says \(5,\), which makes 13 bytes, but it has 12",
        ),
        (zipped(b"\0\0\x08\x01\0\0\0\x05" + bytes(6)), "makes 13 bytes, but it has 14"),
    ],
)
def test_what_is_no_whole_idx_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_mnist_is_found_out_by_its_checksum(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist" / "train-images-idx3-ubyte.gz", np.zeros((2, 28, 28), np.uint8))
    with pytest.raises(DataError, match="is damaged"):
        read_mnist(tmp_path)


@real_mnist
def test_the_real_files_have_the_known_shape_and_content() -> None:
    data = read_mnist()
    assert data.train[0].shape == (55_000, 784)
    assert data.validation[0].shape == (5_000, 784)
    assert data.test[0].shape == (10_000, 784)
    assert data.train[0].dtype == torch.float32
    assert (data.train[0].min().item(), data.train[0].max().item()) == (0, 1)
    assert data.train[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test[1][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    # The counts of the classes and the mean grey value are widely published.
    counts = torch.bincount(torch.cat([data.train[1], data.validation[1]]))
    assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    grey = torch.cat([data.train[0], data.validation[0]]).mean(dtype=torch.float64).item()
    assert grey == pytest.approx(0.1307, abs=1e-4)


@real_mnist
def test_the_validation_set_is_the_end_of_the_training_set() -> None:
    whole = read_mnist(validation=0)
    assert len(whole.train[0]) == 60_000
    assert len(whole.validation[0]) == 0
    parted = read_mnist(validation=10_000)
    assert torch.equal(parted.validation[0], whole.train[0][50_000:])
    assert torch.equal(parted.train[1], whole.train[1][:50_000])
    for wrong in (-1, 60_000):
        with pytest.raises(ValueError, match="`validation`"):
            read_mnist(validation=wrong)


@real_mnist
def test_the_small_form_is_drawn_by_the_seed() -> None:
    first, second, other = (read_mnist(size="small", seed=seed) for seed in (0, 0, 1))
    assert [len(part[0]) for part in (first.train, first.validation, first.test)] == [
        2000,
        500,
        1000,
    ]
    assert torch.equal(first.train[0], second.train[0])
    assert not torch.equal(first.test[0], other.test[0])


@real_mnist
def test_the_papers_problems_load() -> None:
    autoencoder = load_autoencoder()
    assert autoencoder.train[0] is autoencoder.train[1]
    model = autoencoder.make_model(seed=0)
    assert model(autoencoder.test[0][:2]).shape == (2, 784)
    sizes = [layer.out_features for layer in model if isinstance(layer, torch.nn.Linear)]
    assert sizes == [1000, 500, 250, 30, 250, 500, 1000, 784]
    classifier = load_classifier(validation=0)
    assert classifier.validation is None
    model = classifier.make_model(seed=0)
    sizes = [layer.out_features for layer in model if isinstance(layer, torch.nn.Linear)]
    assert sizes == [500, 500, 2000, 10]
    # Chance level before any training.
    wrong = classifier.metric.per_sample(model(classifier.test[0]), classifier.test[1]).mean()
    assert 0.7 < wrong < 1


@real_mnist
def test_pretraining_reports_each_epoch_and_helps_a_linear_readout() -> None:
    """Hidden features of pretrained weights tell digits apart better than random ones do."""
    problem = load_pretrained_classifier(size="small")
    epochs: list[str] = []
    pretrained = problem.make_model(seed=0, report=lambda epoch: epochs.append(str(epoch)))
    assert len(epochs) == 2 * 5
    errors = []
    for model in (pretrained, problem.make_model(seed=0, initialization="sparse")):
        with torch.no_grad():
            hidden = model[:-1](problem.train[0]).double()
            hidden = torch.cat([hidden, torch.ones(len(hidden), 1, dtype=torch.float64)], 1)
            classes = torch.nn.functional.one_hot(problem.train[1], 10).double()
            ridge = hidden.T @ hidden + torch.eye(hidden.shape[1])
            readout = torch.linalg.solve(ridge, hidden.T @ classes)
            tested = model[:-1](problem.test[0]).double()
            outputs = tested @ readout[:-1] + readout[-1]
        errors.append(problem.metric.per_sample(outputs, problem.test[1]).mean().item())
    assert errors[0] < 0.75 * errors[1]
