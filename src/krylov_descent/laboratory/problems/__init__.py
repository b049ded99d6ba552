"""The problems by name: `load_problem("curves")`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from krylov_descent.laboratory.choices import check_seed, unknown_name
from krylov_descent.laboratory.physics.equations import EQUATIONS
from krylov_descent.laboratory.problems import (
    curves,
    equations,
    faces,
    mnist,
    sequences,
    speech,
    starcraft,
)
from krylov_descent.laboratory.problems.problem import PaperSettings, Problem, Size
from krylov_descent.laboratory.signatures import Option, check_kinds, options_of

__all__ = ["PROBLEMS", "Problem", "ProblemEntry", "load_problem"]


@dataclass(frozen=True)
class ProblemEntry:
    """What is known of a problem before its data are loaded.

    `manual` has the docstring that describes the options of `load`; `dtype` is the precision of
    its networks unless another one is asked for; `paper_dimension` is the paper's K for it, None
    where the paper did not train it.
    """

    name: str
    title: str
    summary: str
    load: Callable[..., Problem]
    manual: Callable[..., object]
    dtype: str = "float32"
    paper_dimension: int | None = None

    @property
    def options(self) -> list[Option]:
        """What can be set; the folder is found elsewhere."""
        return [o for o in options_of(self.load, self.manual) if o.name != "folder"]


def _mnist_entry(name: str, load: Callable[..., Problem]) -> ProblemEntry:
    return ProblemEntry(
        name,
        mnist.TITLES[name],
        mnist.SUMMARIES[name],
        load,
        mnist.read_mnist,
        paper_dimension=PaperSettings.krylov_dimension,
    )


PROBLEMS: dict[str, ProblemEntry] = {
    entry.name: entry
    for entry in (
        ProblemEntry(
            curves.NAME,
            curves.TITLE,
            curves.SUMMARY,
            curves.load_curves,
            curves.load_curves,
            paper_dimension=curves.PAPER.krylov_dimension,
        ),
        _mnist_entry(mnist.AUTOENCODER, mnist.load_autoencoder),
        _mnist_entry(mnist.CLASSIFIER, mnist.load_classifier),
        _mnist_entry(mnist.PRETRAINED_CLASSIFIER, mnist.load_pretrained_classifier),
        ProblemEntry(faces.NAME, faces.TITLE, faces.SUMMARY, faces.load_faces, faces.load_faces),
        ProblemEntry(
            speech.NAME,
            speech.TITLE,
            speech.SUMMARY,
            speech.load_speech,
            speech.load_speech,
            paper_dimension=speech.PAPER.krylov_dimension,
        ),
        ProblemEntry(
            starcraft.NAME,
            starcraft.TITLE,
            starcraft.SUMMARY,
            starcraft.load_starcraft,
            starcraft.load_starcraft,
            paper_dimension=PaperSettings.krylov_dimension,
        ),
        *(
            ProblemEntry(
                name,
                task.title,
                task.summary,
                partial(sequences.load_sequences, name),
                sequences.load_sequences,
            )
            for name, task in sequences.TASKS.items()
        ),
        *(
            ProblemEntry(
                name,
                equation.title,
                equations.summary_of(equation),
                partial(equations.load_equation, name),
                equations.load_equation,
                dtype="float64",
            )
            for name, equation in EQUATIONS.items()
        ),
    )
}


def load_problem(
    name: str,
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    size: Size | None = None,
    **options: object,
) -> Problem:
    """A problem with its data in memory, on the CPU; in float32, and equations in float64.

    Args:
        name: one of `PROBLEMS`.
        folder: the data folder; else KRYLOV_DESCENT_DATA, else the user's cache.
        seed: of data that are drawn (the curves; the choice of the small forms), not of the
            starting weights, which `Problem.make_model` takes.
        size: "small" for a form that trains in seconds on a laptop.
        options: of the problem, as `PROBLEMS[name].options` lists them: `validation` for all,
            `train`, `test`, `code_size` and `original` for curves.

    Raises:
        UnknownNameError: no such problem or option; the nearest is suggested.
        ValueError: an option does not take such a value.
        DataError: the data cannot be had.
    """
    if name not in PROBLEMS:
        raise unknown_name("problem", name, PROBLEMS)
    if size not in (None, "small"):
        raise ValueError(f"`size` must be 'small' or left out, found {size!r}")
    entry = PROBLEMS[name]
    known = [option.name for option in entry.options]
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {name!r}", option, known)
    check_kinds({"seed": seed, **options}, entry.options)
    check_seed(seed)
    return entry.load(folder=folder, seed=seed, size=size, **options)
