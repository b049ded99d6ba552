"""How ranks learn of a failure while they wait in a collective that the failed rank never enters.

A failed rank has left the step, so it does not know which collective the other ranks enter next. It
asks them through the key-value store of the process group:

1. The failed rank sets a flag in the store. During a step, a thread on every other rank polls that
   flag a few times a second.
2. The thread answers with the list of collectives that its rank has entered so far in the step.
3. The failed rank publishes the longest of these lists and takes part in every collective on it, so
   that no rank is left waiting.
4. Every rank ends the step after the last collective on the list.

A step without a failure sends nothing.
"""

import json
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

LOOK = 0.05  # seconds between two polls of the flag
PAUSE = 0.005  # seconds between two polls for an answer
FLAG, ENDING = "flag", "ending"


class Exchange(NamedTuple):
    """A collective, described well enough that another rank can take part in it.

    Attributes:
        kind: of collective, such as "all-reduce".
        numbers: how many entries a rank contributes.
        dtype: of the entries, by its name in torch.
    """

    kind: str
    numbers: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step ends in which a rank failed.

    Attributes:
        exchanges: all collectives of the step, up to the last one that any rank has entered.
        failures: error messages by rank.
    """

    exchanges: list[Exchange]
    failures: dict[int, str]


class FailureNotice:
    """The collectives that one rank enters in one step, and a thread that answers failed ranks.

    `enter` and `leave` return an `Ending` when the step is over. `enter`, `leave` and `tell` raise
    TimeoutError when the ranks could not agree on an ending within the store's timeout.

    Args:
        store: the process group's store, with a prefix that belongs to this step alone.
        rank: of this process.
        size: the number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._entered: list[Exchange] = []
        self._answered = False
        self._lock = threading.Lock()  # guards _entered and _answered
        self._ending: Ending | None = None
        self._ended, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure-notice", daemon=True)
        self._thread.start()

    def enter(self, exchange: Exchange) -> Ending | None:
        """Call before a collective. None means: enter the collective."""
        with self._lock:
            if not self._answered:
                self._entered.append(exchange)
                return None
        ending = self._agreed_ending()
        if len(self._entered) >= len(ending.exchanges):
            return ending
        self._entered.append(exchange)
        return None

    def withdraw(self) -> None:
        """Call when a collective that was entered failed before anything was sent."""
        with self._lock:
            self._entered.pop()

    def leave(self) -> Ending | None:
        """Call after a collective. None means: the step goes on."""
        with self._lock:
            if not self._answered:
                return None
        ending = self._agreed_ending()
        return ending if len(self._entered) >= len(ending.exchanges) else None

    def tell(self, message: str) -> list[Exchange]:
        """Report a failure to all ranks; returns the collectives this rank must still join."""
        self.close()
        if not self._answered:
            is_first = self._store.add(FLAG, 1) == 1
            self._answer(message)
            if is_first:
                self._publish()
            self._ending = self._read_ending()
        return self._agreed_ending().exchanges[len(self._entered) :]

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._closed.wait(LOOK):
                if self._store.check([FLAG]):
                    self._answer(None)
                    self._ending = self._read_ending()
                    return
        except Exception:  # the store died with its rank: collectives fail by themselves
            return
        finally:
            self._ended.set()

    def _answer(self, message: str | None) -> None:
        with self._lock:
            self._answered = True
            answer = {"entered": self._entered, "failure": message}
        self._store.set(f"answer/{self._rank}", json.dumps(answer))

    def _publish(self) -> None:
        """Collect the answers of all ranks and publish where the step ends."""
        keys = [f"answer/{rank}" for rank in range(self._size)]
        self._await(keys)
        answers = [json.loads(self._store.get(key)) for key in keys]
        failures = {rank: a["failure"] for rank, a in enumerate(answers) if a["failure"]}
        exchanges = max((answer["entered"] for answer in answers), key=len)
        self._store.set(ENDING, json.dumps([exchanges, list(failures.items())]))

    def _read_ending(self) -> Ending:
        self._await([ENDING])
        exchanges, failures = json.loads(self._store.get(ENDING))
        return Ending([Exchange(*one) for one in exchanges], dict(failures))

    def _agreed_ending(self) -> Ending:
        self._ended.wait()
        if self._ending is None:
            raise TimeoutError("a rank failed, and the ranks could not agree where to end the step")
        return self._ending

    def _await(self, keys: list[str]) -> None:
        # `store.wait` would block the rank's other threads out of the store.
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {self._store.timeout}")
            time.sleep(PAUSE)
