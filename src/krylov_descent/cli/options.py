"""What the commands have in common: their options, and values as a person writes them."""

import ast
import json
from pathlib import Path
from typing import Annotated, Any

import typer

# Headings under which --help shows the options.
WHAT, STOP, WHERE = "What to train", "When to stop", "Where and how"
CHECKPOINT_SECONDS = 30.0

Problem = Annotated[
    str, typer.Argument(metavar="PROBLEM", help="`ksd problems` lists them.", show_default=False)
]
ProblemToTrain = Annotated[
    str | None,
    typer.Argument(
        metavar="PROBLEM",
        help="`ksd problems` lists them. Left out with --resume.",
        show_default=False,
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="`ksd optimizers` lists them; or the path of a torch optimiser.",
        rich_help_panel=WHAT,
    ),
]
Optimizers = Annotated[
    str, typer.Option(metavar="NAMES", help="With commas between them.", rich_help_panel=WHAT)
]
OptimizerOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="An option of the optimiser, as `ksd optimizers NAME` lists them; repeatable.",
        rich_help_panel=WHAT,
    ),
]
ProblemOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--problem-set",
        metavar="KEY=VALUE",
        help="An option of the problem, as `ksd problems NAME` lists them; repeatable.",
        rich_help_panel=WHAT,
    ),
]
Small = Annotated[
    bool,
    typer.Option("--small", help="The problem's small form, for a laptop.", rich_help_panel=WHAT),
]
Initialization = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Starting weights, such as sparse, glorot, torch; by default the problem's own.",
        rich_help_panel=WHAT,
    ),
]
Seed = Annotated[
    int,
    typer.Option(metavar="NUMBER", help="Of starting weights and optimiser.", rich_help_panel=WHAT),
]
Seeds = Annotated[
    int,
    typer.Option(
        metavar="NUMBER",
        min=1,
        help="Runs of each optimiser, from --seed upwards.",
        rich_help_panel=WHAT,
    ),
]
Iterations = Annotated[
    int | None,
    typer.Option(metavar="NUMBER", min=1, help="After so many steps.", rich_help_panel=STOP),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER", min=0, help="After so much time in training.", rich_help_panel=STOP
    ),
]
SecondsEach = Annotated[
    float,
    typer.Option(metavar="NUMBER", min=0, help="Time in training for each.", rich_help_panel=STOP),
]
Passes = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER", min=0, help="After so many passes over the data.", rich_help_panel=STOP
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        min=0,
        help="When the validation error is below this; 0.001 is 0.1%.",
        rich_help_panel=STOP,
    ),
]
NoEarlyStop = Annotated[
    bool,
    typer.Option(
        "--no-early-stop",
        help="Go on when the last quarter of the work took less than 1% off the validation error.",
        rich_help_panel=STOP,
    ),
]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …", rich_help_panel=WHERE)
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="float32 or float64; the problem's own if left out.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
ReportTarget = Annotated[
    float | None,
    typer.Option(
        "--target",
        metavar="NUMBER",
        min=0,
        help="Test error that the page counts the time to; 0.001 is 0.1%.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FOLDER",
        help="With the data files; `ksd data list` shows the default.",
        rich_help_panel=WHERE,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",  # typer 0.27 would call it --FOLDER, by its metavar
        metavar="FOLDER",
        help="For what is written; by default in runs/.",
        rich_help_panel=WHERE,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Go on with the run in this folder, exactly; limits may be given anew.",
        rich_help_panel=WHERE,
    ),
]
CheckpointSeconds = Annotated[
    float,
    typer.Option(metavar="NUMBER", min=0, help="Time between checkpoints.", rich_help_panel=WHERE),
]
TensorBoard = Annotated[
    bool,
    typer.Option("--tensorboard", help="Write TensorBoard events too.", rich_help_panel=WHERE),
]

Exhibit = Annotated[
    str,
    typer.Argument(
        metavar="EXHIBIT", help="table2, figure1, figure2 or sequences.", show_default=False
    ),
]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="PROBLEMS", help="Only these, with commas between them.", rich_help_panel=WHAT
    ),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Small forms, 20 seconds each, to try it.", rich_help_panel=WHAT),
]
Show = Annotated[
    bool,
    typer.Option(
        "--show",
        help="Run nothing: show what is there, and bring the collected files up to date.",
        rich_help_panel=WHAT,
    ),
]
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders that hold some.")
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="The folder of a run on speech, finished or not.", show_default=False
    ),
]
OneName = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Show the options of this one.", show_default=False),
]
Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILES...", help="Files, or folders such as mnist; else all.", show_default=False
    ),
]


def pairs(words: list[str] | None) -> dict[str, Any]:
    """KEY=VALUE words as a dict; a value is a Python literal that JSON has too, else a string."""
    found: dict[str, Any] = {}
    for word in words or []:
        key, equals, text = word.partition("=")
        if not (key and equals):
            raise typer.BadParameter(f"{word!r} must be KEY=VALUE")
        try:
            value = ast.literal_eval(text)
            json.dumps(value)
        except (ValueError, SyntaxError, TypeError):
            value = text
        found[key.strip().replace("-", "_")] = value
    return found
