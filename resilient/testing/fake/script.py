"""What a test told a fake provider to do, and to which requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core.failure import FailureKind
from resilient.testing.fake.answers import PAGE
from resilient.testing.fake.log import Reply

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.failure import Scope
    from resilient.testing.fake.log import Seen

Fault = Literal["lost", "dropped", "cut", "slow", "endless", "hang", "html"]
_WORDS: Final = frozenset({"api", "part", "token", "authorize", "revoke"})
_FAULTS: Final = frozenset({"lost", "dropped", "cut", "slow", "endless", "hang", "html"})


On = str | Callable[["Seen"], bool]


def fits(on: On, seen: Seen) -> bool:
    """Whether a request is one of those ``on`` names: ``api``, ``token`` ..., ``"POST /v1/*"``, or ``"/v1/*"``.

    Paths are whole or below the base URL. A function of the `Seen` request may say so as well.
    """
    if callable(on):
        return on(seen)
    if on in _WORDS:
        return seen.what == on or (on == "api" and seen.what == "part")
    if on == "*":
        return True
    paths = {seen.path, seen.below or seen.path}
    return any(fnmatchcase(f"{seen.method} {path}" if " " in on else path, on) for path in paths)


@dataclass(slots=True)
class Trouble:
    """One thing that shall go wrong, ``times`` times."""

    what: FailureKind | int | Fault | Reply
    times: int
    on: On = "api"
    account: str | None = None
    wait: float | None = None
    scope: Scope | None = None
    code: str = ""
    status: int = 502

    def takes(self, seen: Seen) -> bool:
        """Whether it is this request's turn."""
        return self.times > 0 and fits(self.on, seen) and self.account in (None, seen.account)

    @property
    def performs(self) -> bool:
        """Whether the request is acted on, and only its answer goes wrong."""
        return self.what in ("lost", "cut", "slow", "endless")

    def reply(self) -> Reply | None:
        """The answer, where it does not depend on the provider's dialect."""
        if isinstance(self.what, Reply):
            return Reply(self.what.status, self.what.body, dict(self.what.headers), self.what.fault, self.what.pace)
        if self.what == "html":
            return Reply(self.status, PAGE.format(status=self.status))
        if self.what == "dropped":
            return Reply(fault="lost")
        if self.what == "hang":
            return Reply(fault="hang")
        if isinstance(self.what, int):
            return Reply(self.what, PAGE.format(status=self.what))
        return None

    def __post_init__(self) -> None:
        if isinstance(self.what, str) and not isinstance(self.what, FailureKind) and self.what not in _FAULTS:
            raise ValueError(f"fail_next({self.what!r}): a FailureKind, a status, a Reply, or one of {sorted(_FAULTS)}")


@dataclass(slots=True)
class Throttle:
    """Until when requests of whom are refused."""

    until: datetime
    kind: FailureKind = FailureKind.THROTTLED
    on: On = "api"
    account: str | None = None
    scope: Scope | None = None

    def takes(self, seen: Seen, now: datetime) -> bool:
        """Whether it refuses this request."""
        return now < self.until and fits(self.on, seen) and self.account in (None, seen.account)


@dataclass(slots=True)
class Route:
    """What answers ``on``: a `Reply`, JSON, or a function of the request that gives one of them."""

    on: On
    answer: Any

    def reply(self, seen: Seen) -> Reply:
        """The answer, a new one each time."""
        found = self.answer(seen) if callable(self.answer) else self.answer
        if isinstance(found, Reply):
            return Reply(found.status, found.body, dict(found.headers), found.fault, found.pace)
        return Reply(200, found)


@dataclass(slots=True)
class Outage:
    """Nobody is served until ``until`` (None: until told)."""

    status: int
    until: datetime | None = None
    account: str | None = None
    body: str = field(default=PAGE)

    def takes(self, seen: Seen, now: datetime) -> bool:
        """Whether it hits this request."""
        return self.account in (None, seen.account) and (self.until is None or now < self.until)
