"""The command as a test asks it, and small things to ask for."""

from collections.abc import Callable
from dataclasses import dataclass

OPTIONS = {"train": 30, "validation": 10, "test": 10}
TINY = ["--small", *(w for k, v in OPTIONS.items() for w in ("--problem-set", f"{k}={v}"))]
ADAM = ["train", "curves", *TINY, "--optimizer", "adam"]


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line of an error that a person can mend."""
        assert self.code == 1
        assert self.err.startswith("ksd: ")
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("ksd: ").strip()


Ksd = Callable[..., Answer]


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80 and "…" not in text.replace("--set …=", "")
