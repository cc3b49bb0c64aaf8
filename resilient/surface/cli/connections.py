"""``resilient connections ...``, ``secrets ...`` and ``sync ...``: accounts' credentials, never shown; their streams.

A secret is typed at a prompt or comes through a pipe: an argument would stay in the shell's history and be seen by
every user of the machine.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from resilient.core.accounts.tokens import UNREADABLE, GrantState
from resilient.core.base.errors import InvalidInput, ResilientError, ResourceStopped
from resilient.core.base.phrases import counted, span, when
from resilient.core.inspect.why import credentials_remedy
from resilient.surface.cli.exits import FAILED, NotFound
from resilient.surface.cli.jobs import PageSize, Yes  # noqa: TC001 - typer evaluates annotations
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.engine.accounts.connections import ConnectionInfo
    from resilient.engine.app.app import Resilient
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
    infos = run.app.sync.connections.list(provider, state=state, limit=limit, after=after)
    more = infos[-1].resource_key if len(infos) == limit else None
    gates = _gates(run, [one.resource_key for one in infos])
    if run.out.as_json:
        documents = [{**one.to_json(), "gate": gates.get(one.resource_key)} for one in infos]
        run.out.json({"connections": documents, "next": more})
        return
    if not infos:
        run.out.say("No connection fits." if provider or state or after else "There are no connections.")
        return
    now = run.now
    rows = [
        Row(
            one.resource_key, one.kind, _state(one, gates), when(one.state_since, now),
            when(one.expires_at, now) if one.expires_at else "", one.last_code,
        )
        for one in infos
    ]  # fmt: skip
    run.out.table(("ACCOUNT", "KIND", "STATE", "SINCE", "TOKEN ENDS", "CODE"), rows)
    if more is not None:
        run.out.say(f"There may be more: --after {more}", style="dim")


def _gates(run: Context, keys: list[str]) -> dict[str, str]:
    """The codes of the gates of credentials that are shut, of these accounts and of their providers."""
    from resilient.store.gates import resources  # noqa: PLC0415 - the store: only where needed

    names = sorted({*keys, *(key.partition("/")[0] for key in keys)})
    facts = run.app.database.transaction_sync(lambda c, d: resources.read(c, d, names))
    return {name: one.auth for name, one in facts.items() if one.auth != "ok"}


def _state(one: ConnectionInfo, gates: Mapping[str, str]) -> str:
    """How it stands: a grant that is well is no use behind a gate that is shut."""
    gate = gates.get(one.resource_key)
    return gate if gate == UNREADABLE else one.state.value


@connections.command("show")
def show_connection(ctx: typer.Context, key: Key) -> None:
    """Everything about one connection but its secrets."""
    run: Context = ctx.obj
    run.go_to_shard_of(key)
    one = run.app.sync.connections.get(key)
    gates = _gates(run, [one.resource_key])
    if run.out.as_json:
        run.out.json({**one.to_json(), "gate": gates.get(one.resource_key)})
        return
    now = run.now
    times = {name: getattr(one, name) for name in ("state_since", "expires_at", "refreshed_at", "retry_at")}
    shown = {name: when(value, now) if value else None for name, value in times.items()}
    run.out.fields(
        [
            ("connection", one.resource_key),
            ("kind", one.kind),
            ("state", f"{one.state.value}, since {shown['state_since']}"),
            *((f"gate of {name}", f"{code}: {credentials_remedy(name, code)}") for name, code in gates.items()),
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
    run.go_to_shard_of(key)
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
    except ResourceStopped as stopped:
        raise await _explained(app, key, stopped) from None
    finally:
        await app.grants.close()
        if (engine := app.database.async_engine) is not None:
            await engine.dispose()


async def _explained(app: Resilient, key: str, stopped: ResourceStopped) -> ResilientError:
    """Why an account cannot be used: no job waits here, and nothing goes on by itself."""
    reasons = (await app.resources.why(stopped.resource)).reasons if stopped.gate == "auth" else ()
    text = next((one.text for one in reasons if one.code == "auth" and one.resource == stopped.resource), None)
    if text is None:
        return ResourceStopped(stopped.resource, stopped.gate, stopped.until, then="nothing was refreshed")
    if credentials_remedy(key, None) in text:
        text += f" `resilient connect {key.partition('/')[0]} {key}`, or `resilient connections add {key}`."
    return ResilientError(text)


@connections.command("revoke")
def revoke_connection(ctx: typer.Context, key: Key, *, yes: Yes = False) -> None:
    """Forget the credentials of an account.

    Its jobs wait until it is connected again.
    """
    run: Context = ctx.obj
    run.go_to_shard_of(key)
    one = run.app.sync.connections.get(key)
    if not run.out.confirm(f"Forget the credentials of {one.resource_key}?", yes=yes, dry_run=False):
        raise typer.Exit(FAILED)
    with run.audited("connections revoke", key) as outcome:
        done = run.app.sync.connections.revoke(key)
        outcome["revoked"] = done
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
    app = run.program("deciding about suspects")
    api = app.sync.connections
    if provider not in app.providers and not api.list(provider, limit=1):
        names = f": there are {', '.join(sorted(app.providers))}" if app.providers else ""
        raise NotFound(f"there is no provider {provider!r}{names}")
    count = len(api.list(provider, state=GrantState.SUSPECT, limit=1000))
    more = "+" if count == 1000 else ""  # noqa: PLR2004 - the page above
    if not count:  # nothing to lose: it may still be shut from before
        yes, question = True, ""
    if not run.out.confirm(
        f"{count}{more} of {provider}'s accounts {'is' if count == 1 else 'are'} suspect. {question}?",
        yes=yes,
        dry_run=False,
    ):
        raise typer.Exit(FAILED)
    with run.audited(f"connections {verb}", provider) as outcome:
        done = api.release(provider) if verb == "release" else api.confirm(provider)
        outcome["grants"] = done
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
    run.go_to_shard_of(key)
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
    name, equals, value = text.partition("=")
    if not equals or not name:
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
    from resilient.store.accounts.secrets import VARIABLE, new_key  # noqa: PLC0415 - half a second of imports, only where needed

    key = new_key()
    if run.out.as_json:
        run.out.json({"key": key})
        return
    run.out.result(key)
    run.out.remark(f"The first key: set {VARIABLE} to it in every process (or give it as Resilient(secrets=[...])).")
    run.out.remark(
        "A later one, each step in every process before the next: give it as the last, with a comma between; put it in"
        " front; run `resilient secrets rotate`, then take the old one away."
    )


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
        what = counted(done, "grant or sealed payload", "grants and sealed payloads")
        run.out.say(f"Encrypted {what} with the first key.")


sync = typer.Typer(help="Sync streams: where they stand.", no_args_is_help=True)
Pattern = Annotated[
    str | None,
    typer.Option("--resource", "-r", metavar="PATTERN", help="Only of these resources, as github/*."),
]
Part = Annotated[str | None, typer.Option(help="Only this part (the stream's parameters, as `status` shows them).")]


@sync.command("status")
def status(
    ctx: typer.Context,
    stream: Annotated[str | None, typer.Argument(metavar="STREAM", help="Only this stream.")] = None,
    pattern: Pattern = None,
    part: Part = None,
    limit: PageSize = 50,
) -> None:
    """Show each stream's pass, and how far it is. Those that wait longest for the end of a pass come first."""
    run: Context = ctx.obj
    streams = run.app.sync.streams.list(stream, pattern, part=part)
    if run.out.as_json:
        run.out.json({"streams": [one.to_json() for one in streams]})
        return
    if not streams:
        run.out.say("No stream that was read fits." if stream or pattern or part else "No stream was read yet.")
        return
    now, rows = run.now, []
    streams.sort(key=lambda one: one.cursor.completed_at or _NEVER)
    for one in streams[:limit]:
        c = one.cursor
        ended = f"{span((now - c.completed_at).total_seconds())} ago" if c.completed_at else "never"
        read = f"{c.records} in {counted(c.pages, 'page')}" + (f", {c.rejected} rejected" if c.rejected else "")
        cells = (one.stream, one.resource_key, one.part, one.doing, read, ended, c.error)
        folded = " ".join(filter(None, (one.resource_key, one.part))) + (f"; began anew: {c.error}" if c.error else "")
        rows.append(Row(*cells, folded=folded, whole=True))
    run.out.table(("STREAM", "RESOURCE", "PART", "DOING", "READ", "LAST END", "BEGAN ANEW"), rows, folds=(1, 2, 6))
    if len(streams) > limit:
        run.out.say(f"... and {len(streams) - limit:,} more: --limit, --resource", style="dim")


@sync.command("reset")
def reset(
    ctx: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    pattern: Pattern = None,
    part: Part = None,
) -> None:
    """Let the next pass of a stream be a full one."""
    run: Context = ctx.obj
    with run.audited("sync reset", " ".join(one for one in (stream, pattern, part) if one)) as outcome:
        count = run.app.sync.streams.reset(stream, pattern, part=part, reason="reset from the command line")
        outcome["reset"] = count
    if not count:
        raise NotFound(f"no stream {stream!r} was read there; `resilient sync status` lists those that were")
    if run.out.as_json:
        run.out.json({"reset": count})
    else:
        run.out.say(f"The next pass of {count} stream{'s' if count > 1 else ''} reads everything.")


@sync.command("forget")
def forget(
    ctx: typer.Context,
    stream: Annotated[str | None, typer.Argument(metavar="STREAM", help="The stream's name; without it all.")] = None,
    pattern: Pattern = None,
    part: Part = None,
) -> None:
    """Forget where streams stand, of accounts that are gone for good."""
    run: Context = ctx.obj
    with run.audited("sync forget", " ".join(one for one in (stream, pattern, part) if one)) as outcome:
        count = run.app.sync.streams.forget(stream, pattern, part=part)
        outcome["forgotten"] = count
    if not count:
        raise NotFound("no such stream was read; `resilient sync status` lists those that were")
    if run.out.as_json:
        run.out.json({"forgotten": count})
    else:
        run.out.say(f"Forgot {count:,} cursor{'s' if count > 1 else ''}.")


_NEVER: Final = datetime.min.replace(tzinfo=UTC)
