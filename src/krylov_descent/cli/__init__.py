"""The command `ksd`: train, compare, reproduce and report on the paper's problems.

Errors that a person can do something about end with one sentence and exit code 1, wrong usage
with 2, an interrupted run with 130.
"""

import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

try:
    import typer

    from krylov_descent import __version__
    from krylov_descent.cli import commands
    from krylov_descent.cli.speaking import complaints, say, speak_to_any_terminal
except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.startswith("krylov_descent"):
        raise
    sys.exit(f'ksd: {missing.name} is not installed: pip install "krylov-descent[lab]"')

# Of torchrun: it starts several processes.
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
# Each command with the lines that its --help ends with.
COMMANDS: dict[Callable[..., None], tuple[str, ...]] = {
    commands.train: (
        "ksd train curves --small --seconds 60",
        "ksd train curves --optimizer hf --device cuda --folder runs/hf",
        "ksd train curves --set dimension=80 --problem-set code_size=6",
        "ksd train curves --optimizer torch.optim.RMSprop --set lr=1e-3",
        "ksd train --resume runs/hf --seconds 600",
        "torchrun --nproc-per-node 4 -m krylov_descent train curves --device cuda",
    ),
    commands.compare: (
        "ksd compare curves --small --seconds 15",
        "ksd compare poisson-2d-small --optimizers ksd,lbfgs,adam --seeds 3 --target 0.001",
        "ksd compare mnist-autoencoder --optimizers ksd,hf --device cuda",
    ),
    commands.reproduce: (
        "ksd reproduce table2 --quick",
        "ksd reproduce table2 --rows curves,mnist-autoencoder --device cuda",
        "ksd reproduce figure2 --device cuda",
    ),
    commands.report: (
        "ksd report runs/compare-curves-0",
        "ksd report runs/ksd runs/hf -o page.html",
    ),
    commands.words: ("ksd words runs/speech-ksd-0 --device cuda",),
    commands.problems: ("ksd problems", "ksd problems curves"),
    commands.optimizers: ("ksd optimizers", "ksd optimizers ksd", "ksd optimizers torch.optim.SGD"),
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
    commands.data_app, name="data", help="The data files: where they are, whether they are whole."
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
    speak_to_any_terminal()
    try:
        if UNDER_TORCHRUN in os.environ and words[:1] not in (["train"], ["--help"]):
            raise ValueError(
                f"torchrun is for `train`: start `ksd {' '.join(words[:1])}` by itself"
            )
        app(arguments, prog_name="ksd")
    except Exception as problem:
        sentence = _sentence(problem)
        if sentence is None:
            raise
        complaints.print(
            f"ksd: {sentence}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(1)


def _sentence(problem: Exception) -> str | None:
    """What a person can do about an error; None for an error of the program."""
    if isinstance(problem, ModuleNotFoundError):
        if (problem.name or "").startswith("krylov_descent"):
            return None
        return f'{problem.name} is not installed: pip install "krylov-descent[lab]"'
    # These are errors of the system, unknown names and values out of range.
    if isinstance(problem, OSError | ValueError):
        return str(problem)
    # What is raised by these modules is raised after they were loaded.
    from krylov_descent.cli.failures import EXPECTED

    return str(problem) if isinstance(problem, EXPECTED) else None
