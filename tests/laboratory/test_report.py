"""The report without a browser: structure, numbers, states. How it draws is tested in Chromium."""

import math
from io import BytesIO
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from krylov_descent.laboratory.contenders import CONTENDERS
from krylov_descent.laboratory.record import RunFolder, RunFolderError
from krylov_descent.laboratory.report import Reconstructions, write_report
from krylov_descent.laboratory.report.charts import MOST_POINTS
from krylov_descent.laboratory.report.marks import COLOURS, DASHES, KNOWN, curve_styles
from krylov_descent.laboratory.report.numbers import duration, error, given, plain
from krylov_descent.laboratory.report.pictures import png
from krylov_descent.laboratory.yardsticks import YARDSTICKS
from tests.laboratory.example_runs import (
    AUTOENCODER,
    CLASSIFIER,
    config,
    curve_images,
    rows,
    write_comparison,
    write_run,
)
from tests.laboratory.report_page import report


def test_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    page = report(write_comparison(tmp_path), tmp_path)
    assert page.open == [""]
    assert page.elements["h1"] == page.elements["main"] == page.elements["nav"] == 1
    ids = [attributes["id"] for _, attributes in page.attributes if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for tag, attributes in page.attributes if tag == "a"]
    assert len(links) >= 6
    assert {str(link).removeprefix("#") for link in links} <= set(ids)
    for _, attributes in page.attributes:
        for key in ("src", "href"):
            assert str(attributes.get(key) or "#").startswith(("#", "data:"))
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", "").replace(
        "http-equiv", ""
    )


def test_results_come_sorted_and_published_numbers_in_a_table_of_their_own(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "hf", config("hf", "HF"), rows("hf", steps=20, seconds=20.0)),
        write_run(tmp_path / "ksd", config(), rows(steps=40, seconds=5.0, floor=0.05)),
        RunFolder(tmp_path / "gone"),
    ]
    page = report(folders, tmp_path)
    metrics = folders[1].rows()
    best = min(metrics, key=lambda row: float(row["validation"]))
    names = [row[0] for row in page.rows]
    assert names.index("KSD") < names.index("HF") < names.index("gone")
    cells = page.row("KSD")
    assert cells[1:4] == [plain(best[split]) for split in ("train", "validation", "test")]
    assert cells[4:7] == [plain(metrics[-1][split]) for split in ("train", "validation", "test")]
    assert cells[8:] == ["5.0 s", "40", "168", "the validation error has stopped falling"]
    known = [row for row in page.rows if row[-1] == "A paper 2011, Table 2"]
    assert known[0] == ["KSD", "0.17", "–", "0.25", "0.2", "A paper 2011, Table 2"]
    assert [row[0] for row in known] == ["KSD", "HF"]


def test_one_run_alone(tmp_path: Path) -> None:
    page = report([write_run(tmp_path / "ksd")], tmp_path)
    assert "KSD has a test error of" in page.text
    assert "follows with" not in page.text
    assert len(page.data[0]["methods"]) == 1
    assert page.data[0]["target"]["value"] is None


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    metrics = rows(steps=30)
    for row in metrics[12:]:
        row |= {"train": math.nan, "validation": math.inf, "test": math.nan, "ritz_values": []}
    metrics[5]["ritz_values"][3] = math.nan
    page = report([write_run(tmp_path / "adam", config("adam", "Adam"), metrics)], tmp_path)
    cells = page.row("Adam")
    assert cells[1:4] == [plain(metrics[11][split]) for split in ("train", "validation", "test")]
    assert cells[4:7] == 3 * ["not finite"]
    assert "Adam: its error is not finite at iteration 12." in page.text
    curve = page.data[0]["methods"][0]["runs"][0]
    assert curve["best"] == 11
    assert curve["train"][12:] == 19 * [None]
    assert len(page.data[0]["methods"][0]["ritz"]["values"][4]) == 20


def test_no_validation_set(tmp_path: Path) -> None:
    metrics = [row | {"validation": None} for row in rows(steps=30)]
    page = report([write_run(tmp_path / "ksd", metrics=metrics)], tmp_path)
    assert page.row("KSD")[1:4] == [plain(metrics[-1]["train"]), "–", plain(metrics[-1]["test"])]
    assert page.data[0]["splits"] == ["train", "test"]


def test_classification_is_in_per_cent(tmp_path: Path) -> None:
    metrics = rows(steps=25, first=0.9, floor=0.01)
    page = report([write_run(tmp_path / "c", config(problem=CLASSIFIER), metrics)], tmp_path)
    assert page.row("KSD")[6] == f"{100 * metrics[-1]['test']:.2f}%"
    assert [row[3] for row in page.rows if row[-1] == "A paper"] == ["1.70%"]
    curve = page.data[0]["methods"][0]["runs"][0]["test"]
    assert curve == pytest.approx([100 * row["test"] for row in metrics], rel=1e-4)
    assert page.data[0]["published"][0]["test"] == 1.7


def test_problems_are_kept_apart(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "c", config(problem=CLASSIFIER), rows(first=0.9, floor=0.01)),
        write_run(tmp_path / "six", config(problem={**AUTOENCODER, "options": {"code_size": 6}})),
        RunFolder(tmp_path / "gone"),
    ]
    page = report(folders, tmp_path)
    assert [len(data["methods"]) for data in page.data] == [1, 1, 1, 0]
    # The two of one title are told apart by their options.
    assert page.headings == [
        "2 problems in 3 forms",
        "Overview",
        "CURVES (re-created): code_size=5",
        "MNIST classification",
        "CURVES (re-created): code_size=6",
        "Missing runs",
    ]
    assert page.row("gone")[-1].startswith("missing")
    overview = [page.row(heading)[1:] for heading in page.headings[2:]]
    best = min(folders[1].rows(), key=lambda row: float(row["validation"]))
    assert overview[1] == ["1", f"KSD {error(best['test'], '%')}"]
    assert overview[3] == ["1", "1 of them not finished"]
    # A link leads into the section, which is folded where there are many.
    links = {str(a["href"])[1:] for tag, a in page.attributes if tag == "a"}
    assert {f"problem-{number}" for number in range(1, 5)} <= links
    sections = [a for tag, a in page.attributes if (tag, a.get("class")) == ("details", "fold")]
    assert [("open" in section) for section in sections] == 4 * [False]
    assert "open" in report(folders[:2], tmp_path).text.partition('<details class="fold"')[2][:6]


def test_namesakes_are_told_apart(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "k20", config(dimension=20)),
        write_run(tmp_path / "k80", config(dimension=80)),
        write_run(tmp_path / "again", config(dimension=80)),
    ]
    labels = [method["label"] for method in report(folders, tmp_path).data[0]["methods"]]
    assert labels == [
        "KSD (dimension 20)",
        "KSD (dimension 80) in k80",
        "KSD (dimension 80) in again",
    ]


def test_odd_names_are_escaped(tmp_path: Path) -> None:
    odd = "</script><script>alert(1)</script> & \"quotes\" 'n' é"
    problem = {**AUTOENCODER, "title": odd, "metric": {"name": odd, "unit": ""}}
    problem["published"] = [{"method": odd, "source": odd, "train": 1.0, "test": 2.0}]
    configuration = config("odd", odd, problem=problem)
    configuration["optimizer"]["options"] = {odd: odd}
    configuration["command"] = f"ksd train --set {odd}"
    page = report([write_run(tmp_path / "odd", configuration)], tmp_path)
    assert page.open == [""]
    assert page.elements["script"] == 2
    assert page.data[0]["metric"] == page.data[0]["methods"][0]["label"] == odd
    assert "<script>alert" not in page.text


def test_long_runs_are_thinned_and_keep_ends_and_best(tmp_path: Path) -> None:
    metrics = rows("adam", steps=5_000)
    metrics[1_234]["validation"] = 1e-3
    page = report([write_run(tmp_path / "adam", config("adam", "Adam"), metrics)], tmp_path)
    curve = page.data[0]["methods"][0]["runs"][0]
    assert len(curve["train"]) <= MOST_POINTS + 1
    assert (curve["iteration"][0], curve["iteration"][-1]) == (0, 5_000)
    assert curve["iteration"][curve["best"]] == 1_234
    assert curve["iteration"] == sorted(curve["iteration"])


def test_time_by_phase(tmp_path: Path) -> None:
    page = report([write_run(tmp_path / "ksd", metrics=rows(seconds=10.0))], tmp_path)
    assert "gradient 1.2 s (12%), basis 4.3 s (43%), search 4.1 s (41%), " in page.text
    assert "between phases 0.40 s (4%)" in page.text
    assert "27 evaluations, 21 products, 4.20 passes over the data" in page.text


def test_one_of_a_thing_is_singular(tmp_path: Path) -> None:
    metrics = rows("adam", steps=30)
    for row in metrics:
        row |= {"passes": float(row["iteration"]), "evaluations": 1, "products": 1}
    page = report([write_run(tmp_path / "adam", config("adam", "Adam"), metrics)], tmp_path)
    assert "1 evaluation, 1 product, 1 pass over the data." in page.text


def test_settings_have_every_key_of_the_configuration(tmp_path: Path) -> None:
    first = config(dimension=20) | {
        "commit": "abc",
        "hardware": {"cpu": {"cores": 4}},
        "tune": None,
    }
    folders = [
        write_run(tmp_path / "a", first),
        write_run(tmp_path / "a-seed-1", first | {"seed": 1}),
        write_run(tmp_path / "b", config("hf", "HF", damping=[45.0, 1], seed=3)),
    ]
    page = report(folders, tmp_path)
    for key, *values in (
        ("versions: torch", "2.13.0", "2.13.0"),
        ("optimizer: options: dimension", "20", "–"),
        ("optimizer: options: damping", "–", "[45.0, 1]"),
        ("hardware: cpu: cores", "4", "–"),
        ("commit", "abc", "–"),
        ("tune", "none", "–"),
        ("seed", "0, 1", "3"),
    ):
        assert page.row(key)[1:] == values, key


def test_reconstructions_are_in_the_page(tmp_path: Path) -> None:
    folders = write_comparison(tmp_path)
    inputs = curve_images()
    images = {
        folders[0].path: Reconstructions(inputs, inputs),
        folders[2].path: Reconstructions(inputs, inputs + 0.1),
    }
    page = report(folders, tmp_path, pictures=images)
    sources = [str(a["src"]) for tag, a in page.attributes if tag == "img"]
    assert len(sources) == 3  # the inputs once
    assert sources[0] == sources[1] != sources[2]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "squared error 7.84" in page.text  # 784 · 0.1²


def test_an_optimiser_has_one_colour_and_its_settings_a_dash_each() -> None:
    styles = curve_styles(["adam", "ksd", "ksd", "odd.Name", "hf"])
    assert styles[1].split() == [styles[2].split()[0], "dash-0"]
    assert styles[2].endswith("dash-1")
    assert curve_styles(["hf"]) == styles[4:]  # whoever else is there
    assert curve_styles(["odd.Name"])[0].split()[0] == styles[3].split()[0]
    assert len({style.split()[0] for style in curve_styles(KNOWN)}) == len(KNOWN) == COLOURS
    assert set(KNOWN) <= {*CONTENDERS, *YARDSTICKS}
    sheet = (
        Path(__file__).parents[2] / "src/krylov_descent/laboratory/report/page.css"
    ).read_text()
    assert all(f".colour-{index} {{" in sheet for index in range(COLOURS))
    assert all(f".dash-{index} {{" in sheet for index in range(1, DASHES))


def test_png_is_read_back_by_another_decoder() -> None:
    grey = torch.arange(28 * 60).view(28, 60) % 256
    decoded = matplotlib.image.imread(BytesIO(png(grey)), format="png")
    assert np.array_equal(np.round(decoded * 255), grey.numpy())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (plain(0.17), "0.170"),
        (plain(120), "120"),
        (plain(1309.7), "1,310"),
        (plain(2.5e-7), "2.50e-07"),
        (plain(None), "–"),
        (error(0.0170, "%"), "1.70%"),
        (error(math.nan, "%"), "not finite"),
        (given(0.25, ""), "0.25"),
        (duration(0.434), "0.43 s"),
        (duration(13.42), "13.4 s"),
        (duration(125), "2 min 05 s"),
        (duration(4321), "1 h 12 min"),
    ],
)
def test_numbers_as_text(text: str, expected: str) -> None:
    assert text == expected


def test_bad_input_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "ksd")
    with pytest.raises(ValueError, match="`folders` is empty"):
        write_report([], tmp_path / "r.html")
    pictures = Reconstructions(curve_images(2), curve_images(2))
    with pytest.raises(ValueError, match="`pictures` has some of elsewhere"):
        write_report([folder], tmp_path / "r.html", pictures={Path("elsewhere"): pictures})
    with pytest.raises(ValueError, match="`outputs` must have the shape of `inputs`"):
        Reconstructions(curve_images(2), curve_images(3))
    with pytest.raises(ValueError, match="square images"):
        Reconstructions(torch.zeros(2, 10), torch.zeros(2, 10))
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_report([folder], folder.path / "config.json" / "r.html")
