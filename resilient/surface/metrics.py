"""Prometheus: the counts of this process and, in one elected process, the gauges of the database.

Nothing is measured for a scrape: the engine counts in plain integers, and the collector reads them when it is asked.
Labels are what the program declares (kinds, providers, destinations, schedules) and the engine's own words. Whatever a
row says besides is `other`, so no tenant can make a series.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from resilient.core.base.loggers import logger
from resilient.engine.app.app import Resilient
from resilient.engine.ground.counts import BOUNDS, OTHER, Counts, Histogram
from resilient.engine.run.heartbeat import code_version
from resilient.store.db import pool
from resilient.store.inspect import gauges
from resilient.store.schedules import ticks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from resilient.engine.ground.ground import Ground
    from resilient.store.inspect.gauges import Gauges
    from resilient.surface.shards import Shards


# -- the gauges of the database ---------------------------------------------------------------------------------------
#
# The one process of a fleet that shows the database's gauges, so that no series comes twice.
#
# It is elected by a lease when somebody reads: a fleet that nobody scrapes asks the database nothing. Another process
# takes over once the lease has run out.

log = logger("metrics")
CACHED: Final = 10.0  # seconds
LEASE: Final = timedelta(seconds=45)  # beyond the usual intervals of a scrape, so that one process stays the one
CHORE: Final = "engine:metrics"


class Exporter:
    """Reads the gauges if this process is the one; from any thread."""

    def __init__(self, ground: Ground, destinations: Iterable[str]) -> None:
        self._database, self._destinations = ground.database, tuple(destinations)
        self._lease: datetime | None = None
        self._gauges: Gauges | None = None
        self._read_at = -1e9
        self.monotonic = time.monotonic
        self.is_reached = False  # the database answered the latest reading
        self.begin_anew()
        pool.renew_in_children(self)

    def begin_anew(self) -> None:
        """See `pool.renew_in_children`."""
        self._lock = threading.Lock()

    def read(self) -> Gauges | None:
        """The gauges, at most `CACHED` seconds old; None if another process shows them or the database is away."""
        with self._lock:
            if self.monotonic() - self._read_at >= CACHED:
                self._gauges, self._read_at = self._look(), self.monotonic()
            return self._gauges

    def _look(self) -> Gauges | None:
        try:
            self._lease = self._database.transaction_sync(ticks.lead, CHORE, self._lease, LEASE)
            self.is_reached = True
            return self._database.transaction_sync(gauges.read, self._destinations) if self._lease else None
        except Exception as error:  # noqa: BLE001 - a scrape shows what the process counts all the same
            self.is_reached = False
            log.warning("the database's gauges cannot be read (%s: %s)", type(error).__name__, error)
            return None


MEANINGS: Final = {
    "resilient_jobs_enqueued": "Jobs that this process enqueued.",
    "resilient_executions": "Executions whose end is written.",
    "resilient_rescues": "Jobs that this process took from vanished workers.",
    "resilient_fenced_results": "Results that changed nothing, because the lease was lost.",
    "resilient_requests": "Requests to providers that were answered or failed.",
    "resilient_throttles": "Times that a resource began to rest, or rests longer.",
    "resilient_circuit_transitions": "Changes of circuits that this process brought about.",
    "resilient_job_wait_seconds": "From a job's time to its slot, whatever it waited for.",
    "resilient_limit_wait_seconds": "From the wish to send a request to its place in its limits.",
    "resilient_token_refreshes": "Requests for a new token that were answered or failed.",
    "resilient_events_published": "Events that a destination confirmed, or did not.",
    "resilient_event_delay_seconds": "From publish() to the destination's confirmation.",
    "resilient_webhooks_received": "Deliveries of webhooks by what they were answered.",
    "resilient_transaction_duration_seconds": "From the wish for a transaction of the engine's own to its commit.",
    "resilient_execution_duration_seconds": "From a slot to the end of its handler.",
    "resilient_request_duration_seconds": "From sending a request to its answer or failure.",
    "resilient_executions_running": "Executions that run in this process.",
    "resilient_worker_slots": "Slots of this process's workers.",
    "resilient_event_loop_lag_seconds": "The longest that a worker's event loop stood still lately.",
    "resilient_database_up": "Whether this process's last reading of the database was answered.",
    "resilient_exporter": "Whether this process shows the gauges of the database.",
    "resilient_build_info": "The version that runs.",
    "resilient_jobs": "Jobs in the database, of each state up to 20,000.",
    "resilient_jobs_cut_off": "Whether there are more jobs of a state than were counted.",
    "resilient_jobs_runnable": "Jobs that could start now; a lower bound.",
    "resilient_oldest_runnable_age_seconds": "How long the oldest job that could start has waited.",
    "resilient_resources_stopped": "Resources that a gate stops.",
    "resilient_jobs_behind_gate": "Ready jobs that wait for a stopped resource; a lower bound.",
    "resilient_connections": "Grants by provider and state.",
    "resilient_schedule_last_success_timestamp_seconds": "When a schedule's job succeeded last.",
    "resilient_outbox_pending": "Events that are not yet sent.",
    "resilient_outbox_oldest_age_seconds": "How long the oldest of them has waited.",
    "resilient_alerts": "Alerts that go on.",
    "resilient_workers": "Workers with a heartbeat lately.",
}  # fmt: skip


class AppCollector(Collector):
    """The metrics of one app; register it in the registry of your own server, or see `registry`."""

    def __init__(self, app: Resilient) -> None:
        self._app, self._counts = app, app.ground.counts
        self.exporter = Exporter(app.ground, app.outbox.destinations)

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry must not read the database when the collector is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Read everything."""
        yield from self._of_process()
        gauges = self.exporter.read()
        yield _gauge("resilient_database_up", {(): self.exporter.is_reached})
        yield _gauge("resilient_exporter", {(): gauges is not None})
        if gauges is not None:
            yield from _of_database(gauges, self._counts, self._app)

    def _of_process(self) -> Iterator[Metric]:
        counts, workers = self._counts, list(self._app.ground.workers)
        kinds = sorted(counts.kinds)
        executions = {(kind, OTHER, "succeeded", ""): 0 for kind in kinds} | counts.executions
        yield _counter("resilient_executions", executions, "kind", "provider", "outcome", "error_kind")
        yield _counter("resilient_jobs_enqueued", _from_zero(kinds, counts.enqueued), "kind")
        yield _counter("resilient_rescues", _from_zero(kinds, counts.rescues), "kind")
        yield _counter("resilient_requests", counts.requests.copy(), "provider", "method", "outcome")
        yield _counter("resilient_circuit_transitions", counts.transitions.copy(), "provider", "to")
        yield _counter("resilient_token_refreshes", counts.refreshes.copy(), "provider", "outcome")
        yield _counter("resilient_throttles", _each(counts.throttles), "provider")
        yield from self._of_events()
        yield _counter("resilient_webhooks_received", self._webhooks(), "provider", "answer")
        yield _histogram("resilient_transaction_duration_seconds", counts.transactions, "operation")
        yield _histogram("resilient_job_wait_seconds", counts.waits, "kind")
        yield _histogram("resilient_limit_wait_seconds", counts.draws, "provider")
        yield _histogram("resilient_execution_duration_seconds", counts.durations, "kind")
        yield _histogram("resilient_request_duration_seconds", counts.answers, "provider")
        figures = [worker.figures() for worker in workers]
        yield _counter("resilient_fenced_results", {(): sum(one.fenced for one in figures)})
        yield _gauge("resilient_executions_running", {(): sum(one.running for one in figures)})
        yield _gauge("resilient_worker_slots", {(): sum(one.slots for one in figures)})
        yield _gauge("resilient_event_loop_lag_seconds", {(): max((one.lag for one in figures), default=0.0)})
        yield _gauge("resilient_build_info", {(code_version(), platform.python_version()): 1}, "version", "python")

    def _of_events(self) -> Iterator[Metric]:
        counts, destinations = self._counts, self._app.outbox.destinations
        published = {(name, "ok"): 0 for name in destinations} | dict(counts.events.copy())
        yield _counter("resilient_events_published", published, "destination", "outcome")
        delays = {name: Histogram() for name in destinations} | counts.delays
        yield _histogram("resilient_event_delay_seconds", delays, "destination")

    def _webhooks(self) -> dict[tuple[str, str], int]:
        """Declared series begin at 0."""
        return {(name, "stored"): 0 for name in self._app.webhooks.declared} | dict(self._counts.webhooks.copy())


class ShardsCollector(Collector):
    """The metrics of several shards, each series with the label ``shard``."""

    def __init__(self, shards: Shards) -> None:
        self._of = {name: AppCollector(shards[name]) for name in shards}

    def describe(self) -> Iterable[Metric]:
        """Nothing, as `AppCollector`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Read everything, the shards side by side."""
        with ThreadPoolExecutor(len(self._of), "resilient-metrics") as threads:
            parts = [*threads.map(lambda one: [*one.collect()], self._of.values())]
        families: dict[str, Metric] = {}
        for name, part in zip(self._of, parts, strict=True):
            for one in part:
                family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                family.samples += [sample._replace(labels={"shard": name, **sample.labels}) for sample in one.samples]
        yield from families.values()


def collector(app: Resilient | Shards) -> AppCollector | ShardsCollector:
    """What reads the metrics of an app, or of all its shards."""
    return AppCollector(app) if isinstance(app, Resilient) else ShardsCollector(app)


def registry(app: Resilient | Shards) -> CollectorRegistry:
    """A registry with these metrics alone."""
    made = CollectorRegistry(auto_describe=False)
    made.register(collector(app))
    return made


def _of_database(gauges: Gauges, counts: Counts, app: Resilient) -> Iterator[Metric]:
    def label(provider: str) -> str:
        return counts.provider_of(provider)

    def kind_of(kind: str) -> str:
        return kind if kind in counts.kinds else OTHER

    jobs = Counter[tuple[str, ...]]()
    for (state, kind, root), number in gauges.jobs.items():
        jobs[state, kind_of(kind), label(root)] += number
    states = ("blocked", "scheduled", "ready", "running", "dead")
    yield _gauge("resilient_jobs", jobs, "state", "kind", "provider")
    yield _gauge("resilient_jobs_cut_off", {(state,): state in gauges.cut_off for state in states}, "state")
    runnable = Counter[tuple[str, ...]]({(name, kind): 0 for name in counts.providers for kind in counts.kinds})
    oldest: dict[tuple[str, ...], float] = {(name,): 0.0 for name in counts.providers}
    for one in gauges.runnable:
        runnable[label(one.provider), kind_of(one.kind)] += one.count
        if one.oldest is not None:
            place, age = (label(one.provider),), (gauges.at - one.oldest).total_seconds()
            oldest[place] = max(oldest.get(place, 0.0), age)
    yield _gauge("resilient_jobs_runnable", runnable, "provider", "kind")
    yield _gauge("resilient_oldest_runnable_age_seconds", oldest, "provider")
    stopped, behind = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for cause in gauges.causes:
        stopped[label(cause.provider), cause.gate] += cause.resources
        behind[label(cause.provider), cause.gate] += int(cause.waiting)
    yield _gauge("resilient_resources_stopped", stopped, "provider", "gate")
    yield _gauge("resilient_jobs_behind_gate", behind, "provider", "gate")
    grants = Counter[tuple[str, ...]]()
    for provider, by_state in gauges.grants.items():
        for state, number in by_state.items():
            grants[label(provider), state] += number
    yield _gauge("resilient_connections", grants, "provider", "state")
    yield from _of_outbox(gauges, app)
    declared = {name: at.timestamp() for name, at in gauges.schedules.items() if name in app.schedules.declared}
    yield _gauge("resilient_schedule_last_success_timestamp_seconds", _each(declared), "schedule")
    yield _gauge("resilient_alerts", _each(gauges.alerts), "name")
    yield _gauge("resilient_workers", {(): gauges.workers})


def _of_outbox(gauges: Gauges, app: Resilient) -> Iterator[Metric]:
    pending, ages = Counter[tuple[str, ...]](), dict[tuple[str, ...], float]()
    for one in gauges.destinations:
        name = (one.name if one.name in app.outbox.destinations else OTHER,)
        pending[name] += int(one.waiting)
        age = 0.0 if one.oldest is None else (gauges.at - one.oldest).total_seconds()
        ages[name] = max(ages.get(name, 0.0), age)
    yield _gauge("resilient_outbox_pending", pending, "destination")
    yield _gauge("resilient_outbox_oldest_age_seconds", ages, "destination")


def _counter(name: str, values: Mapping[Any, float], *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, MEANINGS[name], labels=labels), values)


def _gauge(name: str, values: Mapping[Any, float], *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, MEANINGS[name], labels=labels), values)


def _filled(family: Any, values: Mapping[Any, float]) -> Metric:
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    made: Metric = family
    return made


def _histogram(name: str, values: Mapping[str, Histogram], label: str) -> Metric:
    family = HistogramMetricFamily(name, MEANINGS[name], labels=[label])
    for word, one in sorted(values.items()):
        sums = list(accumulate(one.buckets))
        ends = [*map(str, BOUNDS), "+Inf"]
        family.add_metric([word], list(zip(ends, sums, strict=True)), one.sum)
    return family


def _from_zero(names: Sequence[str], values: Mapping[str, int]) -> dict[tuple[str], int]:
    return _each(dict.fromkeys(names, 0) | dict(values))


def _each(values: Mapping[str, Any]) -> dict[tuple[str], Any]:
    return {(name,): value for name, value in values.items()}
