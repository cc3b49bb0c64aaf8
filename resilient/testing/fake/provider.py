"""`FakeProvider`: any provider, on a loopback port or in this process, that does what a test tells it to do.

    with FakeProvider("hubspot", clock=clock.now) as fake:
        fake.records("/crm/v3/objects/contacts", [{"id": "1"}, {"id": "2"}], size=1)
        app = Resilient(url, providers=[fake.provider], handlers=[sync_contacts], clock=clock.now)
        await app.connections.import_("hubspot/acct-7", **fake.account("acct-7").tokens)
        fake.throttle(for_=30)
        ...
        assert len(fake.log.api) == 1

It speaks the provider's dialect out of its facts: where tokens are carried, how long they last and how they rotate;
limits on every scope, counted exactly and told in the provider's headers; errors in its own words; pages, cursors,
idempotency keys, batches, signed webhooks. `FakeProvider.log` is the truth for every count. Time is the injected
clock's, tokens are numbered: two runs see the same.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import urlsplit

from resilient.core.base.errors import FailureKind, InvalidInput
from resilient.core.provider.placeholders import names_in
from resilient.engine.ground.providers import providers_by_name
from resilient.testing.fake import answers
from resilient.testing.fake.accounts import Account, Accounts, TokenServer
from resilient.testing.fake.answers import http_date
from resilient.testing.fake.conversation import Conversation, Outage, Route, Throttle, Trouble, fits, require_on
from resilient.testing.fake.meter import Meter
from resilient.testing.fake.pages import Records
from resilient.testing.fake.server import Log, Reply, Seen, Server, Transport, query_of, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.core.base.errors import Scope
    from resilient.core.events.webhook import Delivery
    from resilient.core.provider.facts import Provider
    from resilient.core.sync.paging import Paginator
    from resilient.testing.fake.answers import ErrorDialect
    from resilient.testing.fake.conversation import Fault, On
    from resilient.testing.fake.meter import Allowance

IN_PROCESS: Final = "http://localhost"
_PLACES: Final = {"instance_url": "https://fake.example.com", "homeserver": "fake.example.com"}


class FakeProvider:
    """See the top of this file. Leaving the ``with`` block closes the port.

    ``provider``: facts, or the name of a provider that is installed. ``port``: a number, or True for one that is free;
    False serves in this process only, see `transport`. It lives in the process that made it: another one gets the
    facts by `provider_at`. ``enforce``: whether its limits are; ``refused_count``: whether refused requests draw too,
    as with Microsoft, Asana and Discord. ``allowance``: a function from an account's name
    to a further limit of that account, which no answer announces (`resilient.testing.fake.meter`); if it returns the
    same object for all, that is a limit of the application. ``budget``: a function from a path to the name of the
    budget that its requests count for; each has an allowance of its own then (of ``account/name``), and is named in
    answers, in the provider's field for it (`BudgetFields.named_by`).
    ``lifetime``: seconds of its access tokens instead of the provider's own. ``anonymous``: requests need no
    credentials. ``skew``: how far its clock is ahead of ``clock``. ``facts`` replaces fields, as `Provider.configured`
    does.
    """

    def __init__(
        self,
        provider: Provider | str,
        *,
        clock: Callable[[], datetime] | None = None,
        port: bool | int = True,
        enforce: bool = True,
        refused_count: bool = False,
        allowance: Callable[[str], Allowance] | None = None,
        budget: Callable[[str], str] | None = None,
        lifetime: float | None = None,
        anonymous: bool = False,
        skew: timedelta = timedelta(0),
        client_id: str = "client",
        client_secret: str = "secret",  # noqa: S107 - of nobody
        **facts: Any,
    ) -> None:
        self._clock = clock or (lambda: datetime.now(UTC))
        self.skew = skew
        provider = _named(provider) if isinstance(provider, str) else provider
        number = port if type(port) is int else 0
        self._lock = threading.RLock()
        self._server = Server(self, number) if port is not False else None
        self.log = Log()
        self.refusing = False  # connections
        self._changes = Log()
        self._troubles: list[Trouble] = []
        self._throttles: list[Throttle] = []
        self._outages: list[Outage] = []
        self._holds: list[On] = []
        self.url = f"http://127.0.0.1:{self._server.port}" if self._server is not None else IN_PROCESS
        facts = {"anonymous": anonymous, **facts}
        self.provider = provider_at(provider, self.url, client_id=client_id, client_secret=client_secret, **facts)
        self._accounts = Accounts(self.provider, lifetime)
        oauth = self.provider.oauth
        self.oauth = TokenServer(self._accounts, oauth, self.url) if oauth is not None else None
        self._meter = Meter(self.provider, refused_count=refused_count) if enforce else None
        self._talk = Conversation(
            self.provider, self._accounts, self._meter, self.url, self._changes, allowance, budget
        )
        self._base = urlsplit(self.provider.base_url).path.rstrip("/")

    def __reduce__(self) -> Any:
        raise TypeError(
            "a FakeProvider cannot be sent to another process: it is a server of this one. Send its url, and let the"
            " other process make its facts with resilient.testing.provider_at(name, url)"
        )

    # -- its life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve on the port, until `close`."""
        if self._server is not None:
            self._server.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI app, to mount or to run elsewhere."""
        await serve(self, scope, receive, send)

    @property
    def transport(self) -> Transport:
        """For ``httpx.AsyncClient(transport=fake.transport, base_url=fake.provider.base_url)`` in this process."""
        return Transport(self)

    # -- accounts --------------------------------------------------------------------------------------------

    def account(self, name: str = "account", *, lifetime: float | None = None, **kept: str) -> Account:
        """An account, made with tokens (or a key) if it is new.

        ``lifetime``: of its tokens, in seconds. ``kept``: what token answers say about it (see `OAuth2.keep`).
        """
        with self._lock:
            new = name not in self._accounts.by_name
            account = self._accounts.get(name, self.now())
            account.kept.update(kept)
            if lifetime is not None:
                account.lifetime = lifetime
                if new and self.provider.oauth is not None:
                    self._accounts.issue(account, self.now())
            return account

    def authorize(self, name: str = "account") -> Account:
        """The account's owner consents anew: new tokens, whatever became of the old ones."""
        with self._lock:
            account = self.account(name)
            self._accounts.issue(account, self.now())
            return account

    def consents(self, name: str) -> None:
        """Who is at the consent page next; also whose tokens client credentials get."""
        if self.oauth is not None:
            self.oauth.next_account, self.oauth.denied = name, ""

    def denies(self, error: str = "access_denied") -> None:
        """Whoever is at the consent page refuses."""
        if self.oauth is not None:
            self.oauth.denied = error

    def expire_tokens(self, account: str | None = None) -> None:
        """Access tokens are over now, of one account or of all."""
        with self._lock:
            for one in self._chosen(account):
                self._accounts.expire(one, self.now())

    def revoke(self, account: str | None = None) -> None:
        """The grant of one account, or of all, is gone: its tokens are refused, for good."""
        with self._lock:
            for one in self._chosen(account):
                self._accounts.revoke(one)

    def _chosen(self, name: str | None) -> list[Account]:
        accounts = self._accounts.by_name
        if name is not None and name not in accounts:
            raise InvalidInput(f"the fake has no account {name!r} yet: {', '.join(accounts) or 'none'}")
        return list(accounts.values()) if name is None else [accounts[name]]

    # -- what goes wrong --------------------------------------------------------------------------------------

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
        require_on(on)
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
        require_on(on)
        self._holds.append(on)
        try:
            yield
        finally:
            self._holds.remove(on)

    # -- counts ----------------------------------------------------------------------------------------------

    @property
    def early(self) -> int:
        """Requests that came during a wait that the provider had announced."""
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

    # -- what it has -----------------------------------------------------------------------------------------

    def on(self, on: On, answer: Any) -> None:
        """``fake.on("POST /v1/charges", {...})``: JSON, a `Reply`, or a function of the `Seen` request to one.

        Paths are whole or below the base URL, with ``*``; the route that was named last counts.
        """
        require_on(on)
        if iscoroutinefunction(answer):
            raise InvalidInput(f"fake.on({on!r}) takes a plain function, and not a coroutine's")
        with self._lock:
            self._talk.routes.insert(0, Route(on, answer))

    def records(
        self,
        path: str,
        items: list[Any] | tuple[Any, ...] = (),
        *,
        pages: str | Paginator = "",
        incremental: str = "",
        size: int = 100,
        key: str = "id",
    ) -> Records:
        """A list behind ``path`` (below the base URL, unless it begins with its path), in pages of ``size``.

        ``pages``, ``incremental``: which of the provider's ways; without ``pages`` its usual one.
        """
        declared = self.provider.pagination
        if isinstance(pages, str) and not (pages in declared if pages else declared):
            raise InvalidInput(f"provider {self.provider.name!r} has no pagination {pages!r}: {', '.join(declared)}")
        paginator = (declared[pages] if pages else next(iter(declared.values()))) if isinstance(pages, str) else pages
        how = self.provider.incremental[incremental] if incremental else None
        made = Records(self._whole(path), paginator, how, size, key, self.now)
        made.put(*items)
        with self._lock:
            self._talk.lists.insert(0, made)
        return made

    def _whole(self, path: str) -> str:
        path = f"/{path.lstrip('/')}"
        return path if self._base and path.startswith(f"{self._base}/") else f"{self._base}{path}"

    # -- webhooks --------------------------------------------------------------------------------------------

    @property
    def webhook_secret(self) -> str:
        """What its webhooks are signed with (for Ed25519: checked with)."""
        return answers.secret_of(self.provider)

    def webhook(self, url: str, body: Any, *, event: str = "", delivery: str = "", secret: str = "") -> Delivery:
        """A signed delivery: send its ``body`` and ``headers`` to its ``url``.

        ``delivery``: its id; by default the one that stands in the body already, else "1".
        """
        secret = secret or self.webhook_secret
        return answers.deliver(
            self.provider, url, body, self.now(), secret=secret, event=event, delivery=delivery or None
        )

    # -- for the servers -------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The provider's own clock."""
        return self._clock() + self.skew

    def holds(self, request: Seen) -> bool:
        """Whether its answer has to wait."""
        return any(fits(on, request) for on in self._holds)

    def headers_of(self, reply: Reply) -> dict[str, str]:
        """All headers of an answer."""
        base = {"date": http_date(self.now()), "content-type": reply.content_type}
        return {**base, **{name.lower(): value for name, value in reply.headers.items()}}

    def take(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> tuple[Seen, Reply]:
        """One request, and the answer to it; `finish` when it was sent."""
        with self._lock:
            now = self.now()
            request = Seen(at=now, method=method, path=path, query=query_of(query), headers=headers, body=body)
            if self._base and path.startswith(f"{self._base}/"):
                request.below = path.removeprefix(self._base)
            what = self.oauth.paths.get(path) if self.oauth is not None else None
            request.what = what or "api"  # type: ignore[assignment]
            self.log.append(request)
            reply = self._answer(request, now)
            request.status = None if reply.fault in ("lost", "hang") else reply.status
            return request, reply

    def finish(self, request: Seen) -> None:
        """The exchange is over: its answer was sent, or the client is gone."""
        with self._lock:
            self._talk.leave(request)

    def _answer(self, request: Seen, now: datetime) -> Reply:
        self._talk.recognise(request, now)
        for outage in self._outages:
            if outage.takes(request, now):
                return Reply(outage.status, outage.body.format(status=outage.status))
        trouble = next((one for one in self._troubles if one.takes(request)), None)
        if trouble is not None:
            trouble.times -= 1
            if not trouble.performs:
                return self._in_trouble(trouble, request, now)
        if request.what != "api" and self.oauth is not None:
            reply = self._throttled(request, now) or self.oauth.answer(request.what, request, now)
        else:
            reply = self._throttled(request, now) or self._talk.answer(request, now, self._part)
        if trouble is not None:
            reply.fault = trouble.what  # type: ignore[assignment]
        return reply

    def _part(self, request: Seen, now: datetime) -> Reply:
        """One part of a batch: throttled and failing on its own."""
        self.log.append(request)
        trouble = next((one for one in self._troubles if one.takes(request)), None)
        if trouble is not None and not trouble.performs:
            trouble.times -= 1
            reply = self._in_trouble(trouble, request, now)
        else:
            reply = self._throttled(request, now) or self._talk.answer(request, now, None)
        request.status = reply.status
        return reply

    def _throttled(self, request: Seen, now: datetime) -> Reply | None:
        for one in self._throttles:
            if one.takes(request, now):
                wait = (one.until - now).total_seconds()
                return self._talk.fail(request, one.kind, now, self._dialect(request, now), wait=wait, scope=one.scope)
        return None

    def _in_trouble(self, trouble: Trouble, request: Seen, now: datetime) -> Reply:
        reply = trouble.reply()
        if reply is not None:
            self._talk.note(request, reply, now)
            return reply
        assert isinstance(trouble.what, FailureKind)  # noqa: S101 - all others gave a reply
        return self._talk.fail(
            request,
            trouble.what,
            now,
            self._dialect(request, now),
            wait=trouble.wait,
            scope=trouble.scope,
            code=trouble.code,
        )

    def _dialect(self, request: Seen, now: datetime) -> ErrorDialect:
        if request.what in ("api", "part") or self.oauth is None:
            return self._talk.dialect(request, now)
        return self.oauth.dialect(now)


def _named(name: str) -> Provider:
    every = providers_by_name()
    if name not in every:
        raise InvalidInput(f"there is no provider {name!r}: {', '.join(sorted(every))}")
    return every[name]()


def provider_at(
    provider: Provider | str,
    url: str,
    *,
    client_id: str = "client",
    client_secret: str = "secret",  # noqa: S107 - of nobody
    **facts: Any,
) -> Provider:
    """The facts of a provider at the address of a fake, as its ``fake.provider`` has them, also in another process.

    ``facts`` replaces fields, as `Provider.configured` does; paths of a ``base_url`` are kept, its host is not.
    """
    provider = _named(provider) if isinstance(provider, str) else provider
    own = provider.oauth is not None
    provider = provider.configured(client_id if own else "", client_secret if own else "", **facts)
    oauth = provider.oauth
    addresses = [provider.base_url]
    addresses += [oauth.authorize_url, oauth.token_url, oauth.refresh_url, oauth.revoke_url] if oauth else []
    provider = provider.filled(**{name: _PLACES.get(name, "fake") for name in names_in(*addresses)})
    return provider.moved(url)
