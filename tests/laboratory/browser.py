"""A page in headless Chromium: what is in it after its scripts, and what it asked for."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
needs_chromium = pytest.mark.skipif(
    FOUND is None, reason="needs Chromium: install it, or name it in the variable CHROMIUM"
)


@dataclass(frozen=True)
class Visit:
    """What was seen of a page."""

    dom: str
    console: list[str]
    requests: list[str]

    @property
    def seen(self) -> dict[str, Any]:
        """What the page's own script noted down."""
        noted = re.search(r'data-seen="([^"]*)"', self.dom)
        assert noted is not None, self.console
        answer: dict[str, Any] = json.loads(noted[1].replace("&quot;", '"'))
        return answer


def chromium(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert FOUND is not None
    fixed = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser's own requests go nowhere
        "--enable-logging=stderr",
        "--virtual-time-budget=2000",
        "--disable-dev-shm-usage",  # which is small in containers
        f"--user-data-dir={mkdtemp(dir=page.parent)}",  # none that another may still be leaving
    )
    return subprocess.run(
        [FOUND, *fixed, *arguments, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def visit(page: Path, width: int = 1280) -> Visit:
    log = page.with_suffix(".net.json")
    done = chromium(page, f"--log-net-log={log}", "--dump-dom", f"--window-size={width},1000")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # Requests of the browser itself have no origin; those of a page from a file have "null".
    asked = [str(e.get("url")) for e in events if e.get("initiator", "not an origin") == "null"]
    return Visit(done.stdout, console, [url for url in asked if url != page.as_uri()])


def visited(page: Path, script: str) -> Path:
    """A copy of the page with a visitor in it."""
    copy = page.with_name("visited.html")
    copy.write_text(page.read_text().replace("</body>", f"<script>{{{script}}}</script></body>"))
    return copy
