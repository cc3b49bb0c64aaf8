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

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

from resilient.core.errors import InvalidInput
from resilient.core.failure import FailureKind
from resilient.core.placeholders import names_in
from resilient.engine.catalogue import providers_by_name
from resilient.testing.fake import hooks
from resilient.testing.fake.accounts import Account, Accounts
from resilient.testing.fake.conversation import Conversation
from resilient.testing.fake.log import Reply, Seen, query_of
from resilient.testing.fake.meter import Meter
from resilient.testing.fake.oauth import TokenServer
from resilient.testing.fake.pages import Records
from resilient.testing.fake.script import Route, Trouble, fits
from resilient.testing.fake.scripted import Scripted
from resilient.testing.fake.server import Server, Transport, serve
from resilient.testing.fake.shapes import http_date

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.core.paging import Paginator
    from resilient.core.provider import Provider
    from resilient.core.webhook import Delivery
    from resilient.testing.fake.answers import Voice
    from resilient.testing.fake.script import On

IN_PROCESS: Final = "http://localhost"
_PLACES: Final = {"instance_url": "https://fake.example.com", "homeserver": "fake.example.com"}


class FakeProvider(Scripted):
    """See the top of this file. Leaving the ``with`` block closes the port.

    ``provider``: facts, or the name of a provider that is installed. ``port``: a number, or True for one that is free;
    False serves in this process only, see `transport`. It lives in the process that made it: another one gets the
    facts by `provider_at`. ``enforce``: whether its limits are; ``refused_count``: whether refused requests draw too,
    as with Microsoft, Asana and Discord. ``lifetime``: seconds of its access tokens instead of the provider's own.
    ``anonymous``: requests need no credentials. ``skew``: how far its clock is ahead of ``clock``.
    ``facts`` replaces fields, as `Provider.configured` does.
    """

    def __init__(
        self,
        provider: Provider | str,
        *,
        clock: Callable[[], datetime] | None = None,
        port: bool | int = True,
        enforce: bool = True,
        refused_count: bool = False,
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
        super().__init__(Server(self, number) if port is not False else None)
        self.url = f"http://127.0.0.1:{self._server.port}" if self._server is not None else IN_PROCESS
        facts = {"anonymous": anonymous, **facts}
        self.provider = provider_at(provider, self.url, client_id=client_id, client_secret=client_secret, **facts)
        self._accounts = Accounts(self.provider, lifetime)
        oauth = self.provider.oauth
        self.oauth = TokenServer(self._accounts, oauth, self.url) if oauth is not None else None
        self._meter = Meter(self.provider, refused_count=refused_count) if enforce else None
        self._talk = Conversation(self.provider, self._accounts, self._meter, self.url, self._changes)
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
        return list(self._accounts.by_name.values()) if name is None else [self._accounts.by_name[name]]

    # -- what it has -----------------------------------------------------------------------------------------

    def on(self, on: On, answer: Any) -> None:
        """``fake.on("POST /v1/charges", {...})``: JSON, a `Reply`, or a function of the `Seen` request to one.

        Paths are whole or below the base URL, with ``*``; the route that was named last counts.
        """
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
        made = Records(self._whole(path), paginator, how, size, key)
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
        return hooks.secret_of(self.provider)

    def webhook(self, url: str, body: Any, *, event: str = "", delivery: str = "", secret: str = "") -> Delivery:
        """A signed delivery: send its ``body`` and ``headers`` to its ``url``.

        ``delivery``: its id; by default the one that stands in the body already, else "1".
        """
        secret = secret or self.webhook_secret
        return hooks.deliver(
            self.provider, url, body, self.now(), secret=secret, event=event, delivery=delivery or None
        )

    # -- for the servers -------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The provider's own clock."""
        return self._clock() + self.skew

    def holds(self, seen: Seen) -> bool:
        """Whether its answer has to wait."""
        return any(fits(on, seen) for on in self._held)

    def headers_of(self, reply: Reply) -> dict[str, str]:
        """All headers of an answer."""
        base = {"date": http_date(self.now()), "content-type": reply.content_type}
        return {**base, **{name.lower(): value for name, value in reply.headers.items()}}

    def take(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> tuple[Seen, Reply]:
        """One request, and the answer to it; `finish` when it was sent."""
        with self._lock:
            now = self.now()
            seen = Seen(at=now, method=method, path=path, query=query_of(query), headers=headers, body=body)
            if self._base and path.startswith(f"{self._base}/"):
                seen.below = path.removeprefix(self._base)
            what = self.oauth.paths.get(path) if self.oauth is not None else None
            seen.what = what or "api"  # type: ignore[assignment]
            self.log.append(seen)
            reply = self._answer(seen, now)
            seen.status = None if reply.fault in ("lost", "hang") else reply.status
            return seen, reply

    def finish(self, seen: Seen) -> None:
        """Its answer was sent, or nobody waits for it."""
        with self._lock:
            self._talk.leave(seen)

    def _answer(self, seen: Seen, now: datetime) -> Reply:
        self._talk.recognise(seen, now)
        for outage in self._outages:
            if outage.takes(seen, now):
                return Reply(outage.status, outage.body.format(status=outage.status))
        trouble = next((one for one in self._troubles if one.takes(seen)), None)
        if trouble is not None:
            trouble.times -= 1
            if not trouble.performs:
                return self._in_trouble(trouble, seen, now)
        if seen.what != "api" and self.oauth is not None:
            reply = self._throttled(seen, now) or self.oauth.answer(seen.what, seen, now)
        else:
            reply = self._throttled(seen, now) or self._talk.answer(seen, now, self._part)
        if trouble is not None:
            reply.fault = trouble.what  # type: ignore[assignment]
        return reply

    def _part(self, seen: Seen, now: datetime) -> Reply:
        """One part of a batch: throttled and failing on its own."""
        self.log.append(seen)
        trouble = next((one for one in self._troubles if one.takes(seen)), None)
        if trouble is not None and not trouble.performs:
            trouble.times -= 1
            reply = self._in_trouble(trouble, seen, now)
        else:
            reply = self._throttled(seen, now) or self._talk.answer(seen, now, None)
        seen.status = reply.status
        return reply

    def _throttled(self, seen: Seen, now: datetime) -> Reply | None:
        for one in self._throttles:
            if one.takes(seen, now):
                wait = (one.until - now).total_seconds()
                return self._talk.fail(seen, one.kind, now, self._voice(seen, now), wait=wait, scope=one.scope)
        return None

    def _in_trouble(self, trouble: Trouble, seen: Seen, now: datetime) -> Reply:
        reply = trouble.reply()
        if reply is not None:
            self._talk.note(seen, reply, now)
            return reply
        assert isinstance(trouble.what, FailureKind)  # noqa: S101 - all others gave a reply
        return self._talk.fail(
            seen, trouble.what, now, self._voice(seen, now), wait=trouble.wait, scope=trouble.scope, code=trouble.code
        )

    def _voice(self, seen: Seen, now: datetime) -> Voice:
        if seen.what in ("api", "part") or self.oauth is None:
            return self._talk.voice(seen, now)
        return self.oauth.voice(now)


def _named(name: str) -> Provider:
    known = providers_by_name()
    if name not in known:
        raise InvalidInput(f"there is no provider {name!r}: {', '.join(sorted(known))}")
    return known[name]()


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
