"""The harness: what it measures, writes, keeps and leaves for another call."""

import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as harness
from benchmarks import environment, timing
from benchmarks.parts import Part, Sections, Setting, place_of, result_folder
from benchmarks.records import read_all

CPU = torch.device("cpu")


class Sleepless:
    """A part of three sections that notes which were measured; "b" cannot be."""

    def __init__(self) -> None:
        self.measured: list[str] = []

    def measure(self, section: str, setting: Setting) -> dict[str, Any]:
        if section == "b":
            raise environment.UnavailableError(f"no such thing on {setting.device}")
        self.measured.append(section)
        return {"value": setting.repeats}

    def part(self, *, kept: bool = False, seconds: float = 0.0) -> Part:
        return Part(
            sections=lambda device: ["a", "b", "c"],
            measure=self.measure,
            tables={"": self.table},
            kept=kept,
            seconds=lambda section, device: seconds if section == "a" else 0.0,
        )

    @staticmethod
    def table(sections: Sections, device: torch.device) -> str:
        return f"{' and '.join(sections)} on {device}"


def setting(folder: Path) -> Setting:
    return Setting(device=CPU, repeats=2, folder=folder)


def test_the_environment_says_where_and_with_what() -> None:
    found = environment.describe(CPU)
    assert found["versions"]["torch"] == environment.version_of("torch")
    assert found["threads"] == torch.get_num_threads()
    assert found["device"] == found["cpu"] != ""
    assert found["commit"] is None or len(found["commit"].split("+")[0]) == 40
    json.dumps(found)


def test_a_caption_has_the_days_of_all_that_was_measured() -> None:
    one = environment.describe(CPU) | {"date": "2026-11-16T10:00:00+00:00"}
    assert environment.sentence(one, one).endswith(", 2026-11-16")
    others = [one | {"date": f"2026-11-{day}T09:00:00+00:00"} for day in (17, 15)]
    assert environment.sentence(one, *others).endswith(", 2026-11-15 to 2026-11-17")


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert environment.version_of("no-such-package") is None


def test_a_spread_is_the_median_with_the_extremes() -> None:
    found = timing.spread([3.0, 1.0, 2.0, 10.0])
    assert found == {"median": 2.5, "low": 1.0, "high": 10.0}
    assert timing.show(found) == "2.50 (1.00 to 10.00)"


def test_cores_are_counted_without_their_second_threads() -> None:
    assert 1 <= environment.physical_cores() <= (os.cpu_count() or 1)


def test_a_section_that_others_speak_against_is_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sleepless = Sleepless()
    part = replace(
        sleepless.part(kept=True, seconds=90.0), stale=lambda section, setting: section == "a"
    )
    for _ in range(2):
        harness.run("part", part, setting(tmp_path), seconds=100)
    assert sleepless.measured == ["a", "c", "a"]
    # How much there is to do is said first; "b" cannot be measured.
    assert "part: 2 sections to measure, about 2 min at most" in capsys.readouterr().out


def test_each_section_is_a_file_and_what_cannot_be_is_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.run("part", Sleepless().part(), setting(tmp_path), seconds=60)
    found = read_all(tmp_path)
    assert list(found) == ["a", "c"]
    assert found["a"]["value"] == 2
    assert found["c"]["environment"]["threads"] == torch.get_num_threads()
    printed = capsys.readouterr().out
    assert "part: b skipped: no such thing on cpu" in printed
    assert "a and c on cpu" in printed


def test_an_error_in_a_section_is_told_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(section: str, setting: Setting) -> dict[str, Any]:
        if section == "a":
            raise RuntimeError("out of luck")
        return {}

    part = replace(Sleepless().part(), measure=measure)
    assert harness.run("part", part, setting(tmp_path), seconds=60) == ["part: a"]
    assert list(read_all(tmp_path)) == ["b", "c"]
    assert "out of luck" in capsys.readouterr().err


def test_sections_that_are_kept_are_not_measured_again(tmp_path: Path) -> None:
    first, second, third = Sleepless(), Sleepless(), Sleepless()
    harness.run("part", first.part(kept=True), setting(tmp_path), only=["c"], seconds=60)
    assert first.measured == ["c"]
    harness.run("part", second.part(kept=True), setting(tmp_path), seconds=60)
    assert second.measured == ["a"]
    harness.run("part", third.part(), setting(tmp_path), seconds=60)
    assert third.measured == ["a", "c"]


def test_what_does_not_fit_the_time_is_left_for_another_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = Sleepless()
    harness.run("part", part.part(seconds=100), setting(tmp_path), seconds=50)
    assert part.measured == ["c"]
    assert "left for another call (--seconds 50 is over): a" in capsys.readouterr().out


def test_sections_are_chosen_by_how_they_begin() -> None:
    names = ["curves.ksd.seed-0", "curves.adam.seed-0", "mnist.ksd.seed-0"]
    assert harness.wanted(names, []) == names
    assert harness.wanted(names, ["curves"]) == names[:2]
    assert harness.wanted(names, ["*.ksd"]) == [names[0], names[2]]
    assert harness.wanted(names, ["other"]) == []


@pytest.mark.parametrize("part", ["all", "product"])
def test_a_name_that_no_section_has_is_refused(part: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--only: no section begins with nope.*autoencoder"):
        harness.main([part, "--only", "nope", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["nothing"], ["--repeats", "0"], ["--device", "tpu"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        harness.main(arguments)
    assert refusal.value.code == 2


def test_each_kind_of_hardware_has_folders_and_tables_of_its_own() -> None:
    assert place_of(CPU) == platform.machine().lower()
    assert result_folder("product", place_of(torch.device("cuda"))) == "product-cuda"
