"""Futures, and the engine that runs each piece of work when its result is asked for."""

from dataclasses import dataclass, field

import pytest

from krylov_descent.runtime.engine import Engine, Launched


@dataclass
class Counted:
    """Work that fails the first few times, and gives a new list each time it is done."""

    failures: int = 0
    calls: int = 0
    made: list[list[int]] = field(default_factory=list)

    def run(self) -> list[int]:
        self.calls += 1
        if self.calls <= self.failures:
            raise RuntimeError(f"failure {self.calls}")
        self.made.append([self.calls])
        return self.made[-1]


def test_a_future_computes_its_result_once_for_all_readers() -> None:
    work = Counted()
    future = Launched(work.run)
    assert work.calls == 0
    assert future.result() is future.result() is work.made[0]
    assert work.calls == 1


def test_a_result_of_none_is_computed_once() -> None:
    calls = list[None]()
    future = Launched(lambda: calls.append(None))
    future.result()
    future.result()
    assert len(calls) == 1


def test_after_an_exception_the_next_reader_tries_again() -> None:
    work = Counted(failures=2)
    future = Launched(work.run)
    for number in (1, 2):
        with pytest.raises(RuntimeError, match=f"failure {number}"):
            future.result()
    assert future.result() is future.result() is work.made[0]
    assert work.calls == 3


def test_a_result_that_is_known_is_given_as_it_is() -> None:
    known = [1]
    assert Launched.done(known).result() is known


def test_the_engine_runs_work_when_its_result_is_read() -> None:
    work = Counted()
    future = Engine().launch(work)
    assert work.calls == 0
    assert future.result() is work.made[0]
    assert work.calls == 1


def flags(engine: Engine) -> tuple[bool, bool]:
    return engine.in_step, engine.repeatable


def test_an_engine_is_in_a_step_until_the_step_ends() -> None:
    engine = Engine()
    assert flags(engine) == (False, False)
    for _ in range(2):
        with engine.step():
            assert flags(engine) == (True, False)
            engine.repeatable = True
        assert flags(engine) == (False, False)


def test_an_engine_is_in_a_step_until_the_step_fails() -> None:
    engine = Engine()

    def fail() -> None:
        engine.repeatable = True
        raise RuntimeError

    with pytest.raises(RuntimeError), engine.step():
        fail()
    assert flags(engine) == (False, False)
