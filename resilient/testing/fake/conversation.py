"""How a fake provider comes to an answer: who asks, may they, within which limits, and what is there.

In order, as at a real one: the account by its credentials; credentials that are refused; the memory for idempotency
keys; limits and requests in flight; then what the path has: a route, a list of records, a batch. What a test has
ordered to go wrong (`Trouble`, `Throttle`, `Outage`) comes before all of these.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core.base.errors import FailureKind, InvalidInput, Scope, at_scope
from resilient.core.base.exchange import AnswerFacts, RequestFacts
from resilient.core.base.loggers import logger
from resilient.core.base.resource_key import path as path_of
from resilient.core.provider.classify import classify
from resilient.testing.fake.answers import PAGE, ErrorDialect, compose, facts_of
from resilient.testing.fake.server import Reply, Seen, query_of

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.provider.facts import Provider
    from resilient.testing.fake.accounts import Accounts, Family
    from resilient.testing.fake.meter import Allowance, Meter
    from resilient.testing.fake.pages import Records

_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_WAITS: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA})
_ANYBODY: Final = "account"
Memorable = tuple[str, "Family | None", str, "str | None"]  # account, consent, place and key: what a key is known by


Fault = Literal["lost", "dropped", "cut", "slow", "endless", "hang", "html"]
_WORDS: Final = frozenset({"api", "part", "token", "authorize", "revoke"})
_FAULTS: Final = frozenset({"lost", "dropped", "cut", "slow", "endless", "hang", "html"})


On = str | Callable[["Seen"], bool]
_NAMED: Final = re.compile(r"\*|[/*].*|[A-Z*]+ [/*].*")
_LOG: Final = logger("resilient.testing")


def require_on(on: On) -> None:
    """Raises `InvalidInput` for words that no request can fit: what a test says of them would never come."""
    if not callable(on) and on not in _WORDS and not _NAMED.fullmatch(on):
        words = ", ".join(sorted(_WORDS))
        raise InvalidInput(f"no request is {on!r}: say 'POST /v1/*', '/v1/*', '*', a function, or one of {words}")


def fits(on: On, request: Seen) -> bool:
    """Whether a request is one of those ``on`` names: ``api``, ``token`` ..., ``"POST /v1/*"``, or ``"/v1/*"``.

    Paths are whole or below the base URL. A function of the `Seen` request may say so as well.
    """
    if callable(on):
        return on(request)
    if on in _WORDS:
        return request.what == on or (on == "api" and request.what == "part")
    if on == "*":
        return True
    paths = {request.path, request.below or request.path}
    return any(fnmatchcase(f"{request.method} {path}" if " " in on else path, on) for path in paths)


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

    def takes(self, request: Seen) -> bool:
        """Whether it is this request's turn."""
        return self.times > 0 and fits(self.on, request) and self.account in (None, request.account)

    @property
    def performs(self) -> bool:
        """Whether the request is acted on, and only its answer goes wrong."""
        return self.what in ("lost", "cut", "slow", "endless")

    def reply(self) -> Reply | None:
        """The answer, where it does not depend on the provider's dialect."""
        if isinstance(self.what, Reply):
            return Reply(
                self.what.status,
                self.what.body,
                dict(self.what.headers),
                self.what.fault,
                self.what.pace,
                self.what.delay,
            )
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
        is_status = isinstance(self.what, int) and 200 <= self.what <= 599  # noqa: PLR2004 - what HTTP has
        is_kind = isinstance(self.what, FailureKind | Reply)
        if not (is_status or is_kind or self.what in _FAULTS):
            raise ValueError(f"fail_next({self.what!r}): a FailureKind, a status, a Reply, or one of {sorted(_FAULTS)}")
        if self.times < 1:
            raise InvalidInput(f"fail_next(times={self.times!r}) never fails")
        require_on(self.on)


@dataclass(slots=True)
class Throttle:
    """Requests that are refused until a time."""

    until: datetime
    kind: FailureKind = FailureKind.THROTTLED
    on: On = "api"
    account: str | None = None
    scope: Scope | None = None

    def takes(self, request: Seen, now: datetime) -> bool:
        """Whether it refuses this request."""
        return now < self.until and fits(self.on, request) and self.account in (None, request.account)


@dataclass(slots=True)
class Route:
    """What answers ``on``: a `Reply`, JSON, or a function of the request that gives one of them."""

    on: On
    answer: Any

    def reply(self, request: Seen) -> Reply:
        """The answer, a new one each time."""
        try:
            answer = self.answer(request) if callable(self.answer) else self.answer
        except Exception:
            _LOG.exception("the answer of the test's own to %s raised", request.target)
            raise  # to a client on the port it is a 500
        if isinstance(answer, Reply):
            return Reply(answer.status, answer.body, dict(answer.headers), answer.fault, answer.pace, answer.delay)
        return Reply(200, answer)


@dataclass(slots=True)
class Outage:
    """Every request is answered with ``status`` until ``until`` (None: until `FakeProvider.up`)."""

    status: int
    until: datetime | None = None
    account: str | None = None
    body: str = field(default=PAGE)

    def takes(self, request: Seen, now: datetime) -> bool:
        """Whether it hits this request."""
        return self.account in (None, request.account) and (self.until is None or now < self.until)


# -- conversation -----------------------------------------------------------------------------------------------------


class Conversation:
    """The API itself. Its owner holds a lock around every call."""

    def __init__(
        self,
        provider: Provider,
        accounts: Accounts,
        meter: Meter | None,
        origin: str,
        performed: list[Seen],
        allowance: Callable[[str], Allowance] | None = None,
        budget: Callable[[str], str] | None = None,
    ) -> None:
        self._budget = budget
        self._provider, self._accounts, self._meter, self._origin = provider, accounts, meter, origin
        self.routes: list[Route] = []
        self.lists: list[Records] = []
        self.performed = performed
        self._memory: dict[Memorable, tuple[datetime, Reply]] = {}
        self._memorable: dict[int, Memorable] = {}  # by identity of the request
        self._wait_ends: dict[str, datetime] = {}  # by resource: until when somebody was told to wait
        self._inside: set[int] = set()  # requests in flight, by identity
        self._good: dict[int, bool] = {}
        self._make_allowance = allowance
        self._allowances: dict[str, Allowance] = {}
        self._let_through: dict[int, Allowance] = {}
        self._epoch: datetime | None = None  # of allowances: the first request

    # -- who asks --------------------------------------------------------------------------------------------

    def recognise(self, request: Seen, now: datetime) -> None:
        """Fill in whose request it is, what it draws on and its key."""
        if request.what not in ("api", "part"):
            return
        account, consent, good = self._accounts.bearer(request.headers, request.query, now)
        request.account = "" if account is None else account.name
        self._good[id(request)] = good or self._provider.anonymous or not self._provider.auth
        facts = self._facts_of(request)
        base = f"{self._provider.name}/{request.account or _ANYBODY}"
        suffix, cost = self._provider.route(facts) if self._provider.route is not None else ("", 1.0)
        request.key, request.cost = (f"{base}/{suffix}" if suffix else base), cost
        idem = self._provider.idempotency
        if idem is not None and idem.covers(request.method, request.path):
            request.idempotency_key = idem.key_of(request.path, request.headers, request.query)
            of_grant = consent if idem.lives_with == "grant" else None
            place = request.path if idem.in_path else ""
            self._memorable[id(request)] = (request.account, of_grant, place, request.idempotency_key)
        request.early = any(now < self._wait_ends.get(level, now) for level in path_of(request.key))

    def leave(self, request: Seen) -> None:
        """End a request: it is no longer in flight."""
        if id(request) in self._inside and self._meter is not None:
            self._inside.discard(id(request))
            self._meter.enter(request.key, -1)
        self._good.pop(id(request), None)
        self._memorable.pop(id(request), None)
        if (allowance := self._let_through.pop(id(request), None)) is not None:
            allowance.leave(0.0)

    # -- answers ---------------------------------------------------------------------------------------------

    def answer(self, request: Seen, now: datetime, part: Callable[[Seen, datetime], Reply] | None) -> Reply:
        """The answer, if no trouble of the script decides."""
        if not self._good.get(id(request), True):
            return self.fail(request, FailureKind.AUTH, now, self.dialect(request, now))
        batch = self._batch(request) if part is not None else None
        if batch is None:
            refused = self._limited(request, now) or self._unannounced(request, now)
            if refused is not None:
                return refused
        remembered = self._remembered(request, now)
        if remembered is not None:
            request.replayed = True
            return remembered
        if batch is not None and part is not None:
            return self._in_parts(request, batch, now, part)
        reply = self._content(request, now)
        if self._meter is not None:
            reply.headers = {**self._meter.headers(request.key, now), **self._named(request), **reply.headers}
        self.note(request, reply, now)
        if request.kind is None and not (
            request.method in _READS or self._provider.is_read(request.method, request.path)
        ):
            self.performed.append(request)
        if (
            request.idempotency_key and request.kind not in _WAITS
        ):  # who is told to wait may come again with the same key
            self._memory[self._memorable[id(request)]] = (now, reply)
        return reply

    def fail(
        self,
        request: Seen,
        kind: FailureKind,
        now: datetime,
        dialect: ErrorDialect,
        *,
        wait: float | None = None,
        scope: Scope | None = None,
        code: str = "",
    ) -> Reply:
        """An answer that means ``kind`` here."""
        reply, failure = compose(dialect, kind, wait=wait, scope=scope, code=code)
        reply.headers = {**dialect.headers, **reply.headers}
        request.kind = kind
        if kind in _WAITS and failure.retry_in is not None and request.key:
            self._wait_ends[at_scope(request.key, failure.scope)] = now + timedelta(seconds=failure.retry_in)
        return reply

    def note(self, request: Seen, reply: Reply, now: datetime) -> None:
        """Record what an answer means, and until when it announces a wait."""
        dialect = self.dialect(request, now)
        failure = dialect.judge(facts_of(reply, dialect))
        request.kind = None if failure is None else failure.kind
        if failure is not None and failure.kind in _WAITS and failure.retry_in is not None:
            self._wait_ends[at_scope(request.key, failure.scope)] = now + timedelta(seconds=failure.retry_in)

    def dialect(self, request: Seen, now: datetime) -> ErrorDialect:
        """The API's dialect, about one request."""
        provider, facts, meter = self._provider, self._facts_of(request), self._meter

        def judge(answer: AnswerFacts) -> Any:
            return classify(answer, facts, provider, now)

        headers = meter.headers(request.key, now) if meter is not None else {}
        spent = meter.headers(request.key, now, spent=True) if meter is not None else {}
        return ErrorDialect(provider.errors, provider.waits, judge, now, headers, spent)

    # -- inside ----------------------------------------------------------------------------------------------

    def _facts_of(self, request: Seen) -> RequestFacts:
        idem = self._provider.idempotency
        safe = (
            request.method in _READS
            or request.method in ("PUT", "DELETE")
            or self._provider.is_read(request.method, request.path)
        )
        keyed = idem is not None and idem.covers(request.method, request.path)
        return RequestFacts(
            request.method, f"{self._origin}{request.path}", "localhost", request.path, key=request.key,
            cost=request.cost,
            body=request.body, headers=request.headers, repeatable=safe or keyed,
        )  # fmt: skip

    def _limited(self, request: Seen, now: datetime) -> Reply | None:
        meter = self._meter
        if meter is None:
            return None
        crowded = meter.crowded(request.key)
        refused = None if crowded else meter.draw(request.key, request.cost, now)
        if crowded is None and refused is None:
            if request.what == "api":
                meter.enter(request.key)
                self._inside.add(id(request))
            return None
        request.over = True
        where = crowded or (refused.key if refused is not None else request.key)
        wait = 1.0 if refused is None else refused.wait
        scope = (Scope.PROVIDER, Scope.ACCOUNT, Scope.ENDPOINT)[min(where.count("/"), 2)]
        kinds = [FailureKind.THROTTLED, FailureKind.QUOTA]
        if refused is not None and refused.limit.per >= 3600:  # noqa: PLR2004 - an hour
            kinds.reverse()
        dialect = self.dialect(request, now)
        with contextlib.suppress(InvalidInput):
            return self.fail(request, kinds[0], now, dialect, wait=wait, scope=scope)
        return self.fail(request, kinds[1], now, dialect, wait=wait, scope=scope)

    def _unannounced(self, request: Seen, now: datetime) -> Reply | None:
        """A refusal by an allowance that no answer announces."""
        if self._make_allowance is None or request.what != "api":
            return None
        self._epoch = self._epoch or now
        name = request.account or _ANYBODY
        if self._budget is not None:
            name = f"{name}/{self._budget(request.path)}"
        allowance = self._allowances.get(name)
        if allowance is None:
            allowance = self._allowances[name] = self._make_allowance(name)
        wait = allowance.ask((now - self._epoch).total_seconds())
        if wait is None:
            self._let_through[id(request)] = allowance
            return None
        request.over = True
        hint = {} if wait.seconds is None else {"retry-after": f"{wait.seconds:g}"}
        return Reply(429, {"message": "too many requests"}, hint | self._named(request))

    def _named(self, request: Seen) -> dict[str, str]:
        """The header that names the budget of a request."""
        fields = next((one.named_by for one in self._provider.waits.budgets if one.named_by), "")
        return {} if self._budget is None or not fields else {fields: self._budget(request.path)}

    def _remembered(self, request: Seen, now: datetime) -> Reply | None:
        if not request.idempotency_key:
            return None
        entry = self._memory.get(self._memorable[id(request)])
        life = None if self._provider.idempotency is None else self._provider.idempotency.life
        if entry is None or (life is not None and now > entry[0] + timedelta(seconds=life)):
            return None
        reply = entry[1]
        return Reply(reply.status, reply.body, dict(reply.headers))

    def _content(self, request: Seen, now: datetime) -> Reply:
        for route in self.routes:
            if fits(route.on, request):
                return route.reply(request)
        for one in self.lists:
            if one.covers(request.path):
                reply = one.answer(request, self._origin)
                return reply or self.fail(request, FailureKind.RESET_CURSOR, now, self.dialect(request, now))
        message = (
            f"the fake {self._provider.name} has nothing at {request.target}: fake.on({request.target!r}, {{...}})"
        )
        return Reply(404, {"message": message})

    def _batch(self, request: Seen) -> list[Any] | None:
        """The parts of a batch; None for any other request."""
        facts = self._provider.batch
        if facts is None or request.what != "api" or not request.path.endswith(facts.path) or request.method != "POST":
            return None
        parts = request.json.get(facts.requests) if isinstance(request.json, dict) else None
        return parts if isinstance(parts, list) else None

    def _in_parts(
        self, request: Seen, parts: list[Any], now: datetime, part: Callable[[Seen, datetime], Reply]
    ) -> Reply:
        facts = self._provider.batch
        assert facts is not None  # noqa: S101 - it is a batch
        if len(parts) > facts.most:
            return Reply(400, {"error": {"code": "BadRequest", "message": f"at most {facts.most} parts"}})
        base = request.path.removesuffix(facts.path)
        answers = []
        for one in parts:
            path, _, query = str(one["url"]).partition("?")
            body = one.get("body")
            inner = Seen(
                at=now, method=one["method"], path=f"{base}/{path.lstrip('/')}", query=query_of(query),
                headers={**request.headers, **{str(k).lower(): str(v) for k, v in one.get("headers", {}).items()}},
                body=b"" if body is None else json.dumps(body).encode(), what="part",
            )  # fmt: skip
            self.recognise(inner, now)
            reply = part(inner, now)
            answers.append({"id": one["id"], "status": reply.status, "headers": reply.headers, "body": reply.body})
        return Reply(200, {facts.responses: answers})
