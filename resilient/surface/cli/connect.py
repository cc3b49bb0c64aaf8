"""``resilient connect PROVIDER KEY``: give one account credentials, whichever way its provider has.

OAuth goes through the browser: the provider's consent page, and back to an address on this machine. Keys, tokens and
passwords are typed at a prompt or come through a pipe, and never appear anywhere.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import webbrowser
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path  # noqa: TC003 - typer evaluates annotations
from typing import TYPE_CHECKING, Annotated, Any, Final, Self
from urllib.parse import parse_qs, parse_qsl, urlsplit

import typer

from resilient.core.base.errors import ConsentRefused, InvalidInput, SetupError
from resilient.core.base.resource_key import check
from resilient.core.provider.placeholders import names_in
from resilient.surface.cli.connections import pair, say_connected, secret
from resilient.surface.cli.exits import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from resilient.core.provider.auth import OAuth2
    from resilient.core.provider.facts import Provider
    from resilient.engine.accounts.connections import ConnectionInfo
    from resilient.engine.app.app import Resilient
    from resilient.surface.cli.context import Context

# -- callback ---------------------------------------------------------------------------------------------------------
#
# The address on this machine that a provider sends a person's browser back to (RFC 8252, 7.3).
#
# It listens on the loopback interface, answers one path, and takes one callback: the one that carries the expected
# state. Everything else is refused and forgotten, so a page that guesses the port cannot end the wait.

HOST: Final = "127.0.0.1"
LOOPBACK: Final = (HOST, "localhost")
_MOST_HEAD: Final = 16 * 1024  # bytes of a request's head
_BROWSER_TIME: Final = 10.0  # seconds for a browser to send its request's head, and to take the answer


@dataclass(frozen=True, slots=True)
class Place:
    """Where to listen. ``host`` is the name in the redirect URI; port 0 is any free one."""

    host: str = HOST
    port: int = 0
    path: str = "/callback"

    @classmethod
    def of(cls, configured: str, port: int) -> Place:
        """The provider's configured redirect URI, if it leads to this machine; else one of our own."""
        parts = urlsplit(configured)
        if parts.scheme == "http" and parts.hostname in LOOPBACK:
            return cls(parts.hostname, port or parts.port or 80, parts.path or "/")
        return cls(port=port)


class Callback:
    """A server for one callback: ``async with Callback(place) as server``, `wait_for` it, then `answer` the person."""

    def __init__(self, place: Place) -> None:
        self._place, self._expected = place, ""
        self._parameters: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._result: asyncio.Future[tuple[bool, str]] = asyncio.get_running_loop().create_future()
        self._is_over = asyncio.Event()  # the browser has its answer, or has left
        self.strangers = 0  # requests with another state

    async def __aenter__(self) -> Self:
        """Listen. Raises `OSError` if the port is taken."""
        self._server = await asyncio.start_server(self._serve, HOST, self._place.port, limit=_MOST_HEAD)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop listening."""
        self._result.cancel()
        self._server.close()

    @property
    def uri(self) -> str:
        """The redirect URI for the provider."""
        port = self._server.sockets[0].getsockname()[1]
        return f"http://{self._place.host}:{port}{self._place.path}"

    async def wait_for(self, state: str, timeout: float) -> dict[str, str]:  # noqa: ASYNC109 - the person's, in seconds
        """The parameters of the callback with this state. Raises `TimeoutError`."""
        self._expected = state
        async with asyncio.timeout(timeout):
            return await asyncio.shield(self._parameters)

    async def answer(self, *, well: bool, text: str) -> None:
        """Show the person a sentence, and wait until the browser has it or has left."""
        self._result.set_result((well, text))
        with suppress(TimeoutError):  # whatever becomes of the page, the account is connected or not
            async with asyncio.timeout(_BROWSER_TIME):
                await self._is_over.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_expected = False
        try:
            async with asyncio.timeout(_BROWSER_TIME):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, text, is_expected = await self._reply(*head.split("\r\n", 1)[0].split(" ")[:2])
            writer.write(_page(status, text))
            await writer.drain()
        except (
            TimeoutError,
            OSError,
            ValueError,
            TypeError,
            EOFError,
            asyncio.LimitOverrunError,
            asyncio.CancelledError,
        ):
            pass  # no browser, or one that left
        finally:
            writer.close()
            if is_expected:
                self._is_over.set()

    async def _reply(self, method: str, target: str) -> tuple[int, str, bool]:
        """Status and sentence for a request, and whether it is the expected callback."""
        parts = urlsplit(target)
        if method != "GET" or parts.path != self._place.path:
            return 404, "There is nothing here.", False
        parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
        if not self._expected or not hmac.compare_digest(parameters.get("state", "").encode(), self._expected.encode()):
            self.strangers += 1
            return 400, "This is not the expected answer. Start again on the command line.", False
        if self._parameters.done():
            return 400, "This was answered before.", False
        self._parameters.set_result(parameters)
        well, text = await self._result
        return (200 if well else 400), text, True


def _page(status: int, text: str) -> bytes:
    body = f"<!doctype html><meta charset=utf-8><title>resilient</title><p>{escape(text)}</p>".encode()
    head = (
        f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}\r\nContent-Type: text/html; charset=utf-8\r\n"  # noqa: PLR2004
        f"Content-Length: {len(body)}\r\nConnection: close\r\nCache-Control: no-store\r\n"
        "Referrer-Policy: no-referrer\r\nContent-Security-Policy: default-src 'none'\r\n"
        "X-Content-Type-Options: nosniff\r\n\r\n"
    )
    return head.encode() + body


# -- connect ----------------------------------------------------------------------------------------------------------

KINDS: Final = ("oauth", "client-credentials", "service-account", "token", "api-key", "basic")
_BY_FACT: Final = {"bearer": "token", "api_key": "api-key", "basic": "basic"}


def connect(
    ctx: typer.Context,
    provider: Annotated[str, typer.Argument(metavar="PROVIDER", help="A provider of the app, such as github.")],
    key: Annotated[
        str,
        typer.Argument(metavar="KEY", help="The account: the key its jobs go through.", show_default=False),
    ] = "",
    kind: Annotated[
        str, typer.Option(help=f"Instead of the provider's usual way: {', '.join(KINDS)}.", show_default=False)
    ] = "",
    user: Annotated[str, typer.Option(help="The user, for basic.", show_default=False)] = "",
    key_file: Annotated[
        Path | None,
        typer.Option(help="A service account's key, as JSON from the provider.", show_default=False),
    ] = None,
    subject: Annotated[str, typer.Option(help="The user a service account acts for.", show_default=False)] = "",
    detail: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the provider's placeholders.", show_default=False)
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            envvar="RESILIENT_CONNECT_PORT",
            min=0,
            max=65535,
            help="Of the callback address, where the provider wants it registered; 0: any that is free.",
        ),
    ] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for the person.")] = 300.0,
    *,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address only.")] = False,
    paste: Annotated[
        bool, typer.Option("--paste", help="Ask for the address the browser ended at, where it cannot reach this one.")
    ] = False,
) -> None:
    """Connect an account: in the browser, or by a key.

    If the account had lost its access, its jobs go on by themselves.
    """
    run: Context = ctx.obj
    run.go_to_shard_of(key)
    app = run.program("connecting an account")
    facts = _provider(app, provider)
    if not key:
        raise InvalidInput(
            f"which account of {provider}? Say the key its jobs go through, such as"
            f" `resilient connect {provider} {provider}/acct-7`"
        )
    account = check(key)
    if not account.startswith(f"{provider}/"):
        raise InvalidInput(f"{account} is no account of {provider}: its key begins with {provider}/")
    way, details = _way(facts, kind or ("service-account" if key_file else "")), dict(pair(one) for one in detail or ())
    _require_details(facts, way, details)
    if way == "oauth":
        with run.audited("connect", account) as outcome:
            made = asyncio.run(_through_browser(run, app, account, details, port, timeout, not no_browser, paste))
            outcome["state"] = str(made.state)
    else:
        credentials = _of_file(key_file, subject) if way == "service-account" else _credentials(way, user, facts)
        made = app.sync.connections.add(account, **credentials, details=details)
    say_connected(run, made)


def _provider(app: Resilient, name: str) -> Provider:
    provider = app.providers.get(name)
    if provider is None:
        names = ", ".join(sorted(app.providers)) or "none"
        raise SetupError(
            f"the app has no provider {name!r}, only: {names}. List it: Resilient(providers=[{name}.provider(...)])"
        )
    return provider


def _way(provider: Provider, kind: str) -> str:
    """How this account gets its credentials. Raises `InvalidInput` and `SetupError`."""
    if kind and kind not in KINDS:
        raise InvalidInput(f"--kind {kind} is none of {', '.join(KINDS)}")
    if kind:
        return kind
    ways = [_by_oauth(one) if one.kind == "oauth2" else _BY_FACT[one.kind] for one in provider.auth]
    if not ways:
        raise SetupError(
            f"{provider.name} declares no credentials, because its vendor's SDK signs requests, or they need none."
            " If they do, say it in its facts: Provider(auth=(Bearer(),)), or ApiKey, Basic, OAuth2"
        )
    oauth = provider.oauth
    if ways[0].startswith(("oauth", "client")) and oauth is not None and not oauth.client_id:
        other = next((way for way in ways if not way.startswith(("oauth", "client"))), "")
        raise SetupError(
            f"{provider.name} has no client_id: register an application there and say"
            f" {provider.name}.provider(client_id=..., client_secret=...)" + (f"; or --kind {other}" if other else "")
        )
    return ways[0]


def _by_oauth(oauth: OAuth2) -> str:
    return "oauth" if "authorization_code" in oauth.flows else "client-credentials"


def _require_details(provider: Provider, way: str, details: Mapping[str, str]) -> None:
    """Raise `InvalidInput` unless every placeholder that is needed before the first answer is filled."""
    oauth = provider.oauth
    needed = provider.placeholders
    if way in ("oauth", "client-credentials", "service-account") and oauth is not None:
        later = {path.rpartition(".")[2] for path in (*oauth.keep, *oauth.keep_callback)}
        needed = (needed | names_in(oauth.authorize_url, oauth.token_url)) - later
    if missing := sorted(needed - set(details)):
        raise InvalidInput(f"{provider.name} needs {', '.join(f'--detail {name}=...' for name in missing)}")


def _credentials(way: str, user: str, provider: Provider) -> dict[str, Any]:
    if way == "client-credentials":
        return {"client_credentials": True}
    if way != "basic":
        return {way.replace("-", "_"): secret("Token" if way == "token" else "API key")}
    basic = next((one for one in provider.auth if one.kind == "basic"), None)
    if not user:
        raise InvalidInput(f"basic needs --user ({basic.user if basic is not None else 'user'})")
    return {"user": user, "password": secret(basic.password if basic is not None else "Password")}


def _of_file(path: Path | None, subject: str) -> dict[str, Any]:
    """A service account, as Google writes its key. Raises `InvalidInput`; what it shows is no secret."""
    if path is None:
        raise InvalidInput("a service account needs --key-file: the JSON that the provider gave for its key")
    try:
        doc = json.loads(path.read_text())
        fields = {"private_key": doc["private_key"], "issuer": doc["client_email"], "key_id": doc["private_key_id"]}
    except OSError as error:
        raise InvalidInput(f"--key-file {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        names = "client_email, private_key and private_key_id"
        raise InvalidInput(f"--key-file {path} is no JSON with {names}") from None
    return {**fields, "subject": subject}


# -- through the browser -------------------------------------------------------------------------------------


async def _through_browser(
    run: Context, app: Resilient, key: str, details: Mapping[str, str], port: int, timeout: float,  # noqa: ASYNC109
    browser: bool, paste: bool,  # noqa: FBT001 - what was typed
) -> ConnectionInfo:  # fmt: skip
    await app.ready()
    oauth = app.connections.oauth_of(key, details)
    place = Place.of(oauth.redirect_uri, port)
    try:
        if paste:
            return await _paste(run, app, key, details, oauth.redirect_uri or f"http://{place.host}{place.path}")
        async with AsyncExitStack() as stack:
            server = await _listen(stack, place)
            url = await app.connections.consent.begin(key, oauth, server.uri, details=details)
            _show(run, url, server.uri, browser=browser, is_any_port=not place.port)
            parameters = await _wait(server, _state_of(url), timeout, key)
            return await _finish(app, server, parameters)
    finally:
        await app.grants.close()
        if (engine := app.database.async_engine) is not None:
            await engine.dispose()


async def _listen(stack: AsyncExitStack, place: Place) -> Callback:
    try:
        return await stack.enter_async_context(Callback(place))
    except OSError as error:
        raise SetupError(
            f"port {place.port} of {place.host} cannot be listened on ({reason_of(error)}): end what listens there, or"
            " register and say another --port"
        ) from None


async def _paste(run: Context, app: Resilient, key: str, details: Mapping[str, str], uri: str) -> ConnectionInfo:
    oauth = app.connections.oauth_of(key, details)
    url = await app.connections.consent.begin(key, oauth, uri, details=details)
    _show(run, url, uri, browser=False)
    typed = await asyncio.to_thread(secret, "Address the browser ended at")
    return await app.connections.complete(dict(parse_qsl(urlsplit(typed).query, keep_blank_values=True)))


async def _wait(server: Callback, state: str, timeout: float, key: str) -> dict[str, str]:  # noqa: ASYNC109
    try:
        return await server.wait_for(state, timeout)
    except TimeoutError:
        strange = f"; {server.strangers} callbacks with another state were refused" if server.strangers else ""
        raise ConsentRefused(
            f"nobody came back from the consent page of {key} within {timeout:g} s{strange}: start again, with"
            " --timeout for more time, or --paste if the browser runs elsewhere"
        ) from None


async def _finish(app: Resilient, server: Callback, parameters: Mapping[str, str]) -> ConnectionInfo:
    try:
        info = await app.connections.complete(parameters)
    except Exception as error:
        text = str(error) if isinstance(error, ConsentRefused) else "It did not work: the command line says why."
        await server.answer(well=False, text=text)
        raise
    await server.answer(well=True, text=f"{info.resource_key} is connected. You can close this page.")
    return info


def _show(run: Context, url: str, uri: str, *, browser: bool, is_any_port: bool = False) -> None:
    """Open the consent page and print its address: on standard error, so that only the result is on standard output.

    ``is_any_port``: the port of ``uri`` is another one next time.
    """
    opened = browser and webbrowser.open(url)
    sentence = "Your browser shows the provider's page. If it does not, open" if opened else "Open"
    run.out.remark(f"{sentence} this address:")
    run.out.remark(url)
    run.out.remark(f"Registered with the provider must be: {uri}")
    if is_any_port:
        run.out.remark("(the port is another one each time: --port 8976 keeps it)")
    sys.stderr.flush()


def _state_of(url: str) -> str:
    return parse_qs(urlsplit(url).query)["state"][0]
