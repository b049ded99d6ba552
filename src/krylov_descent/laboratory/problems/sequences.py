"""Long-range dependencies: eight tasks that a recurrent net solves only by remembering.

What matters stands early in a long sequence of noise and is asked for at its end. The sequences
are drawn by the program, see `sequence_tasks`, and anew for each step: on a plateau a net of 10,000
weights improves on 20,000 sequences that it sees again and again without learning the task.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.problems.problem import (
    Metric,
    PaperSettings,
    Problem,
    PublishedResult,
    Size,
    Split,
    Start,
)
from krylov_descent.laboratory.problems.sequence_answers import (
    BIT,
    NUMBER,
    PATTERN,
    SYMBOL,
    Question,
)
from krylov_descent.laboratory.problems.sequence_tasks import (
    Draw,
    draw_marked,
    draw_memorization,
    draw_random_permutation,
    draw_temporal_order,
)
from krylov_descent.laboratory.recurrent import Cell, initialize_recurrent, recurrent_network

# The part of wrong answers below which Martens & Sutskever call a task solved.
SOLVED = 0.001
SHORTEST = 10
TRAIN, VALIDATION, TEST = 20_000, 10_000, 10_000
SMALL_TRAIN, SMALL_VALIDATION, SMALL_TEST = 2_000, 1_000, 1_000
UNITS, SMALL_UNITS = 100, 30
SMALL_LENGTH = 20
# Martens & Sutskever have 2e-5. Here it is 0: answers have no noise to be guarded against, and
# while a net has not yet found what matters, the only thing that it can improve is to forget.
WEIGHT_DECAY = 0.0
CURVATURE_SAMPLES = 1_000
# Of random numbers.
TRAIN_STREAM, VALIDATION_STREAM, TEST_STREAM, FRESH_STREAM = range(4)
CLIPPED: Mapping[str, Any] = {"batch_size": 100, "clip_norm": 1.0}
# On the plateau at the beginning there is so little to be gained that a search on few sequences
# learns those by heart.
LARGE_SEARCH: Mapping[str, Any] = {"subset_size": (0.1, 0.5)}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of the tasks.

    Attributes:
        title: what tables call it.
        summary: one sentence.
        draw: the sequences.
        question: what is asked at their end.
        outputs: numbers of an answer; None for as many as the sequence has symbols.
        answers: how many answers a sequence asks for.
        length: T by default.
        train: sequences for a step by default.
        input_scale: of a tanh net's first weights: small enough not to drown what is remembered,
            large enough for the net to be nonlinear in what it sees.
        patterns: how many sequences there are, where they are few.
        published: at other lengths, for comparison.
    """

    title: str
    summary: str
    draw: Draw
    question: Question
    outputs: int | None
    answers: int = 1
    length: int = 100
    train: int = TRAIN
    input_scale: float = 0.1
    patterns: int | None = None
    published: tuple[PublishedResult, ...] = ()


def _nag(error: float) -> tuple[PublishedResult, ...]:
    return (PublishedResult(method="NAG, length 80", source="Sutskever et al. 2013", test=error),)


FIRST_HALF = ((0.0, 0.1), (0.1, 0.5))
MARKED_SCALE, BLANKS_SCALE = 0.25, 0.025
TASKS: dict[str, Task] = {
    "addition": Task(
        title="Addition",
        summary="Recurrent net: the sum of two marked numbers in a sequence of random ones.",
        draw=partial(draw_marked, ranges=FIRST_HALF, bits=False, answer=np.add),
        question=NUMBER,
        outputs=1,
        input_scale=MARKED_SCALE,
        published=_nag(2.5e-4),
    ),
    "multiplication": Task(
        title="Multiplication",
        summary="Recurrent net: the product of two marked numbers in a sequence of random ones.",
        draw=partial(draw_marked, ranges=FIRST_HALF, bits=False, answer=np.multiply),
        question=NUMBER,
        outputs=1,
        input_scale=MARKED_SCALE,
        published=_nag(1.3e-3),
    ),
    "xor": Task(
        title="Xor",
        summary="Recurrent net: the exclusive or of two marked bits in a sequence of random ones.",
        draw=partial(draw_marked, ranges=((0.0, 0.2), (0.3, 0.5)), bits=True, answer=np.not_equal),
        question=BIT,
        outputs=1,
        length=50,
        # The first thing to be found on its plateau is tiny; half as long, so twice as many.
        train=2 * TRAIN,
        input_scale=MARKED_SCALE,
    ),
    "temporal-order": Task(
        title="Temporal order",
        summary="Recurrent net: two symbols, X or Y each, that stood among noise, in their order.",
        draw=partial(draw_temporal_order, ranges=((0.0, 0.1), (0.4, 0.5))),
        question=SYMBOL,
        outputs=4,
    ),
    "temporal-order-3": Task(
        title="Temporal order, 3 symbols",
        summary="Recurrent net: three symbols, X or Y each, that stood among noise, in order.",
        draw=partial(draw_temporal_order, ranges=((0.0, 0.1), (0.3, 0.4), (0.5, 0.6))),
        question=SYMBOL,
        outputs=8,
    ),
    "random-permutation": Task(
        title="Random permutation",
        summary="Recurrent net: the first symbol again, after all others in random order.",
        draw=draw_random_permutation,
        question=SYMBOL,
        outputs=None,
    ),
    "memorization-5": Task(
        title="5-bit memorisation",
        summary="Recurrent net: five bits repeated after a long time of nothing.",
        draw=partial(draw_memorization, places=5, symbols=2),
        question=PATTERN,
        outputs=2,
        answers=5,
        input_scale=BLANKS_SCALE,
        patterns=2**5,
    ),
    "memorization-20": Task(
        title="20-bit memorisation",
        summary="Recurrent net: ten symbols out of five repeated after a long time of nothing.",
        draw=partial(draw_memorization, places=10, symbols=5),
        question=PATTERN,
        outputs=5,
        answers=10,
        input_scale=BLANKS_SCALE,
    ),
}


def load_sequences(
    name: str,
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    size: Size | None = None,
    length: int | None = None,
    cell: Cell = "rnn",
    units: int | None = None,
    train: int | None = None,
    validation: int | None = None,
    test: int | None = None,
) -> Problem:
    """One of the tasks, with its sequences.

    Args:
        name: one of `TASKS`.
        folder: not needed, nothing is read.
        seed: of the sequences drawn.
        size: "small" for short sequences, fewer of them, and a smaller net.
        length: T, the steps to remember over: 100 by default, 50 for xor, 20 when small.
        cell: "rnn" for a tanh net, "lstm" for an LSTM.
        units: of the hidden state: 100 by default, 30 when small.
        train: sequences drawn for each step: 20,000 by default, 40,000 for xor, 2,000 when
            small. Of 5-bit memorisation there are 32, which are all sets.
        validation: sequences to decide with when it is solved: 10,000 by default, 1,000 when
            small; 0 for none.
        test: sequences to report on: 10,000 by default, 1,000 when small.
    """
    if name not in TASKS:
        raise unknown_name("sequence task", name, TASKS)
    small, task = size == "small", TASKS[name]
    steps = (SMALL_LENGTH if small else task.length) if length is None else length
    width = (SMALL_UNITS if small else UNITS) if units is None else units
    full = (task.train, VALIDATION, TEST)
    defaults = (SMALL_TRAIN, SMALL_VALIDATION, SMALL_TEST) if small else full
    asked = (train, validation, test)
    counts = [d if a is None else a for d, a in zip(defaults, asked, strict=True)]
    _check(steps, width, cell, counts)

    def draw(count: int, *stream: int) -> Split:
        return task.draw(count, steps, np.random.default_rng([seed, *stream]))

    trained = draw(counts[0], TRAIN_STREAM)
    usual = size is None and asked == (None, None, None)
    return Problem(
        name=name,
        title=f"{task.title}, length {steps}" + (", LSTM" if cell == "lstm" else ""),
        summary=task.summary,
        task=task.question.kind,
        train=trained,
        validation=draw(counts[1], VALIDATION_STREAM) if counts[1] else None,
        test=draw(counts[2], TEST_STREAM),
        fresh=None if task.patterns else lambda step: draw(counts[0], FRESH_STREAM, step),
        build=partial(
            recurrent_network,
            cell,
            trained[0].shape[2],
            width,
            steps if task.outputs is None else task.outputs,
            task.answers,
        ),
        initialization="orthogonal",
        starts={
            "orthogonal": _start(task, cell, steps),
            "martens-sutskever": initialize_recurrent,
        },
        loss=task.question.loss,
        criterion=task.question.criterion(),
        metric=Metric("sequences answered wrongly", "%", task.question.wrong),
        weight_decay=WEIGHT_DECAY,
        suited={"ksd": {} if task.patterns else LARGE_SEARCH, "adam": CLIPPED, "sgd": CLIPPED},
        paper=PaperSettings(
            krylov_dimension=None,
            curvature_samples=task.patterns or CURVATURE_SAMPLES,
            published=task.published,
        )
        if usual
        else None,
    )


def _start(task: Task, cell: Cell, length: int) -> Start:
    """Starting weights with which the net remembers for about as long as the task asks."""
    if cell == "lstm":
        return partial(initialize_recurrent, orthogonal=True, forget_bias=math.log(length))
    return partial(initialize_recurrent, orthogonal=True, input_scale=task.input_scale)


def _check(length: int, units: int, cell: str, counts: list[int]) -> None:
    for name, value, least in (
        ("length", length, SHORTEST),
        ("units", units, 1),
        ("train", counts[0], 1),
        ("validation", counts[1], 0),
        ("test", counts[2], 1),
    ):
        if type(value) is not int or value < least:
            raise ValueError(f"`{name}` must be a whole number from {least}, found {value!r}")
    if cell not in get_args(Cell):
        raise unknown_name("cell", str(cell), get_args(Cell))
