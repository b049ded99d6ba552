"""The command `ksd`: train, compare, reproduce and report on the paper's problems.

Errors that a person can do something about end with one sentence and exit code 1, wrong usage
with 2, an interrupted run with 130.
"""

import inspect
import signal
import sys
from collections.abc import Callable
from typing import Annotated

try:
    import torch
    import typer

    from krylov_descent import __version__
    from krylov_descent.cli import exhibits, listing, reporting, training, words
    from krylov_descent.cli.running import complaints, say
    from krylov_descent.laboratory.checkpoint import CheckpointError
    from krylov_descent.laboratory.record import RunFolderError
    from krylov_descent.laboratory.sources import DataError
    from krylov_descent.runtime.ranks import CommunicationError, RankError
    from krylov_descent.runtime.torchrun import under_torchrun
except KeyboardInterrupt:  # they take seconds, in which a person may think again
    sys.exit(128 + signal.SIGINT)
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.startswith("krylov_descent"):
        raise
    sys.exit(f'ksd: {missing.name} is not installed: pip install "krylov-descent[lab]"')

EXPECTED = (
    CheckpointError,
    CommunicationError,
    RankError,
    DataError,
    RunFolderError,
    ValueError,  # unknown names and values out of range
    OSError,
    torch.OutOfMemoryError,
)
# Each command with the lines that its --help ends with.
COMMANDS: dict[Callable[..., None], tuple[str, ...]] = {
    training.train: (
        "ksd train curves --small --seconds 60",
        "ksd train curves --optimizer hf --device cuda --folder runs/hf",
        "ksd train curves --set dimension=80 --problem-set code_size=6",
        "ksd train curves --optimizer torch.optim.RMSprop --set lr=1e-3",
        "ksd train --resume runs/hf --seconds 600",
        "torchrun --nproc-per-node 4 -m krylov_descent train curves --device cuda",
    ),
    training.compare: (
        "ksd compare curves --small --seconds 15",
        "ksd compare poisson-2d-small --optimizers ksd,lbfgs,adam --seeds 3 --target 0.001",
        "ksd compare mnist-autoencoder --optimizers ksd,hf --device cuda",
    ),
    exhibits.reproduce: (
        "ksd reproduce table2 --quick",
        "ksd reproduce table2 --rows curves,mnist-autoencoder --device cuda",
        "ksd reproduce figure2 --device cuda",
    ),
    reporting.report: (
        "ksd report runs/compare-curves-0",
        "ksd report runs/ksd runs/hf -o page.html",
    ),
    words.words: ("ksd words runs/speech-ksd-0 --device cuda",),
    listing.problems: ("ksd problems", "ksd problems curves"),
    listing.optimizers: ("ksd optimizers", "ksd optimizers ksd", "ksd optimizers torch.optim.SGD"),
}


def _examples(lines: tuple[str, ...]) -> str:
    return "\n".join(["Examples:", *(f"$ {line}" for line in lines)])


def _unwrapped(text: str | None) -> str:
    """A docstring with each paragraph on one line, for the terminal to wrap."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog=_examples(("ksd compare curves --small", "ksd train --help")),
)
for command, lines in COMMANDS.items():
    app.command(help=_unwrapped(command.__doc__), epilog=_examples(lines))(command)
app.add_typer(
    listing.data_app, name="data", help="The data files: where they are, whether they are whole."
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        say(f"ksd {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Show the version.", callback=_tell_version, is_eager=True),
]


@app.callback()
def describe(version: Version = False) -> None:
    """Second-order training on the paper's problems: KSD beside Hessian-Free, L-BFGS and Adam."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command; what a person can mend is told in one sentence.

    Args:
        arguments: the words after `ksd`; those of the process by default.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if under_torchrun() and words[:1] not in (["train"], ["--help"]):
            raise ValueError(
                f"torchrun is for `train`: start `ksd {' '.join(words[:1])}` by itself"
            )
        app(arguments, prog_name="ksd")
    except EXPECTED as problem:
        complaints.print(
            f"ksd: {problem}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(1)
