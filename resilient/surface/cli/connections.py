"""``resilient connections ...`` and ``resilient secrets ...``: the accounts' credentials, never shown.

A secret is typed at a prompt or comes through a pipe: an argument would stay in the shell's history and be seen by
every user of the machine.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.core.errors import InvalidInput
from resilient.core.phrases import counted, when
from resilient.core.tokens import GrantState
from resilient.surface.cli.exits import FAILED
from resilient.surface.cli.jobs import Yes  # noqa: TC001 - typer evaluates annotations
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from resilient.engine.app import Resilient
    from resilient.engine.connections import ConnectionInfo
    from resilient.surface.cli.context import Context

connections = typer.Typer(help="Credentials of accounts: see, test, add, revoke.", no_args_is_help=True)
secrets = typer.Typer(help="The keys that credentials are encrypted with.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="An account, such as github/acct-7.")]
Name = Annotated[str, typer.Argument(metavar="PROVIDER", help="A provider, such as github.")]
PAGE = 50


@connections.command("list")
def list_connections(
    ctx: typer.Context,
    provider: Annotated[str | None, typer.Argument(help="Only those at this provider.", show_default=False)] = None,
    state: Annotated[
        GrantState | None, typer.Option(help="Only those in this state.", show_default=False, case_sensitive=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = PAGE,
    after: Annotated[str, typer.Option(help="Go on behind this key.", show_default=False)] = "",
) -> None:
    """List connections and how they stand."""
    run: Context = ctx.obj
    found = run.app.sync.connections.list(provider, state=state, limit=limit, after=after)
    more = found[-1].resource_key if len(found) == limit else None
    if run.out.as_json:
        run.out.json({"connections": [one.to_json() for one in found], "next": more})
        return
    if not found:
        run.out.say("No connection fits." if provider or state or after else "There are no connections.")
        return
    now = run.now
    rows = [
        Row(
            one.resource_key, one.kind, one.state.value, when(one.state_since, now),
            when(one.expires_at, now) if one.expires_at else "", one.last_code,
        )
        for one in found
    ]  # fmt: skip
    run.out.table(("ACCOUNT", "KIND", "STATE", "SINCE", "TOKEN ENDS", "CODE"), rows)
    if more is not None:
        run.out.say(f"There may be more: --after {more}", style="dim")


@connections.command("show")
def show_connection(ctx: typer.Context, key: Key) -> None:
    """Everything about one connection but its secrets."""
    run: Context = ctx.obj
    one = run.app.sync.connections.get(key)
    if run.out.as_json:
        run.out.json(one.to_json())
        return
    now = run.now
    times = {name: getattr(one, name) for name in ("state_since", "expires_at", "refreshed_at", "retry_at")}
    shown = {name: when(value, now) if value else None for name, value in times.items()}
    run.out.fields(
        [
            ("connection", one.resource_key),
            ("kind", one.kind),
            ("state", f"{one.state.value}, since {shown['state_since']}"),
            ("grant", f"{one.grant_id}, version {one.version}"),
            ("token ends", shown["expires_at"]),
            ("refreshed", shown["refreshed_at"]),
            ("failed refreshes", counted(one.failures, "refresh", "refreshes") if one.failures else None),
            ("next try", shown["retry_at"]),
            ("last code", one.last_code),
            ("details", ", ".join(f"{name}={value}" for name, value in sorted(one.details.items()))),
            ("connected", when(one.created_at, now)),
        ]
    )


@connections.command("test")
def test_connection(ctx: typer.Context, key: Key) -> None:
    """Refresh the token now, and say whether the account can be used."""
    run: Context = ctx.obj
    app = run.program("testing a connection")
    asyncio.run(_tested(app, key))
    one = app.sync.connections.get(key)
    if run.out.as_json:
        run.out.json(one.to_json())
    else:
        run.out.say(f"{key} is well: {one.kind}, version {one.version}.")


async def _tested(app: Resilient, key: str) -> None:
    await app.ready()
    try:
        await app.connections.get(key)
        await app.grants.test(key)
    finally:
        await app.grants.close()
        if (engine := app.database.async_engine) is not None:
            await engine.dispose()


@connections.command("revoke")
def revoke_connection(ctx: typer.Context, key: Key, *, yes: Yes = False) -> None:
    """Forget the credentials of an account.

    Its jobs wait until it is connected again.
    """
    run: Context = ctx.obj
    one = run.app.sync.connections.get(key)
    if not run.out.confirm(f"Forget the credentials of {one.resource_key}?", yes=yes, dry_run=False):
        raise typer.Exit(FAILED)
    done = run.app.sync.connections.revoke(key)
    if run.out.as_json:
        run.out.json({"revoked": done})
    else:
        run.out.say(f"{key} is revoked." if done else f"{key} was revoked before.")


@connections.command("release")
def release_suspects(ctx: typer.Context, provider: Name, *, yes: Yes = False) -> None:
    """The provider erred when it called many accounts dead at once.

    They go on, and so do all others at this provider.
    """
    _decide(ctx, provider, "release", "Use the suspect credentials again", yes=yes)


@connections.command("confirm")
def confirm_suspects(ctx: typer.Context, provider: Name, *, yes: Yes = False) -> None:
    """The accounts that were called dead at once are dead.

    Their customers are told, and all other accounts go on.
    """
    _decide(ctx, provider, "confirm", "Tell their customers to connect them again", yes=yes)


def _decide(ctx: typer.Context, provider: str, verb: str, question: str, *, yes: bool) -> None:
    run: Context = ctx.obj
    api = run.program("deciding about suspects").sync.connections
    count = len(api.list(provider, state=GrantState.SUSPECT, limit=1000))
    more = "+" if count == 1000 else ""  # noqa: PLR2004 - the page above
    if not count:  # nothing to lose: it may still be shut from before
        yes, question = True, ""
    if not run.out.confirm(f"{count}{more} accounts of {provider} are suspect. {question}?", yes=yes, dry_run=False):
        raise typer.Exit(FAILED)
    done = api.release(provider) if verb == "release" else api.confirm(provider)
    if run.out.as_json:
        run.out.json({verb: done})
    elif not done:
        run.out.say(f"No account of {provider} is suspect.")
    else:
        run.out.say(f"{counted(done, 'grant')} of {provider}: {verb.removesuffix('e')}ed.")


@connections.command("add")
def add_connection(
    ctx: typer.Context,
    key: Key,
    kind: Annotated[str, typer.Option(help="What it is: token, api-key, basic or client-credentials.")] = "token",
    user: Annotated[str, typer.Option(help="The user, for basic.", show_default=False)] = "",
    grant_of: Annotated[
        str | None, typer.Option(help="Share the grant of this account instead.", show_default=False)
    ] = None,
    detail: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the provider's placeholders.", show_default=False)
    ] = None,
) -> None:
    """Give an account credentials.

    A secret is asked for, or read from a pipe.
    """
    run: Context = ctx.obj
    api = run.program("adding a connection").sync.connections
    details = dict(pair(one) for one in detail or ())
    if grant_of is not None:
        made = api.add(key, grant_of=grant_of, details=details)
    else:
        made = api.add(key, **_credentials(kind, user), details=details)
    say_connected(run, made)


def _credentials(kind: str, user: str) -> dict[str, Any]:
    if kind == "client-credentials":
        return {"client_credentials": True}
    if kind not in ("token", "api-key", "basic"):
        raise InvalidInput(f"--kind {kind} is none of token, api-key, basic and client-credentials")
    if kind == "basic" and not user:
        raise InvalidInput("--kind basic needs --user")
    typed = secret("Password" if kind == "basic" else "Secret")
    return {"user": user, "password": typed} if kind == "basic" else {kind.replace("-", "_"): typed}


def secret(name: str) -> str:
    """What is typed without being shown, or comes through a pipe. Raises `InvalidInput`."""
    text: str = typer.prompt(name, hide_input=True) if sys.stdin.isatty() else sys.stdin.readline()
    if not text.strip():
        raise InvalidInput("no secret came: type it at the prompt, or send it through a pipe")
    return text.strip()


def pair(text: str) -> tuple[str, str]:
    """One ``--detail``. Raises `InvalidInput`."""
    name, found, value = text.partition("=")
    if not found or not name:
        raise InvalidInput(f"--detail {name!r}: write NAME=VALUE")
    return name, value


def say_connected(run: Context, one: ConnectionInfo) -> None:
    """Print that an account is connected."""
    if run.out.as_json:
        run.out.json(one.to_json())
    else:
        run.out.say(f"{one.resource_key} is connected: {one.kind}, version {one.version}.")


# -- keys ----------------------------------------------------------------------------------------------------


@secrets.command("new")
def newsecret(ctx: typer.Context) -> None:
    """Make a key: it is printed once and stored nowhere."""
    run: Context = ctx.obj
    from resilient.store.secrets import VARIABLE, new_key  # noqa: PLC0415 - half a second of imports, only where needed

    key = new_key()
    if run.out.as_json:
        run.out.json({"key": key})
        return
    run.out.console.print(key)
    run.out.errors.print(f"Put it in front of {VARIABLE} in every process, then: resilient secrets rotate")


@secrets.command("rotate")
def rotate_secrets(ctx: typer.Context) -> None:
    """Encrypt everything with the first key.

    The others are not needed after it.
    """
    run: Context = ctx.obj
    done = run.app.sync.connections.rotate_secrets()
    if run.out.as_json:
        run.out.json({"rotated": done})
    else:
        run.out.say(f"Encrypted {counted(done, 'grant')} with the first key.")
