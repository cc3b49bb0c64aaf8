"""What a process counts, in plain integers: nothing is measured or sent where work is done.

Whoever wants figures reads them here: the heartbeat, which adds them up by the minute, and a scrape of the metrics.
Labels are what the program declares. A first segment of a resource key that it does not declare may be a tenant's word
and is counted as `OTHER`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from resilient.core.events.message import RESOURCE as OUTBOX
from resilient.store.db import pool
from resilient.store.db.direct import OPERATIONS
from resilient.store.inspect.throughput import Series

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OTHER: Final = "other"
SUCCESS: Final = ("succeeded", "")  # how most executions end


OutcomeLabels: TypeAlias = tuple[str, str, str, str]  # kind, provider, outcome, kind of error


# Seconds, as upper bounds of a histogram's buckets; beyond the last is one more.
BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Figures(NamedTuple):
    """How a worker stands: results that changed nothing, and seconds for which its loop stood still lately."""

    running: int
    slots: int
    fenced: int
    lag: float


class Histogram:
    """How many values fell into which bucket, and their sum."""

    __slots__ = ("buckets", "sum")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Add a value."""
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


class Counts:
    """The counts of one process. They change on the event loops of its workers and are read from any thread."""

    def __init__(self, kinds: Iterable[str] = (), *providers: Iterable[str]) -> None:
        self.kinds = frozenset(kinds)
        self.providers = frozenset({OUTBOX, *chain.from_iterable(providers)})
        self.successes = {kind: dict.fromkeys((*self.providers, OTHER), 0) for kind in self.kinds}  # plain ones
        self.others: Counter[OutcomeLabels] = Counter()  # executions that ended otherwise
        self.durations = {kind: Histogram() for kind in self.kinds}  # from a slot to the end of a handler
        self.waits = {kind: Histogram() for kind in self.kinds}  # from a job's time to its slot
        self.draws = {provider: Histogram() for provider in (*self.providers, OTHER)}  # for request limits
        self.refreshes: Counter[tuple[str, str]] = Counter()  # of tokens, by provider and outcome
        self.rescues: Counter[str] = Counter()  # by kind
        self.enqueued: Counter[str] = Counter()  # by kind
        self.requests: Counter[tuple[str, str, str]] = Counter()  # by provider, method and outcome
        self.answers = {provider: Histogram() for provider in (*self.providers, OTHER)}  # from sending to their answers
        self.transitions: Counter[tuple[str, str]] = Counter()  # of breakers, by provider and the new state
        self.throttles = dict.fromkeys((*self.providers, OTHER), 0)  # rests that began or grew
        self.events: Counter[tuple[str, str]] = Counter()  # by destination and outcome
        self.delays: dict[str, Histogram] = {}  # of events, by destination: from `publish` to the confirmation
        self.webhooks: Counter[tuple[str, str]] = Counter()  # by provider and answer
        self.transactions = {operation: Histogram() for operation in OPERATIONS}  # the engine's own
        self._summed: dict[Series, int] = {}  # what of the executions stands in the database's sums by the minute
        self.begin_anew()
        pool.renew_in_children(self)

    def begin_anew(self) -> None:
        """See `pool.renew_in_children`."""
        self._lock = threading.Lock()
        self.take_sums()  # those of before the fork are the parent's to write

    @property
    def executions(self) -> Counter[OutcomeLabels]:
        """Executions whose end is written."""
        counts = self.others.copy()
        for kind, by_provider in self.successes.items():
            for provider, count in by_provider.items():
                if count:
                    counts[kind, provider, "succeeded", ""] += count
        return counts

    def provider_of(self, resource_key: str) -> str:
        """The declared provider that a resource belongs to, or `OTHER`."""
        root = resource_key.partition("/")[0].partition(":")[0]  # `github:token` is GitHub's token endpoint
        return root if root in self.providers else OTHER

    def ended(self, kind: str, resource_key: str, ending: tuple[str, str]) -> None:
        """An execution's end is written; ``ending``: the outcome, the kind of its error."""
        by_provider, root = self.successes[kind], resource_key.partition("/")[0]
        provider = root if root in by_provider else OTHER
        if ending is SUCCESS:
            by_provider[provider] += 1
        else:
            self.others[kind, provider, *ending] += 1

    def rescued(self, kind: str, resource_key: str, outcome: str, error_kind: str) -> None:
        """A job of a vanished worker was taken from it."""
        self.others[kind, self.provider_of(resource_key), outcome, error_kind] += 1
        self.rescues[kind] += 1

    def request(self, resource_key: str, method: str, outcome: str, seconds: float | None) -> None:
        """A request was answered, or failed."""
        provider = self.provider_of(resource_key)
        self.requests[provider, method if method in METHODS else OTHER, outcome] += 1
        if seconds is not None:
            self.answers[provider].observe(seconds)

    def refresh(self, resource_key: str, outcome: str) -> None:
        """A token endpoint was asked for a new token: ``ok``, or the kind of error."""
        self.refreshes[self.provider_of(resource_key), outcome] += 1

    def throttle(self, resource_key: str) -> None:
        """A resource began to rest, or rests longer."""
        self.throttles[self.provider_of(resource_key)] += 1

    def event(self, destination: str, outcome: str, seconds: float | None = None) -> None:
        """A destination confirmed an event (``ok``), or did not (the kind of error)."""
        self.events[destination, outcome] += 1
        if seconds is not None:
            self.delays.setdefault(destination, Histogram()).observe(seconds)

    def webhook(self, provider: str, answer: str) -> None:
        """A delivery was answered; from any thread."""
        with self._lock:
            self.webhooks[self.provider_of(provider), answer] += 1

    def transaction(self, operation: str, seconds: float) -> None:
        """A transaction of the engine's own was committed; from any thread."""
        with self._lock:
            self.transactions[operation].observe(seconds)

    def enqueue(self, kinds: Iterable[str]) -> None:
        """Jobs were accepted; from any thread. In a transaction of the caller's they may still be rolled back."""
        with self._lock:
            self.enqueued.update(kinds)

    def take_sums(self) -> dict[Series, int]:
        """What ended since this was last called, for the database's sums; `give_back` what cannot be written."""
        with self._lock:
            totals: dict[Series, int] = {}
            for (kind, provider, outcome, _), count in self.executions.items():
                series = Series(kind, provider, outcome)
                totals[series] = totals.get(series, 0) + count
            before, self._summed = self._summed, totals
        added = {series: count - before.get(series, 0) for series, count in totals.items()}
        return {series: count for series, count in added.items() if count}

    def give_back(self, sums: Mapping[Series, int]) -> None:
        """These were not written after all."""
        with self._lock:
            for series, count in sums.items():
                self._summed[series] -= count
