"""``resilient connect PROVIDER KEY``: give one account credentials, whichever way its provider has.

OAuth goes through the browser: the provider's consent page, and back to an address on this machine. Keys, tokens and
passwords are typed at a prompt or come through a pipe, and never appear anywhere.
"""

from __future__ import annotations

import asyncio
import json
import sys
import webbrowser
from pathlib import Path  # noqa: TC003 - typer evaluates annotations
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import parse_qs, parse_qsl, urlsplit

import typer

from resilient.core.errors import ConsentRefused, InvalidInput, SetupError
from resilient.core.placeholders import names_in
from resilient.core.resource_key import check
from resilient.surface.cli.callback import Callback, Place
from resilient.surface.cli.connections import pair, say_connected, secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.auth import OAuth2
    from resilient.core.provider import Provider
    from resilient.engine.app import Resilient
    from resilient.engine.connections import ConnectionInfo
    from resilient.surface.cli.context import Context

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

    Of one that had lost its access the jobs go on by themselves.
    """
    run: Context = ctx.obj
    app = run.program("connecting an account")
    found = _provider(app, provider)
    if not key:
        raise InvalidInput(
            f"which account of {provider}? Say the key its jobs go through, such as"
            f" `resilient connect {provider} {provider}/acct-7`"
        )
    account = check(key)
    if not account.startswith(f"{provider}/"):
        raise InvalidInput(f"{account} is no account of {provider}: its key begins with {provider}/")
    way, details = _way(found, kind or ("service-account" if key_file else "")), dict(pair(one) for one in detail or ())
    _require_details(found, way, details)
    if way == "oauth":
        made = asyncio.run(_through_browser(run, app, account, details, port, timeout, not no_browser, paste))
    else:
        said = _of_file(key_file, subject) if way == "service-account" else _credentials(way, user, found)
        made = app.sync.connections.add(account, **said, details=details)
    say_connected(run, made)


def _provider(app: Resilient, name: str) -> Provider:
    found = app.providers.get(name)
    if found is None:
        known = ", ".join(sorted(app.providers)) or "none"
        raise SetupError(
            f"the app has no provider {name!r}, only: {known}. List it: Resilient(providers=[{name}.provider(...)])"
        )
    return found


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
        found = {"private_key": doc["private_key"], "issuer": doc["client_email"], "key_id": doc["private_key_id"]}
    except OSError as error:
        raise InvalidInput(f"--key-file {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        wanted = "client_email, private_key and private_key_id"
        raise InvalidInput(f"--key-file {path} is no JSON with {wanted}") from None
    return {**found, "subject": subject}


# -- through the browser -------------------------------------------------------------------------------------


async def _through_browser(
    run: Context, app: Resilient, key: str, details: Mapping[str, str], port: int, patience: float,
    browser: bool, paste: bool,  # noqa: FBT001 - what was typed
) -> ConnectionInfo:  # fmt: skip
    await app.ready()
    oauth = app.connections.oauth_of(key, details)
    place = Place.of(oauth.redirect_uri, port)
    try:
        if paste:
            return await _pasted(run, app, key, details, oauth.redirect_uri or f"http://{place.host}{place.path}")
        async with Callback(place) as back:
            url = await app.connections.consent.begin(key, oauth, back.uri, details=details)
            _show(run, url, back.uri, browser=browser, chance=not place.port)
            parameters = await _waited(back, _state_of(url), patience, key)
            return await _finished(app, back, parameters)
    except OSError as error:
        raise SetupError(
            f"port {place.port} of {place.host} cannot be listened on ({error.strerror}): end what listens there, or"
            " register and say another --port"
        ) from None
    finally:
        await app.grants.close()
        if (engine := app.database.async_engine) is not None:
            await engine.dispose()


async def _pasted(run: Context, app: Resilient, key: str, details: Mapping[str, str], uri: str) -> ConnectionInfo:
    oauth = app.connections.oauth_of(key, details)
    url = await app.connections.consent.begin(key, oauth, uri, details=details)
    _show(run, url, uri, browser=False)
    typed = await asyncio.to_thread(secret, "Address the browser ended at")
    return await app.connections.complete(dict(parse_qsl(urlsplit(typed).query, keep_blank_values=True)))


async def _waited(back: Callback, state: str, patience: float, key: str) -> dict[str, str]:
    try:
        return await back.arrived(state, patience)
    except TimeoutError:
        strange = f"; {back.strangers} callbacks with another state were refused" if back.strangers else ""
        raise ConsentRefused(
            f"nobody came back from the consent page of {key} within {patience:g} s{strange}: start again, with"
            " --timeout for more time, or --paste if the browser runs elsewhere"
        ) from None


async def _finished(app: Resilient, back: Callback, parameters: Mapping[str, str]) -> ConnectionInfo:
    try:
        made = await app.connections.complete(parameters)
    except Exception as error:
        text = str(error) if isinstance(error, ConsentRefused) else "It did not work: the command line says why."
        await back.answer(well=False, text=text)
        raise
    await back.answer(well=True, text=f"{made.resource_key} is connected. You can close this page.")
    return made


def _show(run: Context, url: str, uri: str, *, browser: bool, chance: bool = False) -> None:
    """Open the address, or print it: on standard error, so that the result alone is on standard output.

    ``chance``: the port of ``uri`` is another one next time.
    """
    opened = browser and webbrowser.open(url)
    said = "Your browser shows the provider's page. If it does not, open" if opened else "Open"
    run.out.errors.print(f"{said} this address:", markup=False, highlight=False)
    run.out.errors.print(url, soft_wrap=True, markup=False, highlight=False)
    run.out.errors.print(f"Registered with the provider must be: {uri}", soft_wrap=True, markup=False, highlight=False)
    if chance:
        run.out.errors.print("(the port is another one each time: --port 8976 keeps it)", markup=False, highlight=False)
    sys.stderr.flush()


def _state_of(url: str) -> str:
    return parse_qs(urlsplit(url).query)["state"][0]
