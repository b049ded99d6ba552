"""What a person at a terminal waits for, with a clock, before there is anything else to show."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

# The lines on the screen. A progress bar needs it for itself.
_shown: list[Live] = []


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show what is being done and for how long; it is gone at the end. A log has none of it."""
    if not console.is_terminal or console.quiet:
        yield
        return
    started = time.monotonic()

    def line() -> Text:
        return Text(f"{what}: {clock(time.monotonic() - started)}")

    with Live(get_renderable=line, console=console, transient=True) as live:
        _shown.append(live)
        live.refresh()
        try:
            yield
        finally:
            _shown.remove(live)


def make_room() -> None:
    """Take the lines off the screen, for what shows its progress by itself."""
    for live in _shown:
        live.stop()


def clock(seconds: float) -> str:
    """A duration in the two units that matter."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
