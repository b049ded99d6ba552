"""How ranks learn of a failure while they wait in an exchange that the failed rank never enters.

A rank that fails does not know which exchange the others enter next: that is decided by code which
it has left. So it asks them, through the key-value store of the process group:

    1. The failed rank raises a flag in the store. A thread on every other rank looks for that flag
       a few times a second, while a step is under way.
    2. The thread answers with the exchanges that its rank has entered so far in this step.
    3. The failed rank publishes the last exchange that any rank has entered, and takes part in
       all up to that one. So no rank is left waiting.
    4. Every rank ends the step behind that exchange.

A step without a failure sends nothing for it.
"""

import json
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

LOOK = 0.05  # seconds between two looks for the flag
PAUSE = 0.005  # seconds between two looks for an answer
FLAG, ENDING = "flag", "ending"


class Exchange(NamedTuple):
    """What a rank must know to take part in an exchange.

    Attributes:
        kind: of exchange.
        numbers: how many of them a rank hands over.
        dtype: of the numbers, by its name in torch.
    """

    kind: str
    numbers: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step ends in which a rank failed.

    Attributes:
        exchanges: all of the step, up to the last that a rank has entered.
        failures: what went wrong, by rank.
    """

    exchanges: list[Exchange]
    failures: dict[int, str]


class FailureNotice:
    """The exchanges of one step on one rank, and a thread that answers a rank which failed.

    Args:
        store: of the process group, for the keys of this step alone.
        rank: this one.
        size: how many ranks there are.

    An `Ending` that is returned says that the step is over; TimeoutError, that a rank which failed
    or was asked did not answer within the store's timeout.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._entered: list[Exchange] = []
        self._answered = False
        self._lock = threading.Lock()  # of the two above
        self._ending: Ending | None = None
        self._ended, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure-notice", daemon=True)
        self._thread.start()

    def enter(self, exchange: Exchange) -> Ending | None:
        """To be called before an exchange; None if it is to be entered."""
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
        """To be called where an exchange that was entered failed before anything was sent."""
        with self._lock:
            self._entered.pop()

    def leave(self) -> Ending | None:
        """To be called behind an exchange; None if the step goes on."""
        with self._lock:
            if not self._answered:
                return None
        ending = self._agreed_ending()
        return ending if len(self._entered) >= len(ending.exchanges) else None

    def tell(self, message: str) -> list[Exchange]:
        """Tell the other ranks of a failure; the exchanges in which this rank must take part."""
        self.close()
        if not self._answered:
            is_first = self._store.add(FLAG, 1) == 1
            self._answer(message)
            if is_first:
                self._publish()
            self._ending = self._read_ending()
        return self._agreed_ending().exchanges[len(self._entered) :]

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._closed.wait(LOOK):
                if self._store.check([FLAG]):
                    self._answer(None)
                    self._ending = self._read_ending()
                    return
        except Exception:  # the store went with the rank that held it: exchanges fail by themselves
            return
        finally:
            self._ended.set()

    def _answer(self, message: str | None) -> None:
        with self._lock:
            self._answered = True
            answer = {"entered": self._entered, "failure": message}
        self._store.set(f"answer/{self._rank}", json.dumps(answer))

    def _publish(self) -> None:
        """Collect the answers of all ranks, and say where the step ends."""
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
        # Not by the store's own wait: that would keep the store from the rank's other threads.
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {self._store.timeout}")
            time.sleep(PAUSE)
