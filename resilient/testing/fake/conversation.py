"""How a fake provider comes to an answer: who asks, may they, within which limits, and what is there.

In order, as at a real one: the account by its credentials; credentials that are refused; the memory for idempotency
keys; limits and requests in flight; then what the path has: a route, a list of records, a batch.
"""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core.classify import classify
from resilient.core.errors import InvalidInput
from resilient.core.exchange import AnswerFacts, RequestFacts
from resilient.core.failure import FailureKind, Scope, at_scope
from resilient.core.resource_key import path as path_of
from resilient.testing.fake.answers import Voice, compose, facts_of
from resilient.testing.fake.log import Reply, Seen, query_of
from resilient.testing.fake.script import Route, fits

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from resilient.core.provider import Provider
    from resilient.testing.fake.accounts import Accounts
    from resilient.testing.fake.meter import Meter
    from resilient.testing.fake.pages import Records

_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_WAITS: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA})
_ANYBODY: Final = "account"


class Conversation:
    """The API itself. Its owner holds a lock around every call."""

    def __init__(
        self, provider: Provider, accounts: Accounts, meter: Meter | None, origin: str, performed: list[Seen]
    ) -> None:
        self._provider, self._accounts, self._meter, self._origin = provider, accounts, meter, origin
        self.routes: list[Route] = []
        self.lists: list[Records] = []
        self.performed = performed
        self._memory: dict[tuple[str, str], tuple[datetime, Reply]] = {}
        self._told: dict[str, datetime] = {}  # by resource: until when somebody was told to wait
        self._inside: set[int] = set()  # requests in flight, by identity
        self._good: dict[int, bool] = {}

    # -- who asks --------------------------------------------------------------------------------------------

    def recognise(self, seen: Seen, now: datetime) -> None:
        """Fill in whose request it is, what it draws on and its key."""
        if seen.what not in ("api", "part"):
            return
        account, good = self._accounts.bearer(seen.headers, seen.query, now)
        seen.account = "" if account is None else account.name
        self._good[id(seen)] = good or self._provider.anonymous or not self._provider.auth
        asked = self._asked(seen)
        base = f"{self._provider.name}/{seen.account or _ANYBODY}"
        suffix, cost = self._provider.route(asked) if self._provider.route is not None else ("", 1.0)
        seen.key, seen.cost = (f"{base}/{suffix}" if suffix else base), cost
        idem = self._provider.idempotency
        if idem is not None and idem.covers(seen.method, seen.path):
            key = seen.query.get(idem.query) if idem.query else seen.headers.get(idem.header.lower())
            seen.idempotency_key = key.strip('"') if key else None
        seen.early = any(now < self._told.get(level, now) for level in path_of(seen.key))

    def leave(self, seen: Seen) -> None:
        """It is over."""
        if id(seen) in self._inside and self._meter is not None:
            self._inside.discard(id(seen))
            self._meter.enter(seen.key, -1)
        self._good.pop(id(seen), None)

    # -- answers ---------------------------------------------------------------------------------------------

    def answer(self, seen: Seen, now: datetime, part: Callable[[Seen, datetime], Reply] | None) -> Reply:
        """The answer, unless a script said otherwise."""
        if not self._good.get(id(seen), True):
            return self.fail(seen, FailureKind.AUTH, now, self.voice(seen, now))
        batch = self._batch(seen) if part is not None else None
        if batch is None:
            refused = self._limited(seen, now)
            if refused is not None:
                return refused
        remembered = self._remembered(seen, now)
        if remembered is not None:
            seen.replayed = True
            return remembered
        if batch is not None and part is not None:
            return self._in_parts(seen, batch, now, part)
        reply = self._found(seen, now)
        if self._meter is not None:
            reply.headers = {**self._meter.headers(seen.key, now), **reply.headers}
        self.note(seen, reply, now)
        if seen.kind is None and not (seen.method in _READS or self._provider.is_read(seen.method, seen.path)):
            self.performed.append(seen)
        if seen.idempotency_key:
            self._memory[seen.account, seen.idempotency_key] = (now, reply)
        return reply

    def fail(
        self,
        seen: Seen,
        kind: FailureKind,
        now: datetime,
        voice: Voice,
        *,
        wait: float | None = None,
        scope: Scope | None = None,
        code: str = "",
    ) -> Reply:
        """An answer that means ``kind`` here."""
        reply, failure = compose(voice, kind, wait=wait, scope=scope, code=code)
        reply.headers = {**voice.headers, **reply.headers}
        seen.kind = kind
        if kind in _WAITS and failure.retry_in is not None and seen.key:
            self._told[at_scope(seen.key, failure.scope)] = now + timedelta(seconds=failure.retry_in)
        return reply

    def note(self, seen: Seen, reply: Reply, now: datetime) -> None:
        """Put down what an answer means, and until when it told to wait."""
        voice = self.voice(seen, now)
        failure = voice.judge(facts_of(reply, voice))
        seen.kind = None if failure is None else failure.kind
        if failure is not None and failure.kind in _WAITS and failure.retry_in is not None:
            self._told[at_scope(seen.key, failure.scope)] = now + timedelta(seconds=failure.retry_in)

    def voice(self, seen: Seen, now: datetime) -> Voice:
        """The API's dialect, about one request."""
        provider, asked, meter = self._provider, self._asked(seen), self._meter

        def judge(answer: AnswerFacts) -> Any:
            return classify(answer, asked, provider, now)

        headers = meter.headers(seen.key, now) if meter is not None else {}
        spent = meter.headers(seen.key, now, spent=True) if meter is not None else {}
        return Voice(provider.errors, provider.waits, judge, now, headers, spent)

    # -- inside ----------------------------------------------------------------------------------------------

    def _asked(self, seen: Seen) -> RequestFacts:
        idem = self._provider.idempotency
        safe = (
            seen.method in _READS or seen.method in ("PUT", "DELETE") or self._provider.is_read(seen.method, seen.path)
        )
        keyed = idem is not None and idem.covers(seen.method, seen.path)
        return RequestFacts(
            seen.method, f"{self._origin}{seen.path}", "localhost", seen.path, key=seen.key, cost=seen.cost,
            body=seen.body, headers=seen.headers, repeatable=safe or keyed,
        )  # fmt: skip

    def _limited(self, seen: Seen, now: datetime) -> Reply | None:
        meter = self._meter
        if meter is None:
            return None
        crowded = meter.crowded(seen.key)
        refused = None if crowded else meter.draw(seen.key, seen.cost, now)
        if crowded is None and refused is None:
            if seen.what == "api":
                meter.enter(seen.key)
                self._inside.add(id(seen))
            return None
        seen.over = True
        where = crowded or (refused.key if refused is not None else seen.key)
        wait = 1.0 if refused is None else refused.wait
        scope = (Scope.PROVIDER, Scope.ACCOUNT, Scope.ENDPOINT)[min(where.count("/"), 2)]
        kinds = [FailureKind.THROTTLED, FailureKind.QUOTA]
        if refused is not None and refused.limit.per >= 3600:  # noqa: PLR2004 - an hour
            kinds.reverse()
        voice = self.voice(seen, now)
        with contextlib.suppress(InvalidInput):
            return self.fail(seen, kinds[0], now, voice, wait=wait, scope=scope)
        return self.fail(seen, kinds[1], now, voice, wait=wait, scope=scope)

    def _remembered(self, seen: Seen, now: datetime) -> Reply | None:
        if not seen.idempotency_key:
            return None
        found = self._memory.get((seen.account, seen.idempotency_key))
        life = None if self._provider.idempotency is None else self._provider.idempotency.life
        if found is None or (life is not None and now > found[0] + timedelta(seconds=life)):
            return None
        reply = found[1]
        return Reply(reply.status, reply.body, dict(reply.headers))

    def _found(self, seen: Seen, now: datetime) -> Reply:
        for route in self.routes:
            if fits(route.on, seen):
                return route.reply(seen)
        for one in self.lists:
            if one.covers(seen.path):
                reply = one.answer(seen, self._origin)
                return reply or self.fail(seen, FailureKind.RESET_CURSOR, now, self.voice(seen, now))
        said = f"the fake {self._provider.name} has nothing at {seen.target}: fake.on({seen.target!r}, {{...}})"
        return Reply(404, {"message": said})

    def _batch(self, seen: Seen) -> list[Any] | None:
        """The parts of a batch; None for any other request."""
        facts = self._provider.batch
        if facts is None or seen.what != "api" or not seen.path.endswith(facts.path) or seen.method != "POST":
            return None
        found = seen.json.get(facts.requests) if isinstance(seen.json, dict) else None
        return found if isinstance(found, list) else None

    def _in_parts(self, seen: Seen, parts: list[Any], now: datetime, part: Callable[[Seen, datetime], Reply]) -> Reply:
        facts = self._provider.batch
        assert facts is not None  # noqa: S101 - it is a batch
        if len(parts) > facts.most:
            return Reply(400, {"error": {"code": "BadRequest", "message": f"at most {facts.most} parts"}})
        base = seen.path.removesuffix(facts.path)
        answers = []
        for one in parts:
            path, _, query = str(one["url"]).partition("?")
            body = one.get("body")
            inner = Seen(
                at=now, method=one["method"], path=f"{base}/{path.lstrip('/')}", query=query_of(query),
                headers={**seen.headers, **{str(k).lower(): str(v) for k, v in one.get("headers", {}).items()}},
                body=b"" if body is None else json.dumps(body).encode(), what="part",
            )  # fmt: skip
            self.recognise(inner, now)
            reply = part(inner, now)
            answers.append({"id": one["id"], "status": reply.status, "headers": reply.headers, "body": reply.body})
        return Reply(200, {facts.responses: answers})
