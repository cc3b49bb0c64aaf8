"""What happens in one run, as data: work and faults, drawn from a seed, so that a failing run can be shrunk.

Times are seconds since the beginning.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace

ACCOUNTS = 3
LASTS = 5.0  # seconds within which work arrives and faults begin
WORKERS = 2
KINDS = (
    "push",
    "push",
    "charge",
    "charge",
    "fetched",
    "fetched",
    "slow",
    "written",
    "plain",
    "ordered",
    "fails",
    "snoozes",
)


@dataclass(frozen=True)
class Batch:
    """Jobs enqueued in one transaction. ``end``: "commit", "rollback", or "lost" (committed, the answer never came)."""

    at: float
    jobs: tuple[tuple[int, str, int, float], ...]  # number, kind, account, delay
    end: str = "commit"
    events: tuple[tuple[str, int], ...] = ()  # key, number
    workflows: tuple[tuple[int, int, bool], ...] = ()  # number, account, whether its last step fails


@dataclass(frozen=True)
class Fault:
    """``what`` goes wrong at ``at``, for ``lasts`` seconds; ``who``: a worker's or an account's number."""

    at: float
    what: str
    who: int = 0
    lasts: float = 0.0
    point: str = ""  # of a transaction: "before", "inside", "after"
    count: int = 1  # which one from then


@dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int
    batches: tuple[Batch, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def jobs(self):
        """How many jobs it commits: steps of workflows and events are jobs, too."""
        kept = [b for b in self.batches if b.end != "rollback"]
        return sum(len(b.jobs) + 3 * len(b.workflows) + len(b.events) for b in kept)

    def to_json(self):
        """As `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, doc):
        """What was kept of a run that failed once."""
        batches = [Batch(**{k: _tuples(v) for k, v in one.items()}) for one in doc["batches"]]
        return cls(doc["seed"], tuple(batches), tuple(Fault(**one) for one in doc["faults"]))

    def without(self, batches=(), faults=()):
        """The same run without some of it."""
        return replace(
            self,
            batches=tuple(b for b in self.batches if b not in batches),
            faults=tuple(f for f in self.faults if f not in faults),
        )


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


FAULTS = {
    "crash": lambda _: {},
    "crash in a transaction": lambda dice: {
        "point": dice.choice(("before", "inside", "after")), "count": dice.randrange(1, 16),
    },
    "cut": lambda dice: {"point": dice.choice(("before", "inside", "after")), "count": dice.randrange(1, 16)},
    "freeze": lambda dice: {"lasts": dice.choice((dice.uniform(0.2, 2.0), dice.uniform(2.0, 5.0)))},
    "clock": lambda dice: {"lasts": dice.uniform(-0.8, 0.8)},  # by so much it is set
    "down": lambda dice: {"lasts": dice.uniform(0.5, 4.0)},
    "everybody down": lambda dice: {"lasts": dice.uniform(0.5, 3.0)},
    "throttled": lambda dice: {"lasts": dice.choice((1.0, 2.0, 3.0))},
    "hangs": lambda dice: {"lasts": dice.uniform(0.5, 3.0)},
    "no answer": lambda dice: {"lasts": dice.uniform(0.2, 2.0)},  # it does what it is asked, and nobody hears of it
    "refuses connections": lambda dice: {"lasts": dice.uniform(0.5, 2.0)},
    "destination refuses": lambda dice: {"lasts": dice.uniform(0.5, 2.0)},
    "destination answers nothing": lambda dice: {"lasts": dice.uniform(0.2, 1.5)},
}  # fmt: skip


def drawn(seed):
    """At least 30 jobs and 3 faults."""
    dice = random.Random(seed)
    batches, number, committed = [], 0, 0
    while committed < 22:
        at, size = dice.uniform(0, LASTS) if number else 0.0, dice.choice((1, 1, 2, 4, 8))
        work = []
        for _ in range(size):
            number += 1
            delay = dice.choice((0.0, 0.0, 0.0, dice.uniform(0.1, 2.0)))
            work.append((number, dice.choice(KINDS), dice.randrange(ACCOUNTS), delay))
        end = dice.choices(("commit", "rollback", "lost"), (8, 1, 1))[0]
        committed += size if end != "rollback" else 0
        batches.append(Batch(at, tuple(work), end))
    for _ in range(dice.randrange(1, 3)):
        number += 1
        flow = (number, dice.randrange(ACCOUNTS), dice.random() < 0.5)
        batches.append(Batch(dice.uniform(0, LASTS), (), workflows=(flow,)))
    for n in range(6):
        end = "rollback" if n == 0 else dice.choice(("commit", "commit", "lost"))
        batches.append(Batch(dice.uniform(0, LASTS), (), end, ((f"k{dice.randrange(2)}", n),)))
    batches.sort(key=lambda b: b.at)
    faults = []
    for _ in range(dice.randrange(3, 7)):
        what = dice.choice(list(FAULTS))
        who = dice.randrange(WORKERS if what in ("crash", "crash in a transaction", "cut", "freeze") else ACCOUNTS)
        faults.append(Fault(dice.uniform(0.2, LASTS), what, who, **FAULTS[what](dice)))
    return Plan(seed, tuple(batches), tuple(sorted(faults, key=lambda f: f.at)))
