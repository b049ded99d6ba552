"""A yardstick's fit as a run folder, so that it stands in tables and pages beside the others."""

import time
from dataclasses import asdict

from krylov_descent.laboratory.description import describe, with_history
from krylov_descent.laboratory.limits import Ending
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.runs import check_same
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.yardsticks import YARDSTICKS


def fit_yardstick(
    settings: RunSettings, problem: Problem, folder: RunFolder, *, resume: bool = False
) -> Ending:
    """Fit and record one row; what was interrupted begins again. Limits do not apply.

    Args:
        settings: whose optimiser is a yardstick's name.
        problem: as `runs.load` gives it for these settings.
        folder: where it is recorded.
        resume: take a folder that holds an unfinished fit with these settings.

    Raises:
        ValueError: it cannot be fitted to the problem.
        RunFolderError: the folder holds another run, or cannot be written.
    """
    YARDSTICKS[settings.optimizer].check(problem, settings.optimizer_options)
    folder.take()
    try:
        return _fit(settings, problem, folder, resume=resume)
    finally:
        folder.release()


def _fit(settings: RunSettings, problem: Problem, folder: RunFolder, *, resume: bool) -> Ending:
    yardstick, config = YARDSTICKS[settings.optimizer], describe(settings, problem, folder)
    if resume:
        check_same(folder, settings)
        folder.go_on(with_history(config, folder, 0))
        folder.rewind(-1)
    else:
        folder.begin(config)
    started = time.perf_counter()
    fit = yardstick.fit(problem, settings.seed)
    seconds = time.perf_counter() - started
    row: Row = {"iteration": 0, "seconds": seconds, "passes": 0.0, **asdict(fit)}
    folder.append(row)
    ending = Ending.FITTED
    folder.finish(
        {"ending": ending.name.lower(), "sentence": ending.value, "last": row, "best": row}
    )
    return ending
