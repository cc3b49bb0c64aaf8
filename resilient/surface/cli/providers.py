"""``resilient providers ...``: the known APIs, the facts of each in words and as JSON, and a template for another."""

from __future__ import annotations

import keyword
import re
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, date, datetime
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from resilient.core.base.budgets import GENERIC
from resilient.core.base.errors import FailureKind, InvalidInput, Scope
from resilient.core.base.instants import Word
from resilient.core.base.phrases import figure, length, nearest, span
from resilient.core.provider.auth import ApiKey, Basic, OAuth2, Rotation
from resilient.core.provider.facts import GENERIC as UNKNOWN
from resilient.core.provider.facts import is_old
from resilient.core.provider.rules import MESSAGES
from resilient.core.sync.paginators import (
    GraphQLPages,
    LastKey,
    LinkHeader,
    NextCursor,
    NextUrl,
    Offset,
    OnePage,
    PageNumber,
)
from resilient.surface.cli.exits import NotFound
from resilient.surface.cli.output import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.core.events.webhook import Signature, Webhook
    from resilient.core.gates.rate_limit import Limit
    from resilient.core.gates.retry_after import WaitDialect
    from resilient.core.provider.auth import Auth
    from resilient.core.provider.facts import Provider
    from resilient.core.provider.rules import Rule, Wait
    from resilient.core.sync.incremental import Incremental
    from resilient.core.sync.paging import Paginator
    from resilient.surface.cli.context import Context


providers = typer.Typer(help="Known third-party APIs: see their facts, write a new one.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A provider's name, such as github.")]
TEMPLATES: Final = "resilient.surface"
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_OLD: Final = "read more than a year ago: compare it with what its sources say now"


def today() -> date:
    """The day by which facts are old."""
    return datetime.now(UTC).date()


@providers.command("list")
def list_providers(ctx: typer.Context) -> None:
    """List the installed providers, and the app's own."""
    run: Context = ctx.obj
    every = _known(run)
    if run.out.as_json:
        run.out.json({"providers": [{"name": name, **described(one)} for name, one in every.items()]})
        return
    rows = [
        Row(
            name,
            one.title,
            ", ".join(dict.fromkeys(auth.kind for auth in one.auth)) or "by its SDK",
            limits_in_words(one),
            one.verified_on,
            remark=_OLD if is_old(one.verified_on, today()) else "",
        )
        for name, one in every.items()
    ]
    run.out.table(("NAME", "TITLE", "CREDENTIALS", "LIMITS OF AN ACCOUNT", "VERIFIED ON"), rows)


@providers.command("show")
def show_provider(ctx: typer.Context, name: Name) -> None:
    """Everything that is known about one API.

    What of it is not verified is marked. With --app, as that program has configured it.
    """
    run: Context = ctx.obj
    if (provider := _known(run, name).get(name)) is None:
        hint = "" if run.app_name else "; one of your program's own needs --app"
        raise NotFound(
            f"no provider is called {name!r}{nearest(name, _known(run))}: see `resilient providers list`{hint}"
        )
    if run.out.as_json:
        run.out.json(described(provider))
        return
    run.out.fields([("provider", f"{provider.title} ({provider.name})"), ("verified on", provider.verified_on)])
    if is_old(provider.verified_on, today()):
        run.out.paragraph(f"Warning: {_OLD}", style="yellow")
    for heading, lines in facts_of(provider):
        run.out.heading(heading)
        for line in lines:
            run.out.paragraph(line, indent=2)


def _known(run: Context, *names: str) -> dict[str, Provider]:
    """The installed providers (of these names), as the program has configured them, and the program's own."""
    from resilient.engine.ground.providers import providers_by_name  # noqa: PLC0415 - half a second of imports, only where needed

    installed = {name: make() for name, make in providers_by_name().items() if not names or name in names}
    return dict(sorted({**installed, **(run.app.providers if run.app_name else {})}.items()))


@providers.command("new")
def new_provider(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in resource keys: lower case, such as acme.")],
    into: Annotated[Path, typer.Option(help="The directory to write to.", file_okay=False)] = Path(),
    *,
    force: Annotated[bool, typer.Option("--force", help="Overwrite.")] = False,
) -> None:
    """Write a provider to fill in, and the test of its contract."""
    run: Context = ctx.obj
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise InvalidInput(f"{name!r} cannot name a provider: use lower-case letters, digits and _, such as 'acme'")
    words = {"name": name, "module": name, "title": name.replace("_", " ").title(), "constant": name.upper()}
    made = [(into / f"{name}.py", "provider.py.txt"), (into / f"test_{name}.py", "provider_test.py.txt")]
    there = [str(path) for path, _ in made if path.exists()]
    if there and not force:
        raise InvalidInput(f"{' and '.join(there)} would be overwritten: choose another name, or say --force")
    into.mkdir(parents=True, exist_ok=True)
    for path, template in made:
        text = (files(TEMPLATES) / "templates" / template).read_text(encoding="utf-8")
        path.write_text(text.format(**words), encoding="utf-8")
    if run.out.as_json:
        run.out.json({"written": [str(path) for path, _ in made]})
        return
    module, test = (str(path) for path, _ in made)
    run.out.say(f"Wrote {module} and {test}.")
    run.out.say(f"Fill in the facts, then run: python -m pytest {test}")
    run.out.say("It names what is missing (pip install 'resilient-engine[testing]' brings pytest).", style="dim")


_OK: Final = 200
_SECRET: Final = frozenset({"client_secret"})
_CHALLENGES: Final = {
    "echo": "by sending a value back",
    "hmac": "by signing a value",
    "status": "by refusing bad signatures",
    "secret": "by a secret it sends once, which a person types in there",
}
_SCHEMES: Final = {
    "hmac-sha256": "the HMAC-SHA256",
    "hmac-sha1": "the HMAC-SHA1",
    "sha256": "the SHA-256",
    "ed25519": "the Ed25519 signature",
}
_SIGNED: Final = {
    "body": "the body",
    "timestamp": "the time",
    "id": "the delivery's id",
    "method": "the method",
    "url": "the address",
    "form": "the fields of a form",
    "secret": "the secret",
}
_KEYS: Final = {
    "text": "",
    "hex": ", with a key in hex",
    "base64": ", with a key in base64",
    "whsec": ", with a key whsec_...",
}
_MEANS: Final = {
    FailureKind.THROTTLED: "come back later",
    FailureKind.QUOTA: "a budget is spent, come back when it is full",
    FailureKind.AUTH: "the credentials are refused",
    FailureKind.TRANSIENT: "a fault that passes, try again",
    FailureKind.AMBIGUOUS: "it may have happened",
    FailureKind.CONFLICT: "somebody else was faster, read it again",
    FailureKind.PERMANENT: "refused for good",
    FailureKind.RESET_CURSOR: "the cursor is refused, start a full pass",
}
_WAITING: Final = {Scope.ENDPOINT: " (the endpoint alone)", Scope.PROVIDER: " (all accounts)"}
_CHANGES: Final = {
    "filter": "what changed since a time, asked for in {place}",
    "token": "what changed since a cursor of theirs, sent in {place}",
    "link": "what changed since a link of theirs",
    "key": "what comes after the last {field}, sent in {place}",
    "conditional": "whether anything changed, by {place}; if not, the answer is 304",
}
_DELETIONS: Final = {
    "never": "deletions are not told",
    "marked": "what was deleted is marked by {deleted}",
    "separate": "deletions have to be read separately",
    "webhook": "deletions are told by webhooks only",
}
_CLIENTS: Final = {
    "post": "its id and secret in the body",
    "basic": "its id and secret by HTTP basic",
    "jwt": "a signed assertion (JWT)",
    "none": "its id alone",
}
_PKCE: Final = {"required": "with PKCE, which is required", "supported": "with PKCE", "none": "without PKCE"}
_TIMES: Final = {
    Word.DELTA_S: "whole seconds",
    Word.DELTA_S_FLOAT: "seconds",
    Word.DELTA_MS: "milliseconds",
    Word.EPOCH_S: "seconds since 1970",
    Word.EPOCH_S_FLOAT: "seconds since 1970, with a fraction",
    Word.EPOCH_MS: "milliseconds since 1970",
    Word.ISO8601: "a date and time",
    Word.HTTP_DATE: "an HTTP date",
    Word.DURATION: "such as 1m30s",
    Word.AUTO: "any of the usual forms",
    Word.NONE: "nothing of use",
}
_ROTATION: Final = {
    Rotation.NONE: "the refresh token stays the same",
    Rotation.OLD_KEPT: "a refresh gives a new refresh token, the old one goes on working",
    Rotation.GRACE: "a refresh gives a new refresh token; the old one can be replayed",
    Rotation.SINGLE_USE: "a refresh token is dead once it was used",
}


def described(value: Any) -> Any:
    """Facts as JSON: what differs from the defaults, functions by their name, no secrets."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = {}
        for one in fields(value):
            inner = getattr(value, one.name)
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            if one.name not in _SECRET and one.repr and (inner != default or one.name == "kind"):
                shown[one.name] = described(inner)
        return shown
    if hasattr(value, "items"):
        return {str(key): described(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [described(one) for one in value]
    if callable(value):
        value = f"{value.__module__}.{value.__name__}"
    if isinstance(value, (Enum, date)):
        return value.value if isinstance(value, Enum) else value.isoformat()
    return "..." if value is ... else value


def limits_in_words(provider: Provider) -> str:
    """The limits and the cap of one account."""
    words = [_limit(limit) for limit in provider.limits.get("account", ())]
    if cap := provider.concurrency.get("account"):
        words.append(f"{cap} at once")
    if not words and any(level.startswith("account/") for level in provider.limits):
        return "by endpoint"
    return ", ".join(words) or "not published"


def facts_of(provider: Provider) -> Iterator[tuple[str, list[str]]]:
    """Headings and their lines."""
    private = [f"{host} may be at an address that is not public" for host in provider.private_hosts]
    yield "Addresses", [provider.base_url, *(f"also {host}" for host in provider.hosts), *private, *_headers(provider)]
    yield "Credentials", [*_credentials(provider)]
    yield "Limits", list(_limits(provider)) or ["not published"]
    yield "Waiting", list(_waits(provider.waits))
    yield "Errors", list(_errors(provider))
    yield "Repeats", list(_repeats(provider))
    if batch := provider.batch:
        parts = f"up to {batch.most} requests, in {batch.requests}; answers in {batch.responses}"
        yield "Batches", [f"POST {batch.path}: {parts}"]
    yield "Pages", [_pages(name, one) for name, one in provider.pagination.items()] or ["none"]
    yield "Changes", [_change(name, one) for name, one in provider.incremental.items()] or ["none"]
    yield "Webhooks", list(_webhook(provider)) or ["none"]
    yield "Read in", list(provider.sources)
    if provider.unverified:
        yield "Not verified", list(provider.unverified)


def _headers(provider: Provider) -> Iterator[str]:
    for name, value in provider.headers.items():
        yield f"every request carries {name}: {value}"
    if provider.propagates_trace:
        yield "requests carry traceparent: they join the caller's trace"
    pages = provider.pagination.values()
    if provider.graphql != UNKNOWN.graphql or any(isinstance(one, GraphQLPages) for one in pages):
        yield f"GraphQL: {provider.graphql}"


def _credentials(provider: Provider) -> Iterator[str]:
    if provider.anonymous:
        yield "none are needed: an account without a connection sends its requests bare"
    for auth in provider.auth:
        yield from _auth(auth)
    if not provider.auth and not provider.anonymous:
        yield "signed by the vendor's SDK"
    if provider.whoami:
        yield f"a test request sends {provider.whoami}"
    if provider.single_account:
        yield f"one account: connected as {provider.name}, without a second segment"


def _auth(auth: Auth) -> Iterator[str]:
    match auth:
        case OAuth2():
            yield from _oauth(auth)
        case ApiKey(query=query) if query:
            yield f"an API key, in the parameter {query} of the URL"
        case ApiKey():
            yield f"an API key, in the header {auth.header}: {auth.prefix}..."
        case Basic():
            yield f"HTTP basic, of {auth.user} and {auth.password}"
        case _:
            yield f"a token, in the header {auth.header}: {auth.prefix}..."


def _oauth(auth: OAuth2) -> Iterator[str]:
    flows = " or ".join(flow.replace("_", " ") for flow in auth.flows)
    yield f"OAuth 2, by {flows or 'a refresh token of its own login'}"
    if auth.authorize_url:
        yield f"people consent at {auth.authorize_url}"
    way = "asked in JSON" if auth.body == "json" else "asked by a form"
    yield f"tokens come from {auth.token_url}, {way}"
    yield f"the client sends {_CLIENTS[auth.client_auth]}, {_PKCE[auth.pkce]}"
    if auth.refresh_url:
        yield f"refreshed at {auth.refresh_url}"
    if auth.refreshes:
        lasts = span(auth.lifetime) if auth.lifetime else "as long as the answer says"
        grace = f" for {span(auth.grace)}" if auth.grace else ""
        yield f"access tokens last {lasts}; {_ROTATION[auth.rotation]}{grace}"
    else:
        yield "tokens do not expire, and there is nothing to refresh"
    if auth.refresh_lifetime:
        yield f"a refresh token lasts {span(auth.refresh_lifetime)}"
    if auth.offline_scopes:
        yield f"no refresh token without the scope {' '.join(auth.offline_scopes)}"
    if auth.revoke_url:
        yield f"revoked at {auth.revoke_url}"
    if auth.keep or auth.keep_callback:
        yield f"kept of the answer and the callback: {', '.join((*auth.keep, *auth.keep_callback))}"
    if auth.shared:
        yield "one grant may serve several accounts"
    if auth.limits:
        yield f"its token endpoint: {', '.join(_limit(limit) for limit in auth.limits)}"


def _limits(provider: Provider) -> Iterator[str]:
    for level, limits in provider.limits.items():
        yield f"{level}: {', '.join(_limit(limit) for limit in limits)}"
    for level, cap in provider.concurrency.items():
        yield f"{level}: {cap} at once"
    if provider.route is not None:
        yield f"{described(provider.route)} says which endpoint a request goes to, and what it costs"
    if provider.cost is not None:
        yield f"{described(provider.cost)} reads in the answer what it really cost"


def _waits(waits: WaitDialect) -> Iterator[str]:
    for name, word in waits.hints:
        yield f"the header {name} is asked first; it holds {_TIMES[word]}"
    yield f"Retry-After holds an HTTP date or {_TIMES[waits.retry_after]}"
    if waits.budgets == GENERIC:
        yield "what is left stands in the usual headers, if any: ratelimit-*, x-ratelimit-*, x-rate-limit-*"
        return
    for budget in waits.budgets:
        read = [name for name in (budget.remaining, budget.used, budget.combined) if name]
        if read:
            yield f"what is left of {budget.name} stands in {', '.join(read)}"


def _errors(provider: Provider) -> Iterator[str]:
    errors = provider.errors
    if places := [*errors.code, *([f"the header {errors.code_header}"] if errors.code_header else [])]:
        yield f"a code stands in {', '.join(places)}"
    if errors.code_text:
        yield f"in a body that is no JSON a code is what fits {errors.code_text}"
    if errors.code_form:
        yield f"of a code counts what fits {errors.code_form}"
    if errors.message != MESSAGES:
        yield f"a message stands in {', '.join(errors.message)}"
    yield from map(_rule, errors.rules)
    for name, meaning in provider.exceptions.items():
        phrase = _MEANS.get(meaning) if isinstance(meaning, FailureKind) else f"{described(meaning)} says what it means"
        yield f"the SDK's {_dotted(name)}: {phrase}"
    yield "everything else counts by its status"


def _dotted(name: str | type[BaseException]) -> str:
    return name if isinstance(name, str) else f"{name.__module__}.{name.__qualname__}"


def _limit(limit: Limit) -> str:
    burst = f" (burst {figure(limit.burst)})" if limit.burst else ""
    return f"{figure(limit.rate)} per {length(limit.per)}{burst}"


def _rule(rule: Rule) -> str:
    status = rule.status
    if isinstance(status, range):
        status_words = f"{status.start} to {status.stop - 1}"
    else:
        status_words = " or ".join(
            str(one) for one in ((status,) if isinstance(status, int) else status or ("any error",))
        )
    code = (rule.code,) if isinstance(rule.code, str) else rule.code
    parts = [f"the code {' or '.join(code)}"] if code else []
    parts += [f"{'something' if value is ... else repr(value)} in {path}" for path, value in rule.where.items()]
    parts += [f"{name} that fits {pattern}" for name, pattern in rule.header.items()]
    parts += [f"text that fits {rule.text}"] if rule.text else []
    parts += [] if rule.json is None else ["JSON"] if rule.json else ["no JSON"]
    on = f" on {rule.path}" if rule.path else ""
    means = "a success" if rule.kind is None else _MEANS.get(rule.kind, rule.kind.value)
    scope = "" if rule.scope is None else _WAITING.get(rule.scope, "")
    return f"{status_words}{on}{' with ' if parts else ''}{' and '.join(parts)}: {means}{scope}{_wait_words(rule.wait)}"


def _wait_words(wait: Wait | None) -> str:
    """How long one error makes wait."""
    if wait is None:
        return ""
    places = [f"the header {wait.header}"] if wait.header else []
    places += [wait.body] if wait.body else []
    places += [f"text that fits {wait.text}"] if wait.text else []
    places += ["the body, computed"] if wait.seconds is not None else []
    words = f"; how long stands in {' or '.join(places)}" if places else ""
    if wait.fallback is not None:
        return f"{words}; {span(wait.fallback)} if nothing is told"
    return f"{words}; until the next {wait.period} if nothing is told" if wait.period else words


def _repeats(provider: Provider) -> Iterator[str]:
    idempotency = provider.idempotency
    if idempotency is None:
        yield "it takes no idempotency key"
    else:
        place = f"the parameter {idempotency.query}" if idempotency.query else f"the header {idempotency.header}"
        place = "the end of the path" if idempotency.in_path else place
        life = f"for {span(idempotency.life)}" if idempotency.life else "for a time that is not documented"
        paths = "" if idempotency.paths == ("*",) else f" to {', '.join(idempotency.paths)}"
        yield f"{place} holds the key of {' and '.join(sorted(idempotency.methods))}{paths}; it is remembered {life}"
        if idempotency.lives_with == "grant":
            yield "it is forgotten once the account is connected anew"
    if provider.reads:
        yield f"these change nothing, whatever their method says: {', '.join(provider.reads)}"


def _pages(name: str, one: Paginator) -> str:
    most = f", up to {one.most:,} a page" if one.most else ""
    return f"{name}: {_next_page(one)}{most}"


def _next_page(one: Paginator) -> str:
    phrase = "all at once" if isinstance(one, OnePage) else type(one).__name__
    match one:
        case LinkHeader():
            phrase = f"the header Link names the {one.rel} page"
        case NextUrl():
            phrase = f"{one.url} holds the next page's address"
        case NextCursor():
            into = f"the parameter {one.query}" if one.query else f"{one.body} of the next body"
            phrase = f"{one.cursor or f'the header {one.header}'} holds a cursor, which goes into {into}"
        case LastKey():
            phrase = f"the {one.key} of the last record goes into the parameter {one.query}"
        case PageNumber():
            phrase = f"pages are numbered, in the parameter {one.query}"
        case Offset():
            phrase = f"how many were read goes into {one.body or f'the parameter {one.query}'}"
        case GraphQLPages():
            phrase = f"endCursor of pageInfo goes into the variable {one.variable}"
    return phrase


def _change(name: str, one: Incremental) -> str:
    header = f"the header {one.header}"
    place = f"the parameter {one.query}" if one.query else f"{one.body} of the body" if one.body else header
    asks = _CHANGES[one.style].format(place=place, field=one.field)
    life = f"; a cursor lasts {span(one.life)}" if one.life else ""
    return f"{name}: {asks}; {_DELETIONS[one.deletions].format(deleted=one.deleted)}{life}"


def _webhook(provider: Provider) -> Iterator[str]:
    webhook = provider.webhook
    if webhook is None:
        return
    yield from map(_signature, webhook.signatures)
    if not webhook.signatures:
        yield f"not signed: {_place(webhook.token)} holds what was agreed"
    if webhook.events is not None:
        where = f"in {webhook.events}" if webhook.events else "as a list"
        yield f"a delivery may hold several events, {where}: each is a job of its own"
    if webhook.event:
        yield f"what happened stands in {_places(webhook.event)}"
    if webhook.ping:
        yield "it says that something changed, not what"
    if webhook.delivery:
        decides = all(one.covers(place) for one in webhook.signatures for place in webhook.delivery.split())
        unsigned = "" if decides else "; it is not signed, so the body decides"
        yield f"a repeat carries the same id, in {_places(webhook.delivery)}{unsigned}"
    if not webhook.repeats:
        yield "a failed delivery does not come again by itself"
    yield from _answer(webhook)


def _signature(one: Signature) -> str:
    if one.scheme == "equal":
        return f"the header {one.header} holds the secret itself; the body is not signed"
    parts = [_SIGNED[part] for part in re.findall(r"{(\w+)}", one.signed)]
    text = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    within = f"; refused if that is {span(one.tolerance)} off" if one.timestamp else ""
    body = f"; {_place(one.body_hash)} holds the hash of any other body" if one.body_hash else ""
    phrase = f"the header {one.header} holds {_SCHEMES[one.scheme]} of {text}"
    return f"{phrase}, in {one.encoding}{_KEYS[one.key]}{within}{body}"


def _places(places: str) -> str:
    """Several places in words, those of each event together."""
    every = places.split()
    if len(every) > 1 and all(one.startswith("item:") for one in every):
        return f"{', '.join(one.removeprefix('item:') for one in every)} of each event"
    return " and ".join(_place(one) for one in every)


def _place(place: str) -> str:
    """A place of a webhook in words."""
    kind, colon, name = place.partition(":")
    if not colon:
        return f"the header {place}"
    where = {"body": "the body", "item": "each event", "query": "the address"}[kind]
    return f"{name} of {where}" if kind != "query" else f"the parameter {name} of the address"


def _answer(webhook: Webhook) -> Iterator[str]:
    """What it wants of us."""
    if webhook.challenge:
        place = f" ({_place(webhook.challenge_field)})" if webhook.challenge_field else ""
        yield f"its address is proved {_CHALLENGES[webhook.challenge]}{place}"
    if webhook.answer_within or webhook.status != _OK:
        within = f" within {span(webhook.answer_within)}" if webhook.answer_within else ""
        yield f"it wants to be answered {webhook.status}{within}"
    if webhook.life:
        yield f"it ends after {span(webhook.life)} unless it is renewed"
