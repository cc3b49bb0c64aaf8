"""What a worker's requests came to, summed per resource until it is worth a write.

Failures and verdicts of probes are written within milliseconds. Successes of a resource that has troubles (a
failure lately, a circuit not closed) within a second, because they count against its failures. Those of a
healthy one only now and then: they tell when it last worked and which children of an ancestor are alive;
nothing waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from resilient.core.breaker import Report
from resilient.store.circuits import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from resilient.core.evidence import Verdict
    from resilient.core.failure import Failure

PROMPT: Final = 0.005  # seconds; failures that arrive together are written together
SOON: Final = 1.0
QUIET: Final = 30.0  # seconds between two writes of a healthy resource's successes
_TROUBLED: Final = 60.0  # seconds after a failure in which successes are written soon
_NAMES: Final = 16  # children named in one report


@dataclass(slots=True)
class _Sum:
    generation: int
    ok: int = 0
    failed: int = 0
    trailing: int = 0
    well: set[str] = field(default_factory=set)
    ill: set[str] = field(default_factory=set)
    failure: Failure | None = None
    floor: datetime | None = None
    due: float = 0.0  # monotonic; when it is to be written
    troubled: float = -1e9  # monotonic; when it last failed here
    written: float = -1e9

    def clear(self) -> None:
        self.ok = self.failed = self.trailing = 0
        self.well, self.ill, self.failure, self.floor = set(), set(), None, None


class Tally:
    """Sums of one worker, by key. Not for threads."""

    def __init__(self, monotonic: Callable[[], float], roll: Callable[[], float]) -> None:
        self._monotonic, self._roll = monotonic, roll
        self._sums: dict[str, _Sum] = {}
        self._open: set[str] = set()  # keys with something to write
        self._evidence: list[Evidence] = []  # verdicts of probes, and what could not be written

    def add(
        self,
        key: str,
        generation: int,
        verdict: Verdict,
        child: str,
        *,
        failure: Failure | None = None,
        floor: datetime | None = None,
        calm: bool = True,
    ) -> float:
        """Count one request; returns in how many seconds a write is due."""
        at = self._monotonic()
        s = self._sums.get(key)
        if s is None:
            s = self._sums[key] = _Sum(generation)
        elif s.generation != generation:
            if generation < s.generation:
                return QUIET  # overtaken by a change of the circuit
            s.clear()
            s.generation = generation
        if verdict == "neutral":
            return QUIET
        fresh = not (s.ok or s.failed)
        if verdict == "failed":
            s.failed += 1
            s.trailing += 1
            s.failure, s.floor, s.troubled = failure, floor, at
            s.well.discard(child)
            if len(s.ill) < _NAMES:
                s.ill.add(child)
            wait = PROMPT
        else:
            s.ok += 1
            s.trailing = 0
            s.ill.discard(child)
            if len(s.well) < _NAMES:
                s.well.add(child)
            wait = self._patience(key, s, at, calm=calm)
        if fresh or at + wait < s.due:
            s.due = at + wait
            self._open.add(key)
        return wait

    def _patience(self, key: str, s: _Sum, at: float, *, calm: bool) -> float:
        """How long a success may wait."""
        if not calm or at - s.troubled < _TROUBLED:
            return SOON
        if s.written < 0:  # the first one: ancestors soon, for they must know who is alive; leaves spread out
            return SOON if "/" not in key else SOON + QUIET * self._roll()
        return max(SOON, s.written + QUIET - at)

    def probe(
        self, key: str, generation: int, verdict: Verdict, failure: Failure | None, floor: datetime | None
    ) -> None:
        """The verdict of a probe."""
        ok, failed = int(verdict == "ok"), int(verdict == "failed")
        r = Report(generation, ok=ok, failed=failed, probe=True, floor_until=floor)
        self._evidence.append(Evidence(key, r, failure))

    def due(self) -> float | None:
        """In how many seconds the next write is due; None if there is nothing to write."""
        if self._evidence:
            return 0.0
        if not self._open:
            return None
        return max(0.0, min(self._sums[key].due for key in self._open) - self._monotonic())

    def collect(self, *, everything: bool = False) -> list[Evidence]:
        """Take out what is due, or everything."""
        at = self._monotonic()
        found, self._evidence = self._evidence, []
        for key in [k for k in self._open if everything or self._sums[k].due <= at]:
            s = self._sums[key]
            well, ill = frozenset(s.well), frozenset(s.ill)
            r = Report(s.generation, s.ok, s.failed, s.trailing, well, ill, floor_until=s.floor)
            found.append(Evidence(key, r, s.failure))
            s.clear()
            s.written = at
            self._open.discard(key)
        for key in [k for k, s in self._sums.items() if k not in self._open and at - s.written > 4 * QUIET]:
            del self._sums[key]
        return found

    def put_back(self, evidence: list[Evidence]) -> None:
        """What could not be written is tried again with the next write."""
        self._evidence = (evidence + self._evidence)[-_MOST_UNWRITTEN:]


_MOST_UNWRITTEN: Final = 5_000
