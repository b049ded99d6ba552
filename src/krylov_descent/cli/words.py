"""What a network trained on speech makes of whole words."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import nn

from krylov_descent.cli.speaking import console, say
from krylov_descent.laboratory.checkpoint import load_checkpoint
from krylov_descent.laboratory.devices import find_device, precision_of
from krylov_descent.laboratory.problems import load_problem, speech
from krylov_descent.laboratory.record import RunFolder, RunFolderError
from krylov_descent.laboratory.runs import settings_in
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.sources import inventory
from krylov_descent.laboratory.speech.alignment_figure import clean_examples, draw_alignments
from krylov_descent.laboratory.speech.archives import read_digits
from krylov_descent.laboratory.speech.corpus import load_corpus
from krylov_descent.laboratory.speech.tandem import COMPONENTS
from krylov_descent.laboratory.speech.words import ConditionErrors, word_errors

# The small form has too few frames for more Gaussians a state.
SMALL_COMPONENTS = 2
RECORDINGS = "audiomnist8k"


def recognise(run: Path, device: str, data: Path | None) -> None:
    """Recognise the test set's words and write what was found into the run's folder.

    Args:
        run: the folder of a run on speech.
        device: of the network.
        data: the data folder.
    """
    folder = RunFolder(run)
    settings = settings_in(folder)
    if settings.problem != speech.NAME:
        raise RunFolderError(
            f"{run} is a run on {settings.problem!r}: words are recognised with runs on "
            f"{speech.NAME!r}"
        )
    folder.check_writable()
    model = _best_network(folder, settings, find_device(device), data)
    options = settings.problem_options
    small = options.get("size") == "small"
    corpus = load_corpus(data, seed=options.get("seed", 0), small=small)
    errors = word_errors(
        model,
        corpus,
        components=SMALL_COMPONENTS if small else COMPONENTS,
        on_stage=say,
    )
    _show(folder, errors)
    path = folder.path / "words.json"
    path.write_text(json.dumps(_as_json(folder, errors), indent=2) + "\n")
    say(f"Numbers: {path}")
    # The corpus on disk does without the recordings, and a picture is not worth fetching them.
    if all(status.present for status in inventory(data, names=[RECORDINGS])):
        picture = folder.path / "alignment.png"
        draw_alignments(clean_examples(corpus.test, read_digits(data)), picture)
        say(f"Alignment of the labels: {picture}")


def _best_network(
    folder: RunFolder, settings: RunSettings, device: torch.device, data: Path | None
) -> nn.Module:
    """The network of the lowest validation error, or the last one where nothing validates."""
    if not folder.checkpoint.exists():
        raise RunFolderError(
            f"{folder.path} has no checkpoint yet: train it further, then ask again"
        )
    state = load_checkpoint(folder.checkpoint, device)
    problem = load_problem(settings.problem, folder=data, **settings.problem_options)
    model = problem.make_model(0, "torch", device, precision_of(settings))
    model.load_state_dict(state["best"].get("model", state["model"]))
    return model


def _as_json(folder: RunFolder, errors: list[ConditionErrors]) -> dict[str, Any]:
    """JSON has no infinity: the ratio of clean speech is null."""
    return {
        "optimizer": folder.config()["optimizer"]["title"],
        "conditions": [
            vars(row) | {"snr": None if math.isinf(row.snr) else row.snr} for row in errors
        ],
    }


def _show(folder: RunFolder, errors: list[ConditionErrors]) -> None:
    title = folder.config()["optimizer"]["title"]
    table = Table(title=f"Spoken digits, network trained by {title}", box=box.SIMPLE_HEAD)
    table.add_column("noise")
    for heading in ("frame error", "words: hybrid", "Tandem", "MFCC alone"):
        table.add_column(heading, justify="right")
    for row in errors:
        shares = (row.frame, row.hybrid, row.tandem, row.mfcc)
        level = "clean" if math.isinf(row.snr) else f"{row.snr:g} dB"
        table.add_row(level, *(f"{100 * share:.2f}%" for share in shares))
    console.print(table)
