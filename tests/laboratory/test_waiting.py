import io
import time

import pytest
from rich.console import Console

from krylov_descent.laboratory.waiting import clock, make_room, waiting


def test_a_terminal_shows_what_is_waited_for_with_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file = io.StringIO()
    with waiting(Console(file=file, force_terminal=True, width=40), "loading curves"):
        assert "loading curves: 0 s" in file.getvalue()
        now[0] += 3
        make_room()
        assert "loading curves: 3 s" in file.getvalue()
        shown = file.getvalue()
        now[0] += 3
        make_room()  # twice is no error
        assert file.getvalue() == shown  # a progress bar has the terminal for itself
    assert file.getvalue().count("\n") <= 1


def test_a_log_and_a_silent_console_have_none_of_it() -> None:
    for console in (Console(file=io.StringIO()), Console(file=io.StringIO(), force_terminal=True)):
        console.quiet = console.is_terminal
        with waiting(console, "loading"):
            pass
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (61, "1 min 01 s"), (4000, "1 h 06 min"), (59.6, "1 min 00 s")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
