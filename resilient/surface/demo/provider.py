"""The demo's provider: what it decides about each request, and the log that tells the truth about it.

An ASGI application with ``POST /v1/{account}/{endpoint}``. It stores a contact once per ``Idempotency-Key``
and answers a known key as it did before. ``GET /v1/{account}/people`` lists what the account holds, page by page;
OAuth is in `oauth.py`. Its log (one JSON object a line, written before the answer) is
what the audit believes: ``t`` (epoch seconds), account, endpoint, key, contact, decision, status, and for a
request that came although its account or endpoint had been told to wait, ``in_cooldown`` and ``late``
(seconds since that was said).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TextIO

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from resilient.surface.demo import accounts
from resilient.surface.demo.oauth import Tokens
from resilient.surface.demo.waits import DIALECTS, wait_headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from resilient.surface.demo.accounts import Plan

_EMAIL: Final = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_PAGE: Final = 25  # records
_NEVER: Final = 30.0  # seconds until an unanswered request is dropped; longer than any client waits here


@dataclass(slots=True)
class Quota:
    """``burst`` requests, then nothing for ``wait`` seconds; asking earlier does not make it longer."""

    burst: int
    wait: float
    left: int = 0
    until: float = 0.0  # epoch seconds
    told_at: float = 0.0
    spent: int = 0  # how often

    def __post_init__(self) -> None:
        self.left = self.burst

    def take(self, now: float) -> bool:
        """Whether a request may pass; starts the wait when the last one was taken before."""
        if now < self.until:
            return False
        if self.until:
            self.left, self.until = self.burst, 0.0
        if self.left:
            self.left -= 1
            return True
        self.until, self.told_at = DIALECTS[self.spent % len(DIALECTS)].until(now, self.wait), now
        self.spent += 1
        return False


@dataclass(slots=True)
class Provider:
    """The provider's memory. ``go_down`` is called when the account that goes down should stop listening."""

    plan: Plan
    log: TextIO
    go_down: Callable[[], None]
    clock: Callable[[], float] = time.time
    stored: dict[str, str] = field(default_factory=dict)  # idempotency key -> contact
    counts: dict[str, int] = field(default_factory=dict)  # account -> stored contacts
    quotas: dict[str, Quota] = field(default_factory=dict)
    unavailable_until: float = 0.0
    was_down: bool = False
    was_silent: bool = False
    outage_until: float = 0.0  # of the whole provider
    was_out: bool = False
    was_revoked: bool = False
    tokens: Tokens = field(init=False)
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        plan = self.plan
        self.tokens = Tokens(plan.token_told, plan.token_lives, self.clock, self.write)
        limited = accounts.resource_key(accounts.LIMITED, accounts.LIMITED_ENDPOINT)
        self.quotas[accounts.resource_key(accounts.THROTTLED, accounts.ENDPOINT)] = Quota(plan.burst, plan.wait)
        self.quotas[limited] = Quota(plan.endpoint_burst, plan.wait)

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/oauth/authorize", self.tokens.authorize),
                Route("/oauth/token", self.tokens.token, methods=["POST"]),
                Route("/v1/{account}/people", self.people),
                Route("/v1/{account}/{endpoint}", self.push, methods=["POST"]),
            ]
        )

    async def people(self, request: Request) -> JSONResponse:
        """A page of the account's records, ``after`` some number; ``next`` is where the following one begins."""
        account, first = request.path_params["account"], int(request.query_params.get("after", "0"))
        entry = {"t": self.clock(), "account": account, "page": first}
        if (refused := self._refuse_all(request, account, entry["t"])) is not None:
            decision, response = refused
        else:
            last = min(first + _PAGE, self.plan.people)
            records = [{"id": f"{account}-{n}"} for n in range(first, last)]
            left = last < self.plan.people
            decision, response = "listed", JSONResponse({"people": records, "next": str(last) if left else None})
        self.write(entry | {"decision": decision, "status": response.status_code})
        return response

    async def push(self, request: Request) -> JSONResponse:
        """Store one contact."""
        account, endpoint = request.path_params["account"], request.path_params["endpoint"]
        contact = await request.json()
        entry = {
            "t": self.clock(), "account": account, "endpoint": endpoint,
            "key": request.headers.get("idempotency-key"), "contact": contact.get("id"),
        }  # fmt: skip
        decision, response = self._refuse_all(request, account, entry["t"]) or self._decide(entry, contact)
        self.write(entry | {"decision": decision, "status": response.status_code})
        if decision == "stored":
            self._after_storing(account)
        if decision == "stored" and account == accounts.HEALTHY and self._falls_silent():
            await asyncio.sleep(_NEVER)
        elif decision in ("stored", "repeated"):
            await asyncio.sleep(self.plan.latency * (0.5 + self.rng.random()))
        return response

    def write(self, entry: dict[str, Any]) -> None:
        """One line of the log."""
        self.log.write(json.dumps(entry) + "\n")
        self.log.flush()

    def _refuse_all(self, request: Request, account: str, now: float) -> tuple[str, JSONResponse] | None:
        """What concerns every request: the provider's outage, and tokens that are not good."""
        if now < self.outage_until:
            return "outage", _error(503, "outage", "we are looking into it")
        if not self.tokens.good(request.headers.get("authorization"), account):
            return "unauthorised", _error(401, "invalid_token", "the access token is not good (any more)")
        return None

    def _after_storing(self, account: str) -> None:
        """What happens to this provider once so much was stored."""
        if account == accounts.REVOKED and not self.was_revoked and self.counts[account] >= self.plan.revoke_after:
            self.was_revoked = True
            self.tokens.revoke(account)
        if not self.was_out and len(self.stored) >= self.plan.outage_after:
            self.was_out, self.outage_until = True, self.clock() + self.plan.outage

    def _decide(self, entry: dict[str, Any], contact: dict[str, Any]) -> tuple[str, JSONResponse]:
        account, key, now = entry["account"], entry["key"], entry["t"]
        if account == accounts.DOWN and self._is_down(now):
            return "unavailable", _error(503, "unavailable", "down for maintenance")
        if (refused := self._refuse(entry, now)) is not None:
            return "throttled", refused
        return self._store(account, key, contact)

    def _store(self, account: str, key: str | None, contact: dict[str, Any]) -> tuple[str, JSONResponse]:
        if not key:
            return "no_key", _error(400, "idempotency_key_required", "send an Idempotency-Key")
        if (known := self.stored.get(key)) is not None:
            if known != contact.get("id"):
                return "key_reused", _error(409, "idempotency_key_reused", "that key was used for another contact")
            return "repeated", JSONResponse({"contact": known, "repeated": True})
        if not _EMAIL.fullmatch(str(contact.get("email", ""))):
            return "invalid", _error(422, "invalid_email", f"{contact.get('email')!r} is not an e-mail address")
        self.stored[key] = contact["id"]
        self.counts[account] = self.counts.get(account, 0) + 1
        return "stored", JSONResponse({"contact": contact["id"]}, status_code=201)

    def _refuse(self, entry: dict[str, Any], now: float) -> JSONResponse | None:
        """429 if the account or the endpoint must wait; the log entry tells whether it knew."""
        quota = self.quotas.get(accounts.resource_key(entry["account"], entry["endpoint"]))
        if quota is None:
            return None
        if told := now < quota.until:
            entry |= {"in_cooldown": True, "late": round(now - quota.told_at, 4)}
        if not told and quota.take(now):
            return None
        dialect = DIALECTS[(quota.spent - 1) % len(DIALECTS)]
        entry |= {"dialect": dialect.value, "until": quota.until}
        scope = "account" if entry["endpoint"] == accounts.ENDPOINT else "endpoint"
        answer = _error(429, "rate_limited", f"too many requests for this {scope}", scope=scope)
        answer.headers.update(wait_headers(dialect, quota.until, now, quota.burst))
        return answer

    def _is_down(self, now: float) -> bool:
        if not self.was_down and self.counts.get(accounts.DOWN, 0) >= self.plan.down_after:
            self.was_down, self.unavailable_until = True, now + self.plan.unavailable
            self.go_down()
        return now < self.unavailable_until

    def _falls_silent(self) -> bool:
        if self.was_silent or self.counts[accounts.HEALTHY] <= self.plan.silent_after:
            return False
        self.was_silent = True
        return True


def _error(status: int, code: str, message: str, **more: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message, **more}}, status_code=status)
