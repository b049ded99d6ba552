"""On made-up images; on the real ones where KRYLOV_DESCENT_DATA names their folder."""

import hashlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from torch import nn

from krylov_descent import KSD
from krylov_descent.laboratory import sources
from krylov_descent.laboratory.problems import load_problem
from krylov_descent.laboratory.problems.faces import FILE, cut_patches, load_faces, read_faces
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.sources import FOLDER_VARIABLE, DataError, data_folder

real_faces = pytest.mark.skipif(
    not os.environ.get(FOLDER_VARIABLE) or not (data_folder() / FILE).exists(),
    reason=f"needs the real faces: set {FOLDER_VARIABLE} to the folder that holds olivetti/",
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """400 smooth images, some of them darker than others."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[:64, :64] / 64
    waves = generator.uniform(2, 9, (400, 2)) @ np.stack([rows, columns]).reshape(2, -1)
    faces = (generator.uniform(60, 120, (400, 1)) * (1 + np.sin(waves))).astype(np.uint8)
    path = tmp_path / FILE
    path.parent.mkdir()
    scipy.io.savemat(path, {"faces": faces.T})
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    known = replace(sources.SOURCES[FILE], sha256=sha256)
    monkeypatch.setitem(sources.SOURCES, FILE, known)
    return tmp_path


def sizes(problem: Problem) -> list[int]:
    held_out = problem.validation[0] if problem.validation else ()
    return [len(problem.train[0]), len(held_out), len(problem.test[0])]


def test_people_are_split_and_pixels_normalised(folder: Path) -> None:
    problem = load_problem("faces", folder=folder, patches=2)
    assert sizes(problem) == [500, 100, 200]
    images = problem.train[0].double()
    assert images.mean(0).abs().max() < 1e-5
    assert images.square().mean().item() == pytest.approx(1, abs=1e-5)
    assert problem.train[0] is problem.train[1]
    assert sizes(load_faces(folder=folder, patches=1, validation=0)) == [300, 0, 100]


def test_the_full_problem_is_the_published_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "krylov_descent.laboratory.problems.faces.PATCHES"
    monkeypatch.setattr(name, 20)  # 414 take a gigabyte
    problem = load_faces(folder=folder)
    layers = [m for m in problem.make_model() if isinstance(m, nn.Linear)]
    half = [2000, 1000, 500, 30]
    assert [m.out_features for m in layers] == [*half, 500, 1000, 2000, 625]
    assert problem.paper is not None
    assert problem.paper.curvature_samples == 20 * 250 // 20
    assert problem.paper.row("HF (unregularised)").train == 7.5


def test_a_patch_is_the_turned_and_enlarged_middle_of_its_image() -> None:
    """Against the image as a function: bilinear interpolation is exact where it is linear."""
    down, right = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    image = 3 * right + 0.5 * down
    patches = cut_patches(torch.stack([image, image]), 4, seed=1).view(2, 4, 25, 25)
    uniform = np.random.default_rng([1, 1]).random((4, 2))
    for patch, (u, v) in zip(patches[1], uniform, strict=True):
        angle, scale = math.radians(180 * u - 90), 1.4 + 0.4 * v
        for i, j in ((0, 0), (12, 12), (3, 24), (24, 7)):
            y, x = 2 * (i - 12) / scale, 2 * (j - 12) / scale
            across = 31.5 + math.cos(angle) * x - math.sin(angle) * y
            along = 31.5 + math.sin(angle) * x + math.cos(angle) * y
            assert patch[i, j].item() == pytest.approx(3 * across + 0.5 * along, abs=1e-3)
    assert not torch.equal(patches[0], patches[1])


def test_the_seed_decides_and_more_patches_begin_with_the_same() -> None:
    images = torch.rand(3, 64, 64)
    many = cut_patches(images, 5, seed=0).view(3, 5, 625)
    torch.testing.assert_close(cut_patches(images, 2, seed=0).view(3, 2, 625), many[:, :2])
    assert not torch.equal(cut_patches(images, 5, seed=1).view(3, 5, 625), many)


def test_images_stand_upright(tmp_path: Path) -> None:
    columns = np.zeros((4096, 400), np.uint8)
    columns[:64, 10] = 200  # MATLAB's order: the first column of pixels
    scipy.io.savemat(tmp_path / "file.mat", {"faces": columns})
    images = read_faces(tmp_path / "file.mat")
    assert images.shape == (400, 64, 64)
    assert images[10, :, 0].eq(200).all()
    assert images[10, :, 1:].eq(0).all()


def test_ksd_lowers_the_small_form(folder: Path) -> None:
    problem = load_faces(folder=folder, size="small", patches=1)
    model = problem.make_model()
    before = problem.metric.per_sample(model(problem.train[0]), problem.train[1]).mean()
    loss = problem.criterion(model(problem.train[0]), problem.train[1]) / len(problem.train[0])
    torch.testing.assert_close(loss, before)
    optimizer = KSD(model, problem.criterion, weight_decay=problem.weight_decay)
    for _ in range(2):
        optimizer.step(problem.train)
    after = problem.metric.per_sample(model(problem.train[0]), problem.train[1]).mean()
    assert after < 0.5 * before
    assert problem.title == "FACES (re-created), small, 1 of an image"


@pytest.mark.parametrize("given", [{"validation": 30}, {"validation": -1}, {"patches": 0}])
def test_a_wrong_option_is_named(folder: Path, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        load_problem("faces", folder=folder, **given)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.mat"
    path.write_bytes(b"not a MATLAB file" * 100)
    with pytest.raises(DataError, match="cannot be read as a MATLAB file"):
        read_faces(path)
    scipy.io.savemat(path, {"faces": np.zeros((400, 4096))})
    with pytest.raises(DataError, match=r"must have shape \(4096, 400\), found shape \(400, 4096"):
        read_faces(path)


@real_faces
def test_principal_components_find_the_real_ones_as_hard_as_the_original() -> None:
    problem = load_faces(size="small")
    train, test = problem.train[0].double(), problem.test[0].double()
    vectors = torch.linalg.eigh(train.T @ train)[1][:, -30:]
    error = (test - test @ vectors @ vectors.T).square().sum(1).mean().item()
    assert error == pytest.approx(135, rel=0.05)  # said of the original; measured here: 135.2
