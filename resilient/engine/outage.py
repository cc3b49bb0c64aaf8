"""The engine's own database away, told without it.

Every other alert is a row first, so that one process tells it. Here nothing can be written: each process whose workers
do not reach the database tells its own sinks, once an outage and once at its end. All have one fingerprint, by which
a pager makes one incident of them. Called on the event loop; the heartbeat and a worker that waits for its start say
what they meet.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from resilient.core import alert_words, alerts

if TYPE_CHECKING:
    from resilient.core.alerts import AlertInfo
    from resilient.engine.app import Resilient
    from resilient.engine.sinks import Sinks

AWAY: Final = 9.0  # seconds without an answer until it is told: with a heartbeat's interval less than 15
STEADY: Final = 30.0  # seconds of answers until it is over: a database that comes and goes is one outage


class Outage:
    """What the workers of one process know of their database."""

    def __init__(self, app: Resilient, sinks: Sinks) -> None:
        self._app, self._sinks = app, sinks
        self._away: dict[str, float | None] = {}  # workers it is away for, with since when it answers again
        self.alert: AlertInfo | None = None  # while people believe in it

    def unanswered(self, worker: str, seconds: float, error: str | None = None) -> None:
        """A worker has had no answer for so long; ``error``: what it was told last."""
        if worker in self._away or seconds >= AWAY:
            self._away[worker] = None
        if self.alert is None and seconds >= AWAY:
            self._begin(worker, seconds, error)

    def answered(self, worker: str, now: float) -> None:
        """A worker has an answer; ``now`` on its monotonic clock."""
        if self.alert is None:
            return
        if worker in self._away:
            since = self._away[worker]
            if since is None:
                self._away[worker] = since = now
            if now - since < STEADY:
                return
        self._over(worker, STEADY if worker in self._away else 0.0)

    def left(self, worker: str, *, reached: bool) -> None:
        """A worker ends; ``reached``: its database answered it last."""
        if reached:
            self._over(worker, 0.0)
        else:
            self._away.pop(worker, None)

    def _begin(self, worker: str, seconds: float, error: str | None) -> None:
        now = self._app.now()
        since = now - timedelta(seconds=seconds)
        finding = alerts.of_database(self._app.database.address, since, worker, error)
        if not self._app.alerts.config.wants(finding.name):
            return
        self.alert = alerts.AlertInfo(
            fingerprint=finding.fingerprint, name=finding.name, subject=finding.subject, detail=finding.detail,
            count=1, first_at=since, last_at=now, told_at=now, cause=finding.cause,
        )  # fmt: skip
        self._sinks.tell([alert_words.notice("new", self.alert, now)])

    def _over(self, worker: str, ago: float) -> None:
        """One more worker has its database back, for so many seconds; the last one ends the outage."""
        self._away.pop(worker, None)
        if self._away or self.alert is None:
            return
        now = self._app.now() - timedelta(seconds=ago)
        over = replace(self.alert, last_at=now, resolved_at=now)
        self.alert = None
        self._sinks.tell([alert_words.notice("resolved", over, now)])
