"""What a step did, and what a run's times are worth, for the record."""

from krylov_descent.laboratory.record import Row
from krylov_descent.optimizers.result import StepResult

# A run that had less than this share of one processor is noted, if it was this long.
FAIR_SHARE, NOTED_SECONDS = 0.7, 2.0


def account(result: StepResult) -> Row:
    """What a step did, as plain numbers for the record."""
    return {
        "loss": result.loss,
        "loss_before": result.loss_before,
        "loss_after": result.loss_after,
        "status": result.status.name.lower(),
        **({} if result.status.moved else {"reason": result.reason}),
        "noise": result.noise,
        "gradient_norm": result.gradient_norm,
        "step_norm": result.step_norm,
        "rank": result.rank,
        "ritz_values": list(result.ritz_values),
        "search_iterations": result.iterations,
        "evaluations": result.evaluations,
        "products": result.products,
        "phases": result.seconds,
        **({"terms": result.terms} if result.terms else {}),
    }


def busy_machine(seconds: float, cpu_seconds: float) -> str | None:
    """A sentence where a process had to share its processor; None where it had one.

    Args:
        seconds: by the clock.
        cpu_seconds: that a processor worked for the process, on all of its threads.
    """
    if seconds < NOTED_SECONDS or cpu_seconds >= FAIR_SHARE * seconds:
        return None
    return (
        f"The machine was busy: the run had {cpu_seconds:.3g} s of a processor in {seconds:.3g} s, "
        "so its times say little"
    )
