"""Accounts: what is stopped, equal causes folded; one account with all that stands above it; what can be done."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from resilient.core.alerts.rules import EVENTS
from resilient.core.alerts.words import is_stale, notice
from resilient.core.base import resource_key
from resilient.core.base.errors import ConnectionNotFound, InvalidInput, ResourceStopped
from resilient.core.base.phrases import counted
from resilient.store.inspect import pages
from resilient.store.inspect.resources import keys_of
from resilient.store.inspect.why import path_of
from resilient.store.jobs.changes import UNSET
from resilient.surface.cli import jobs as options_of
from resilient.surface.cli.jobs import word_or_none
from resilient.surface.web.dashboard import bulk
from resilient.surface.web.dashboard.charts import figure, recent
from resilient.surface.web.dashboard.words import GATES, quoted, sentence_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from datetime import datetime

    from starlette.responses import Response

    from resilient.core.alerts.rules import AlertInfo
    from resilient.core.jobs.records import Changed
    from resilient.engine.accounts.connections import ConnectionInfo
    from resilient.store.inspect.pages import Past
    from resilient.surface.web.dashboard.visit import Visit

    Page = Callable[[Visit], Awaitable[Response]]
PAGE: Final = 50
MOST: Final = 10_000  # resources that one change may reach
_INDEXED: Final = ("ready", "running", "dead")  # an index leads to an account's jobs in these states
_EVER: Final = timedelta(days=36_500)  # with a bound SQLite uses the index of scheduled jobs' times
VERBS: Final = {
    "pause": "Pause", "resume": "Resume", "open": "Open the circuit of", "close": "Close the circuit of",
    "reset": "Reset", "limit": "Limit",
}  # fmt: skip
_PAST: Final = {
    "pause": "paused", "resume": "resumed", "open": "opened by hand", "close": "closed by hand",
    "reset": "reset: circuit closed, wait and pause ended", "limit": "limited",
}  # fmt: skip
_ONLY: Final = {"resume": "pause", "close": "breaker"}  # verbs that are for one gate
_SAID: Final = (("limits", "limits"), ("concurrency", "at once"), ("rate", "at"))  # before a change is confirmed


async def accounts(visit: Visit) -> Response:
    """The causes, or a page of accounts if the reader asks for some, or if nothing is stopped."""
    query = visit.query
    gate, code = query.get("gate") or None, query.get("code")
    if gate is not None and gate not in GATES:
        raise InvalidInput(f"gate={gate!r}: use one of {', '.join(GATES)}")
    patterns = _patterns(query.get("q", "").strip())
    cause = None if gate is None else (gate, word_or_none(code) if code else UNSET)
    causes = await visit.read(pages.causes, visit.now)
    folded = cause is None and not patterns and "after" not in query and "all" not in query and bool(causes)
    rows = [] if folded else await visit.read(
        pages.resource_page, patterns=patterns, cause=cause, after=query.get("after"), limit=PAGE + 1
    )  # fmt: skip
    following = rows[PAGE - 1][0].key if len(rows) > PAGE else None
    return visit.render(
        "accounts.html", causes=causes, most=PAGE, rows=rows[:PAGE], following=following, folded=folded, gate=gate,
        successes=await visit.read(pages.successes, [info.key for info, _ in rows[:PAGE]]),
        code=code or "", shown_code=word_or_none(code) if code else None, q=query.get("q", ""),
        command=_listed(patterns, gate), verbs=VERBS,
    )  # fmt: skip


def _patterns(text: str) -> tuple[str, ...]:
    """The patterns for a text that somebody typed; the bare name of a provider means itself and all below it."""
    if not text:
        return ()
    resource_key.check_pattern(text)
    return (text, f"{text}/**") if resource_key.depth(text) == 1 and not _is_wild(text) else (text,)


def _is_wild(pattern: str) -> bool:
    return "*" in pattern or "?" in pattern


def _listed(patterns: Sequence[str], gate: str | None) -> str:
    """The command that lists the same accounts; two for a provider."""
    stop = "" if gate is None else f" --gate {gate}"
    return "; ".join(f"resilient resources list{one}{stop}" for one in [f" {quoted(one)}" for one in patterns] or [""])


async def account(visit: Visit) -> Response:
    """One resource, and its ancestors."""
    key = resource_key.check_stored(visit.name("key"))
    app = visit.app
    path, moment = await visit.read(path_of, key, app.policies.for_key)
    why = await app.resources.why(key)
    keys = [level.facts.key for level in path.levels]
    infos = {one: await app.resources.get(one) for one in keys}
    try:
        connection = await app.connections.get(key)
    except ConnectionNotFound:
        connection = None
    latest = await app.jobs.list(within=key, state=_INDEXED, limit=10, payloads=False)
    struggling = await app.jobs.list(
        within=key, state="scheduled", run_after=_EVER, limit=10, payloads=False, order="oldest"
    )
    past = await visit.read(pages.past, key, list({one.id for one in (*latest, *struggling)}))
    kinds, rows = await visit.read(pages.jobs_by_kind, key), await visit.read(pages.streams, within_key=key, limit=20)
    title = f"Executions through {key} within 48 hours"
    is_provider = resource_key.depth(key) == 1  # an account's own executions are not kept
    return visit.render(
        "account.html", key=key, why=why,
        throughput=figure(await recent(visit), visit.now, title, provider=key) if is_provider else None,
        levels=list(reversed(path.levels)), infos=infos, moment=moment,
        uses=await visit.read(pages.limit_uses, keys), kinds=kinds,
        latest=latest, struggling=struggling, history=history(past, visit.now), attempts=past.attempts,
        audited=pages.AUDITED,
        reconnect=reconnect_of(visit, connection),
        streams=rows, successes=await visit.read(pages.successes, keys), connection=connection,
        is_unknown=infos[key].created_at is None and not (kinds or latest or struggling or rows or connection),
        knows_policies=bool(app.kinds or app.providers), whoami=_whoami(visit, key),
        command=f"resilient resources show {key}",
    )  # fmt: skip


def _whoami(visit: Visit, key: str) -> str | None:
    """What a test request of this resource sends; None if it can have none."""
    provider = visit.app.providers.get(key.partition("/")[0])
    if provider is None or not ("/" in key or provider.single_account or provider.anonymous):
        return None
    return provider.whoami or None


def history(past: Past, now: datetime) -> list[dict[str, Any]]:
    """Alerts and changes by people in one list, the latest first: ``at``, ``until``, ``what``, ``by``, ``state``.

    Of an alert that came again the last time is kept, with how often. A condition lasted until it was last found.
    """
    lines = [_alert_line(one, now) for one in past.alerts]
    lines += [
        {
            "at": one.at, "until": None, "what": one.action + (f": {one.why}" if one.why else ""), "by": one.who,
            "state": "cancelled", "word": "by hand",
        }
        for one in past.changes
    ]  # fmt: skip
    return sorted(lines, key=lambda line: line["at"], reverse=True)


def _alert_line(one: AlertInfo, now: datetime) -> dict[str, Any]:
    """An alert of the past: what lasted from when to when it was last found, what happened when, and the last time."""
    until: datetime | None = one.last_at
    if one.name in EVENTS:
        state, word, until = "failed", "happened", until if one.count > 1 else None
    elif one.resolved_at:
        state, word = "well", "over"
    elif is_stale(one, now):
        state, word = "warn", "not found lately"
    else:
        state, word, until = "failed", "goes on", None
    text = notice("new", replace(one, last_at=now), now).text  # when it was last found stands beside it
    return {"at": one.first_at, "until": until, "what": text, "by": "", "state": state, "word": word}


def reconnect_of(visit: Visit, connection: ConnectionInfo | None) -> str | None:
    """Where the owner of a dead grant connects again, if the program says where; only a web address is a link."""
    if connection is None or visit.reconnect is None or connection.state.value not in ("needs_reauth", "revoked"):
        return None
    address = visit.reconnect(connection.resource_key)
    return address if address is not None and address.startswith(("https://", "http://", "/")) else None


# -- changes ---------------------------------------------------------------------------------------------------------


async def change_one(visit: Visit) -> Response:
    """Change one resource without asking back."""
    form = visit.form
    key, verb = resource_key.check_stored(form.get("key", "")), _verb(form)
    options = _options(verb, form)
    async with visit.audited(f"resources {verb}", key, form.get("reason")) as outcome:
        changed: Changed = await getattr(visit.app.resources, verb)(key, **options)
        outcome["changed"] = len(changed)
    text = f"{key} is {_PAST[verb]}." if len(changed) else f"Nothing was to be done at {key}."
    return visit.back(visit.url(f"/account/{key}"), text)


async def test_one(visit: Visit) -> Response:
    """Send the test request of one resource."""
    key = resource_key.check(visit.form.get("key", ""))
    try:
        async with visit.audited("resources test", key, visit.form.get("reason")) as outcome:
            answer = await visit.app.resources.test(key)
            outcome["ok"] = int(answer.failure is None)
    except (ResourceStopped, ConnectionNotFound) as refused:
        return visit.back(visit.url(f"/account/{key}"), sentence_of(refused), bad=True)
    text = " ".join((answer.line, *answer.lessons))
    return visit.back(visit.url(f"/account/{key}"), text, bad=answer.failure is not None)


async def change_many(visit: Visit) -> Response:
    """Change the resources of a pattern: the first request counts them, the confirmed one changes them."""
    form = visit.form
    verb, text = _verb(form), form.get("q", "").strip()
    if not (patterns := _patterns(text)):
        raise InvalidInput("which accounts? Write a pattern, such as github/*")
    gate = form.get("gate") or None
    if gate is not None and gate not in GATES:
        raise InvalidInput(f"gate={gate!r}: use one of {', '.join(GATES)}")
    if verb == "limit" and gate is not None:
        raise InvalidInput("a limit is for all accounts of a pattern: leave out the gate")
    if gate is not None and gate != (only := _ONLY.get(verb, gate)):
        raise InvalidInput(f"{verb} is for accounts that are stopped by: {GATES[only]}; leave out the gate")
    options, spacing = _options(verb, form), bulk.spacing_from(form.get("rate", ""))
    if verb == "limit" and not options:
        raise InvalidInput("which limits? Write some, such as 100/min, or how many jobs may run at once")
    most = _number("at most", form.get("limit", ""), MOST) or MOST
    if form.get("sure") != "yes":
        would = await _change(visit, verb, patterns, gate, most, {**options, "dry_run": True})
        return visit.render(
            "sure.html", title=f"{VERBS[verb]} {counted(len(would), 'account')}?", count=len(would),
            action="/do/resources", fields={**form, "sure": "yes"}, examples=would[:10],
            back=visit.url("/accounts", q=form.get("q")),
            detail=f"of {' and '.join(patterns)}" + ("" if gate is None else f", stopped by: {GATES[gate]}")
            + "".join(f", {word} {form[name].strip()}" for name, word in _SAID if form.get(name, "").strip()),
            capped=len(would) == most,
        )  # fmt: skip
    meaning = text if gate is None else f"{text}, stopped by {gate}"
    keys = await _change(visit, verb, patterns, gate, most, {**options, "dry_run": True})
    if spacing or len(keys) > bulk.PART:
        title, back = f"{VERBS[verb]} {counted(len(keys), 'account')}", visit.url("/accounts", q=form.get("q"))
        change = bulk.Bulk("resources", title, len(keys), back, spacing)
        apply = partial(_change_some, visit, verb, gate, options)
        return bulk.begin(visit, change, f"resources {verb}", meaning, _parts(keys), apply, form.get("reason"))
    async with visit.audited(f"resources {verb}", meaning, form.get("reason")) as outcome:
        changed = await _change(visit, verb, patterns, gate, most, options)
        outcome["changed"] = len(changed)
    return visit.back(
        visit.url("/accounts", q=form.get("q"), gate=gate), f"{counted(len(changed), 'account')}: {_PAST[verb]}."
    )


def _parts(keys: list[str]) -> Callable[[int], AsyncIterator[list[str]]]:
    """The keys part by part, the deepest first."""
    ordered = sorted(keys, key=lambda key: (-resource_key.depth(key), key))

    async def parts(size: int) -> AsyncIterator[list[str]]:
        for n in range(0, len(ordered), size):
            yield ordered[n : n + size]

    return parts


async def _change_some(
    visit: Visit, verb: str, gate: str | None, options: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, int]:
    """Change these, if what is asked of them still holds."""
    act: Callable[..., Awaitable[Changed]] = getattr(visit.app.resources, verb)
    narrowing, changed = _narrowing(verb, gate), 0
    for key in keys:
        if narrowing or await _is_meant(visit, key, verb, [key]):
            changed += len(await act(key, **options, **narrowing))
    return {"changed": changed}


def _verb(form: Mapping[str, str]) -> str:
    verb = form.get("verb", "")
    if verb not in VERBS:
        raise InvalidInput(f"verb={verb!r}: use one of {', '.join(VERBS)}")
    return verb


async def _change(
    visit: Visit, verb: str, patterns: Sequence[str], gate: str | None, most: int, options: Mapping[str, Any]
) -> list[str]:
    """Change at most so many of the resources that fit; the keys of those that were changed, or would be."""
    act: Callable[..., Awaitable[Changed]] = getattr(visit.app.resources, verb)
    narrowing = _narrowing(verb, gate)
    keys: list[str] = []
    for one in patterns:
        if len(keys) == most:
            break
        if _is_wild(one):
            keys += (await act(one, **options, **narrowing, limit=most - len(keys))).keys
        elif narrowing or await _is_meant(visit, one, verb, patterns):
            keys += (await act(one, **options, **narrowing)).keys
    return keys


def _narrowing(verb: str, gate: str | None) -> dict[str, str]:
    """The argument that narrows a verb to what a gate stops; those of `_ONLY` take none."""
    stops = None if verb in _ONLY else gate or ("any" if verb == "reset" else None)
    return {} if stops is None else {"gate": stops}


async def _is_meant(visit: Visit, key: str, verb: str, patterns: Sequence[str]) -> bool:
    """Whether the verb's own gate stops the resource; if it has none, whether it is in use or alone was named.

    The app's method changes a single key whatever stops it.
    """
    only = _ONLY.get(verb)
    return (only is None and len(patterns) == 1) or bool(await visit.read(keys_of, key, gate=only))


def _options(verb: str, form: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of a verb beside the key."""
    if verb in ("pause", "open"):
        lasts = form.get("for", "").strip()
        until = None if not lasts else options_of.span("for", lasts)
        return {"reason": form.get("reason", "").strip() or None, "until": until}
    if verb == "limit":
        limits, cap = form.get("limits", "").strip(), form.get("concurrency", "").strip()
        options: dict[str, Any] = {"clear": True} if form.get("clear") == "yes" else {}
        if limits:
            options["limits"] = [] if limits == "none" else [one.strip() for one in limits.split(",")]
        if cap:
            options["concurrency"] = None if cap == "none" else _number("at once", cap, 1_000_000)
        if form.get("forget") == "yes":
            options["forget"] = True
        return options
    return {}


def _number(name: str, text: str, most: int) -> int | None:
    text = text.strip()
    if not text:
        return None
    if not text.isdecimal() or len(text) > len(str(most)) or not 0 < int(text) <= most:
        raise InvalidInput(f"{name}: {text!r} is not a number from 1 to {most:,}")
    return int(text)


PAGES: dict[str, tuple[str, Page]] = {
    "/accounts": ("read", accounts), "/account/{key:path}": ("read", account),
}  # fmt: skip
CHANGES: dict[str, tuple[str, Page]] = {
    "/do/resource": ("resources", change_one), "/do/resources": ("resources", change_many),
    "/do/test": ("resources", test_one),
}  # fmt: skip
