"""The demo's provider as a process of its own, its webhook beside it, and the log that tells the truth about both.

A `FakeProvider` does what every API does: OAuth with PKCE and rotation, idempotency keys, records in pages. This file
is the script of its troubles. ``POST /v1/{account}/{endpoint}`` stores a contact.

``python -m resilient.surface.demo.provider --log FILE`` listens on three ports of 127.0.0.1: the second belongs to the
account that goes down, the third to the webhook that takes events. While one is down nobody listens there and open
connections are cut, so a client gets what a dead host gives. The first line of standard output is ``{"steady": <port>,
"fragile": <port>, "sink": <port>}`` once all listen. It ends on SIGTERM, or when its standard input closes, which it
does when the parent dies.

The audit believes the log (one JSON object a line, written before the answer): ``t`` (epoch seconds), account,
endpoint, key, contact, decision, status, and for a request that came although its account or endpoint had been told to
wait, ``in_cooldown`` and ``late`` (seconds since that was said).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import signal
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import formatdate
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from standardwebhooks import Webhook, WebhookVerificationError

from resilient import Provider
from resilient.engine.ground.garbage import own_process
from resilient.surface.demo import accounts
from resilient.surface.demo.accounts import Plan
from resilient.surface.demo.app import PEOPLE, facts
from resilient.testing import FakeProvider, Reply
from resilient.testing.fake.meter import Sliding
from resilient.testing.fake.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from resilient.testing import Seen

_EMAIL: Final = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_PAGE: Final = 25  # records
_ANYWHERE: Final = dict.fromkeys(("steady", "fragile"), "http://localhost")  # a fake moves its facts
_ALWAYS: Final = sys.maxsize
_LONG_LIFE: Final = 60.0  # seconds
_TOKEN: Final = {"authorization_code": "connected", "refresh_token": "refreshed"}  # grant -> decision


# -- waits ------------------------------------------------------------------------------------------------------------


class Dialect(Enum):
    """One way of saying when to come back, as servers speak it.

    Retry-After in seconds and as an HTTP-date (RFC 9110, 10.2.3), ``retry-after-ms`` (OpenAI, Azure), the structured
    ``RateLimit`` fields (draft-ietf-httpapi-ratelimit-headers-10), and ``x-ratelimit-reset`` as epoch seconds (GitHub).
    """

    SECONDS = "retry-after: seconds"
    DATE = "retry-after: date"
    MILLISECONDS = "retry-after-ms"
    RATELIMIT = "ratelimit fields"
    EPOCH = "x-ratelimit-reset"

    def until(self, now: float, wait: float) -> float:
        """The end of a wait of at least ``wait`` seconds that this dialect can state (epoch seconds)."""
        if self in (Dialect.DATE, Dialect.EPOCH):
            return float(math.ceil(now + wait))
        return now + (wait if self is Dialect.MILLISECONDS else math.ceil(wait))


DIALECTS: Final = tuple(Dialect)


def wait_headers(dialect: Dialect, until: float, now: float, quota: int) -> dict[str, str]:
    """The fields of a 429 that say "not before ``until``" (epoch seconds)."""
    seconds = str(math.ceil(until - now))
    match dialect:
        case Dialect.SECONDS:
            return {"retry-after": seconds}
        case Dialect.DATE:
            return {"retry-after": formatdate(math.ceil(until), usegmt=True)}
        case Dialect.MILLISECONDS:
            return {"retry-after-ms": str(math.ceil((until - now) * 1000))}
        case Dialect.RATELIMIT:
            return {
                "ratelimit-policy": f'"burst";q={quota};w={seconds}',
                "ratelimit": f'"burst";r=0;t={seconds}',
            }
        case Dialect.EPOCH:
            return {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(math.ceil(until))}


@dataclass(slots=True)
class Quota:
    """``burst`` requests, then nothing for ``wait`` seconds; asking earlier does not make it longer."""

    burst: int
    wait: float
    rest: int = 0
    until: float = 0.0  # epoch seconds
    since: float = 0.0  # when the wait was announced
    waits: int = 0  # how many there were

    def __post_init__(self) -> None:
        self.rest = self.burst

    def take(self, now: float) -> bool:
        """Whether a request may pass; the first one that may not starts the wait."""
        if now < self.until:
            return False
        if self.until:
            self.rest, self.until = self.burst, 0.0
        if self.rest:
            self.rest -= 1
            return True
        self.waits += 1
        self.until, self.since = self.dialect.until(now, self.wait), now
        return False

    @property
    def dialect(self) -> Dialect:
        """The dialect of the latest wait."""
        return DIALECTS[(self.waits - 1) % len(DIALECTS)]


@dataclass(slots=True)
class Rate:
    """``burst`` requests in any second; what comes beyond that is told to wait for a second."""

    burst: int
    until: float = 0.0  # epoch seconds
    since: float = 0.0  # when the wait was announced
    dialect: Dialect = Dialect.SECONDS
    _passed: Sliding = field(init=False)

    def __post_init__(self) -> None:
        self._passed = Sliding(self.burst)

    def take(self, now: float) -> bool:
        """Whether a request may pass; one that may not starts the wait."""
        if now < self.until:
            return False
        if self._passed.ask(now) is None:
            return True
        self.until, self.since = self.dialect.until(now, 1.0), now
        return False


# -- the API ----------------------------------------------------------------------------------------------------------


class Troubled(FakeProvider):
    """The provider. ``go_down`` is called when the account that goes down should stop listening."""

    def __init__(self, plan: Plan, log: TextIO, go_down: Callable[[], None], **options: Any) -> None:
        super().__init__(
            facts(_ANYWHERE), enforce=False, lifetime=plan.token_stated, client_id=accounts.CLIENT_ID, **options
        )
        self.plan, self._file, self._go_down, self._rng = plan, log, go_down, random.Random()  # noqa: S311 - latency
        self.counts: dict[str, int] = {}  # account -> stored contacts
        self._past: set[str] = set()  # troubles that have begun: each comes once
        self._unavailable_until = self._outage_until = 0.0
        self._unavailable = 0  # answers
        limited = accounts.resource_key(accounts.LIMITED, accounts.LIMITED_ENDPOINT)
        throttled = accounts.resource_key(accounts.THROTTLED, accounts.ENDPOINT)
        self.quotas = {throttled: Quota(plan.burst, plan.wait), limited: Quota(plan.endpoint_burst, plan.wait)}
        self._rate = Rate(plan.allowed)
        self.on("POST /v1/*", self._push)
        outage = Reply(503, _error("outage", "we are looking into it"))
        self.fail_next(outage, times=_ALWAYS, on=self._is_out)
        maintenance = Reply(503, _error("unavailable", "down for maintenance"))
        self.fail_next(maintenance, times=_ALWAYS, on=self._is_down)
        slower = Reply(429, _error("rate_limited", "slow down"), {"retry-after": "1"})
        self.fail_next(slower, times=_ALWAYS, on=self._is_too_fast)

    def take(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> tuple[Seen, Reply]:
        """One request and its answer, logged. The owner at the consent page consents at once."""
        with self._lock:
            if owner := dict(part.split("=", 1) for part in query.split("&") if "=" in part).get("account"):
                self.consents(owner)
                self._have_people(owner)
            request, reply = super().take(method, path, query, headers, body)
            if request.what == "token" and reply.status == 200:  # noqa: PLR2004 - OK
                self._shorten(request.account, request.at)
            entry = self._entry(request, reply)
            self.write(entry)
            if entry["decision"] == "stored":
                self._after_storing(request.account, request.at)
            if entry["decision"] in ("stored", "repeated"):
                reply.delay = self.plan.latency * (0.5 + self._rng.random())
            return request, reply

    def write(self, entry: Mapping[str, Any]) -> None:
        """One line of the log."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def _push(self, request: Seen) -> Reply:
        """Store one contact."""
        _, _, account, endpoint = request.path.split("/")
        quota, now = self.quotas.get(accounts.resource_key(account, endpoint)), request.at.timestamp()
        if quota is not None and not quota.take(now):
            scope = "account" if endpoint == accounts.ENDPOINT else "endpoint"
            body = _error("rate_limited", f"too many requests for this {scope}", scope=scope)
            return Reply(429, body, wait_headers(quota.dialect, quota.until, now, quota.burst))
        email = str(request.json.get("email", ""))
        if not _EMAIL.fullmatch(email):
            return Reply(422, _error("invalid_email", f"{email!r} is not an e-mail address"))
        self.counts[account] = self.counts.get(account, 0) + 1
        silent = account == accounts.HEALTHY and self.counts[account] > self.plan.silent_after and self._once("silent")
        return Reply(201, {"contact": request.json["id"]}, fault="hang" if silent else "")

    def _entry(self, request: Seen, reply: Reply) -> dict[str, Any]:
        """The line about one request."""
        now = request.at.timestamp()
        entry: dict[str, Any] = {"t": now, "account": request.account, "status": reply.status}
        if request.what == "token":
            grant = re.search(rb"grant_type=(\w+)", request.body)
            good = grant is not None and reply.status == 200  # noqa: PLR2004 - OK
            return entry | {"decision": _TOKEN[grant[1].decode()] if grant is not None and good else "refused"}
        if request.what != "api":
            return entry | {"decision": "consented" if reply.status == 302 else "refused"}  # noqa: PLR2004 - found
        _, _, account, endpoint = request.path.split("/")
        entry |= {"account": account, "decision": _decision(request, reply)}
        entry["endpoint"] = endpoint
        if request.method != "GET":
            entry |= {"key": request.idempotency_key, "contact": request.json.get("id")}
        quota: Quota | Rate | None = self.quotas.get(accounts.resource_key(account, endpoint))
        if account == accounts.UNDECLARED:
            quota = self._rate
        if quota is not None and quota.since < now < quota.until:
            entry |= {"in_cooldown": True, "late": round(now - quota.since, 4)}
        if quota is not None and entry["decision"] == "throttled":
            entry |= {"dialect": quota.dialect.value, "until": quota.until}
        return entry

    # -- troubles --------------------------------------------------------------------------------------------

    def _after_storing(self, account: str, at: datetime) -> None:
        """The troubles that begin once so much is stored."""
        now, plan = at.timestamp(), self.plan
        if account == accounts.REVOKED and self.counts[account] >= plan.revoke_after and self._once("revoked"):
            self.revoke(account)
            self.write({"t": now, "decision": "revoked", "account": account})
        if sum(self.counts.values()) >= plan.outage_after and self._once("outage"):
            self._outage_until = now + plan.outage

    def _is_out(self, request: Seen) -> bool:
        """Whether the whole API answers 503; tokens are issued all the same."""
        return request.what == "api" and request.at.timestamp() < self._outage_until

    def _is_down(self, request: Seen) -> bool:
        """Whether the account that goes down answers 503; after that its port closes."""
        now = request.at.timestamp()
        if request.account != accounts.DOWN:
            return False
        if request.method == "GET":
            if self._unavailable < self.plan.unavailable_least:  # a good answer: a circuit counts anew
                self._unavailable = min(self._unavailable, 1)
            return False
        if self.counts.get(accounts.DOWN, 0) >= self.plan.down_after and self._once("down"):
            self._unavailable_until = now + self.plan.unavailable
            self._go_down()
        is_down = now < self._unavailable_until or 0 < self._unavailable < self.plan.unavailable_least
        self._unavailable += is_down
        return is_down

    def _is_too_fast(self, request: Seen) -> bool:
        """Whether the account whose limit nobody declared has had its requests of this second, of whatever kind."""
        is_counted = request.what == "api" and request.account == accounts.UNDECLARED
        return is_counted and not self._rate.take(request.at.timestamp())

    def _once(self, trouble: str) -> bool:
        """Whether a trouble begins now, for the first time."""
        first = trouble not in self._past
        self._past.add(trouble)
        return first

    def _shorten(self, account: str, at: datetime) -> None:
        """The access token just issued ends earlier than its answer states.

        An engine that only believes the clock would run into 401s, one that only believes 401s would waste requests.
        Where requests wait for a rate, with their token, the life of a few seconds would be over too often: its trouble
        is the rate alone.
        """
        life = _LONG_LIFE if account == accounts.UNDECLARED else self.plan.token_life
        token = self.account(account).access
        if token is not None:
            token.expires_at = at + timedelta(seconds=life)

    def _have_people(self, account: str) -> None:
        """What the account holds, from its first consent on."""
        if self._once(f"people of {account}"):
            items = [{"id": f"{account}-{n}"} for n in range(self.plan.people)]
            self.records(f"/v1/{account}/people", items, pages=PEOPLE, size=_PAGE)


def _decision(request: Seen, reply: Reply) -> str:
    if request.replayed:
        return "repeated"
    if reply.status == 503:  # noqa: PLR2004 - unavailable
        return str(reply.body["error"]["code"])
    if reply.status == 200:  # noqa: PLR2004 - OK
        return "listed"
    return {201: "stored", 401: "unauthorised", 422: "invalid", 429: "throttled"}.get(reply.status, "refused")


def _error(code: str, message: str, **more: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, **more}}


# -- the webhook ------------------------------------------------------------------------------------------------------


class Sink(FakeProvider):
    """Where the demo's events go: a webhook of another system, which is away for a while.

    It checks signatures as Standard Webhooks says. ``write`` takes one entry an event; ``go_away`` is called when
    ``away_after`` of them have come.
    """

    def __init__(
        self,
        secret: str,
        write: Callable[[Mapping[str, Any]], None],
        away_after: int,
        go_away: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(Provider(name="sink", base_url="http://localhost"), anonymous=True, **options)
        self._secret, self._write, self._away_after, self._go_away = secret, write, away_after, go_away
        self._events = 0
        self.on("POST /events", self._event)

    def _event(self, request: Seen) -> Reply:
        """Accept one event."""
        now = request.at.timestamp()
        try:
            event = Webhook(self._secret).verify(request.body, dict(request.headers))
        except WebhookVerificationError:
            self._write({"t": now, "decision": "forged"})
            return Reply(401, {"error": "signature"})
        entry = {"t": now, "decision": "event", "id": event["id"], "account": event["partitionkey"]}
        self._write(entry | {"number": int(event["sequence"]), "about": event["data"]["contact"]})
        self._events += 1
        if self._events == self._away_after:
            self._go_away()
        return Reply(202, {})


# -- the process ------------------------------------------------------------------------------------------------------


def serve(log: Path, plan: Plan, secret: str) -> None:
    """Run the provider and the webhook until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair

    def down() -> None:
        _later(plan.unavailable, fragile.refuse)
        _later(plan.unavailable + plan.refused, fragile.start)

    def away() -> None:
        sink.down(refuse=True)
        provider.write({"t": provider.now().timestamp(), "decision": "sink_away"})
        _later(plan.sink_away, back)

    def back() -> None:
        provider.write({"t": provider.now().timestamp(), "decision": "sink_back"})
        sink.up()

    with log.open("a", encoding="utf-8") as file:
        provider = Troubled(plan, file, down)
        fragile = Server(provider)
        # It goes a moment after the event that it was the last to accept: that answer may still leave.
        sink = Sink(secret, provider.write, plan.sink_away_after, lambda: _later(0.1, away))
        with provider, sink:
            fragile.start()
            ports = {"steady": _port(provider), "fragile": fragile.port, "sink": _port(sink)}
            sys.stdout.write(json.dumps(ports) + "\n")
            sys.stdout.flush()
            sys.stdin.buffer.read()


def _port(fake: FakeProvider) -> int:
    return int(fake.url.rpartition(":")[2])


def _later(seconds: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and serve."""
    if arguments is None:
        own_process()
    parser = argparse.ArgumentParser(description="The demo's provider")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--plan", type=json.loads, default={})
    parser.add_argument("--secret", required=True, help="of the webhook")
    options: Any = parser.parse_args(arguments)
    serve(options.log, Plan(**options.plan), options.secret)


if __name__ == "__main__":
    main()
