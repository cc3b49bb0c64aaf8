"""What a test tells a fake provider to do wrong, and what it counts: the part of `FakeProvider` that tests talk to."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from resilient.core.failure import FailureKind
from resilient.testing.fake.log import Log
from resilient.testing.fake.script import Outage, Throttle, Trouble

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from resilient.core.failure import Scope
    from resilient.testing.fake.log import Reply
    from resilient.testing.fake.script import Fault, On
    from resilient.testing.fake.server import Server


class Scripted:
    """Troubles to come, and the log. Every method may be called from any thread."""

    def __init__(self, server: Server | None) -> None:
        self._lock = threading.RLock()
        self._server = server
        self.log = Log()
        self.refusing = False  # connections
        self._changes = Log()
        self._troubles: list[Trouble] = []
        self._throttles: list[Throttle] = []
        self._outages: list[Outage] = []
        self._held: list[On] = []

    def now(self) -> datetime:
        """The provider's own clock."""
        raise NotImplementedError

    def fail_next(
        self,
        what: FailureKind | int | Fault | Reply = FailureKind.TRANSIENT,
        *,
        times: int = 1,
        on: On = "api",
        account: str | None = None,
        wait: float | None = None,
        scope: Scope | None = None,
        code: str = "",
        status: int = 502,
    ) -> None:
        """The next requests go wrong, ``times`` of them.

        ``what``: a kind, in the provider's own words (with ``wait`` seconds told, a ``scope``, a ``code``); a status,
        with a page of HTML; a `Reply`; or ``lost`` (done, but the connection is closed without an answer),
        ``dropped`` (closed before anything was done), ``cut``, ``slow``, ``endless``, ``hang``, ``html`` (with
        ``status``). ``on``: ``api``, ``token``, ``revoke``, ``part`` (of a batch),
        ``"POST /v1/*"``, or a function of the `Seen` request.
        """
        trouble = Trouble(what, times, on, account, wait, scope, code, status)
        with self._lock:
            self._troubles.append(trouble)

    def throttle(
        self,
        for_: float,
        *,
        account: str | None = None,
        on: On = "api",
        kind: Literal[FailureKind.THROTTLED, FailureKind.QUOTA] = FailureKind.THROTTLED,
        scope: Scope | None = None,
    ) -> None:
        """Refuse requests for ``for_`` seconds, telling each how long it still is."""
        with self._lock:
            self._throttles.append(Throttle(self.now() + timedelta(seconds=for_), kind, on, account, scope))

    def down(
        self, for_: float | None = None, *, status: int = 503, account: str | None = None, refuse: bool = False
    ) -> None:
        """An outage, of one account or all, until `up` or for some seconds; ``refuse``: not even connections."""
        if refuse:
            self.refusing = True
            if self._server is not None:
                self._server.refuse()
            return
        until = None if for_ is None else self.now() + timedelta(seconds=for_)
        with self._lock:
            self._outages.append(Outage(status, until, account))

    def up(self) -> None:
        """The outage is over; throttles and troubles to come are forgotten too."""
        with self._lock:
            self._outages.clear()
            self._throttles.clear()
            self._troubles.clear()
        if self.refusing:
            self.refusing = False
            if self._server is not None:
                self._server.start()

    @contextmanager
    def hold(self, on: On = "*") -> Iterator[None]:
        """Within the block requests are acted on, but their answers wait for its end (30 s at most)."""
        self._held.append(on)
        try:
            yield
        finally:
            self._held.remove(on)

    # -- counts ----------------------------------------------------------------------------------------------

    @property
    def early(self) -> int:
        """Requests that came although the provider had told somebody to wait."""
        return len(self.log.where(early=True))

    @property
    def over_admitted(self) -> int:
        """Requests that broke one of its limits."""
        return len(self.log.where(over=True))

    @property
    def performed(self) -> Log:
        """Requests that changed something: neither read nor refused nor answered out of memory."""
        return Log(self._changes)

    @property
    def duplicates(self) -> int:
        """Changes that were made more than once: same account, request and body."""
        every = [(one.account, one.target, one.body) for one in self._changes]
        return len(every) - len(set(every))
