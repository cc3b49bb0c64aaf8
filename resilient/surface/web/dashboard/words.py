"""How values are written on pages: states in words, times with their zone, numbers with their bound."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup, escape

from resilient.core.accounts.tokens import REFRESHING
from resilient.core.base import resource_key
from resilient.core.base.errors import InvalidInput
from resilient.core.base.phrases import brief, counted, error_line, in_json, moment, plain, rough, span
from resilient.core.inspect.names import meaning
from resilient.core.inspect.why import credentials_end
from resilient.core.jobs.records import plain as as_json
from resilient.surface.cli.hints import command_with
from resilient.surface.cli.jobs import LEFT_ALONE, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.core.gates.rate_limit import Limit

_WORDS: Final = re.compile(r"(?:\\.|[^,\\]|\\\Z)+", re.DOTALL)  # between commas; `\,` is none
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_SPECIAL: Final = re.compile(r"[,\\]|\A\s|\s\Z")
_MINUTE: Final = 60  # seconds
_ONE: Final = {"keys": "key", "grants": "grant", "events": "event", "jobs": "job", "accounts": "account"}
_KEPT: Final = LEFT_ALONE | {"sent": "left alone: they may have been sent"}
_LONGEST: Final = 20_000  # characters of a document
_PLAIN: Final = re.compile(r"[A-Za-z0-9._:@+/-]+")
_COMMAND: Final = re.compile(r"`([^`]*)`")
_TIME: Final = re.compile(
    r"(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d:\d\d) UTC(?= \((?:in )?[^()]*\)|[;,:)]| until |$)"
)  # of `phrases.moment`
_JOB: Final = re.compile(r"\b(workflow |)([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b")

# What stands beside a state's colour: a sign and a word.
SIGNS: Final[Mapping[str, str]] = {
    "dead": "✕", "auth": "✕", "breaker": "✕", "stuck": "✕", "failed": "✕", "fail": "✕", "needs_reauth": "✕",
    "pause": "‖", "cooldown": "◷", "scheduled": "◷", "limit": "◷", "warn": "!", "suspect": "!", "undoing": "↶",
    "undone": "↶", "running": "▶", "ready": "●", "blocked": "◌", "succeeded": "✓", "ok": "✓", "active": "✓",
    "cancelled": "-", "well": "✓",
}  # fmt: skip
GATES: Final[Mapping[str, str]] = {
    "breaker": "circuit open", "cooldown": "told to wait", "pause": "paused", "auth": "no valid credentials",
}  # fmt: skip
# Commands for which a page has a button (or is the answer): the right it takes, its name, the page.
GIVE_UP_IN_DOUBT: Final = "It did happen: give the job up"
_BUTTONS: Final[Mapping[str, tuple[str, str, str]]] = {
    "jobs retry": ("jobs", "Run again", "/jobs/"), "dead discard": ("jobs", "Give up", "/jobs/"),
    "resources resume": ("resources", "Resume", "/account/"),
    "resources close": ("resources", "Close the circuit", "/account/"),
    "resources show": ("read", "its page", "/account/"), "workflows show": ("read", "its page", "/workflows/"),
    "connections release": ("read", "somebody who knows, under Connections", "/connections"),
}  # fmt: skip
_HERE: Final = ("jobs", "resources")  # rights whose buttons stand under "Do"


def printable(value: object) -> object:
    """What the templates print: no None, and no character that hides others."""
    if value is None:
        return ""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def number(value: Any) -> str:
    """``1,204``, or ``10,000+`` for what was counted up to a bound."""
    return f"{int(value):,}{'+' if getattr(value, 'more', False) else ''}"


def at(context: Mapping[str, Any], value: datetime | None) -> Markup:
    """A time in UTC, as sentences write it; the page's script rewrites it to the reader's zone."""
    if value is None:
        return Markup("")
    short, exact = moment(value, context.get("now")), f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return Markup('<time datetime="{0}" title="{1}">{2}</time>').format(exact, moment(value), short)


def ago(value: datetime | None, now: datetime) -> Markup:
    """How far a time is away: ``3 min ago``, ``in 2 h``; the time itself is in its title."""
    if value is None:
        return Markup("")
    seconds = (now - value).total_seconds()
    far = f"{rough(seconds)} ago" if seconds >= 0 else f"in {rough(-seconds, nearest=True)}"
    utc = value.astimezone(UTC)
    return Markup('<time datetime="{0}" title="{1} UTC" data-far>{2}</time>').format(
        f"{utc:%Y-%m-%dT%H:%M:%SZ}", f"{utc:%Y-%m-%d %H:%M:%S}", far
    )


def took(seconds: float) -> str:
    """How long something took: ``3 ms``, ``1.4 s``, ``2 min 5 s``."""
    if seconds < 1:
        return f"{seconds * 1000:,.0f} ms"
    return f"{seconds:.1f} s" if seconds < _MINUTE else span(seconds)


def brought(outcome: Mapping[str, Any]) -> str:
    """What a change brought, as the audit keeps it: ``3 changed, 1 too late``, ``created``, ``error: ...``."""
    words = []
    for name, value in outcome.items():
        word = name.replace("_", " ")
        if value is True:
            words.append(word)
        elif isinstance(value, (int, float)) and value:
            word = _KEPT.get(name, _ONE.get(word, word) if value == 1 else word)
            words.append(f"version {value}" if name == "version" else f"{value:,} {word}")
        elif value:
            words.append(f"{word}: {' '.join(map(str, value)) if isinstance(value, list) else value}")
    return plain(", ".join(words)) or "nothing"


def sentence_of(error: Exception | str) -> str:
    """The message of an error as a sentence; an option or a key at its beginning stays as it is."""
    text = str(error)
    first = text.partition(" ")[0]
    text = text if "=" in first or "/" in first else text[:1].upper() + text[1:]
    return text + ("" if text.endswith((".", "?", "!")) else ".")


def is_key(text: str) -> bool:
    """Whether a text is the key of one resource."""
    try:
        return bool(resource_key.check(text))
    except InvalidInput:
        return False


def badge(state: object, text: str | None = None) -> Markup:
    """A state as a sign and a word, with its colour."""
    name = str(getattr(state, "value", state))
    return Markup('<span class="badge s-{0}"><span aria-hidden="true">{1}</span>&nbsp;{2}</span>').format(
        "".join(c if c.isalnum() else "-" for c in name), SIGNS.get(name, "●"), text or name.replace("_", " ")
    )


def gate(name: str | None, code: str | None = None) -> Markup:
    """The gate that stops a resource, with its code; ``free`` if none does."""
    if name is None:
        return badge("well", "free")
    if code == REFRESHING:
        return badge(name, "refreshing its token")
    text = GATES.get(name, name)
    extra = (
        Markup(' <code class="code">{0}</code>').format(plain(code))
        if code and name != "pause" and code != "open"
        else Markup("")
    )
    return badge(name, text) + extra


def document(value: Any) -> str:
    """A payload or a result as indented JSON, cut after `_LONGEST` characters."""
    text = json.dumps(as_json(value), indent=2, ensure_ascii=False, default=str)
    return in_json(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…\n({len(text):,} characters)")


def error(job: Any) -> str:
    """A job's last error in one line."""
    return plain(error_line(job.last_error_kind, job.last_error_code, job.last_error))


def wrapped(key: object) -> Markup:
    """A key or a name that may be broken where it is long."""
    return Markup("<wbr>").join(escape(part) for part in _parts(plain(str(key))))


def prose(context: Mapping[str, Any], text: str | None, url: Callable[[str], str], key: str | None = None) -> Markup:
    """A sentence of the engine as a page says it.

    Where a page has a button for a command, the button's name stands there and leads to it. Other commands are code.
    Jobs, workflows and ``key`` are links, times are the reader's.
    """
    parts = _COMMAND.split(_pressed(plain(text or ""), context))
    return Markup("").join(
        (button_of(part, context, url) or Markup("<code>{0}</code>").format(which(context, part))) if n % 2
        else _linked(part, url, key, context.get("now"))
        for n, part in enumerate(parts)
    )  # fmt: skip


def which(context: Mapping[str, Any], commands: str) -> str:
    """Commands, between them "; ", with the options that say which app is meant, where the server knows them."""
    options = context.get("which_app") or {}
    words = commands.split("; ")
    return "; ".join(command_with(one, options) if one.startswith("resilient ") else one for one in words)


def _pressed(text: str, context: Mapping[str, Any]) -> str:
    """The sentence with the verb and the number of commands that buttons have."""
    if _may(context, "resources"):
        text = text.replace("until somebody runs `", "until somebody presses `")
    return text.replace("`resilient connections release` or `confirm`", "`resilient connections release`")


def _may(context: Mapping[str, Any], right: str) -> bool:
    operator = context.get("operator")
    return operator is not None and operator.may(right)


def button_of(command: str, context: Mapping[str, Any], url: Callable[[str], str]) -> Markup | None:
    """The link to the button that does the same; None if this operator has no such button."""
    words = command.split()
    verb, what = " ".join(words[1:3]), "".join(words[3:4])
    right, name, page = _BUTTONS.get(verb, ("", "", ""))
    is_one = is_key(what) if page == "/account/" else not what if page == "/connections" else _JOB.fullmatch(what)
    if not right or not is_one or not _may(context, right):
        return None
    if verb == "dead discard" and context.get("in_doubt") and what == str(context["job"].id):
        name = GIVE_UP_IN_DOUBT
    return Markup('<a href="{0}">{1}</a>').format(url(page + what) + ("#do" if right in _HERE else ""), name)


def _linked(text: str, url: Callable[[str], str], key: str | None, now: datetime | None) -> Markup:
    place = None if key is None else re.search(rf"(?<![\w/.:@+-]){re.escape(key)}(?![\w/@+-]|[.:]\w)", text)
    if place is not None:
        link = Markup('<a href="{0}">{1}</a>').format(url(f"/account/{key}"), wrapped(key))
        before = _linked(text[: place.start()], url, None, now)
        return before + link + _linked(text[place.end() :], url, None, now)
    made, end = [Markup("")], 0
    for one in _JOB.finditer(text):
        what, name = one.groups()
        address = url(f"/{'workflows' if what else 'jobs'}/{name}")
        made += [_timed(text[end : one.start()] + what, now), Markup('<a href="{0}">{1}</a>').format(address, name)]
        end = one.end()
    return Markup("").join([*made, _timed(text[end:], now)])


def _timed(text: str, now: datetime | None) -> Markup:
    """A text whose times a script rewrites to the reader's zone; those without a date are today's."""
    made, end = [Markup("")], 0
    for one in _TIME.finditer(text) if now is not None else ():
        day, clock = one[1] or f"{now:%Y-%m-%d}", one[2]
        tag = Markup('<time datetime="{0}T{1}Z" title="{0} {1} UTC">{2}</time>').format(day, clock, one[0])
        made, end = [*made, escape(text[end : one.start()]), tag], one.end()
    return Markup("").join([*made, escape(text[end:])])


def limit(value: Limit) -> str:
    """A limit in words: ``100 requests in 1 min, 20 at once``."""
    units = (
        counted(value.rate, value.counts.removesuffix("s"))
        if value.rate % 1 == 0
        else f"{value.rate:.3g} {value.counts}"
    )
    return f"{units} in {span(value.per)}" + ("" if value.burst is None else f", {value.burst:g} at once")


def _parts(text: str) -> list[str]:
    parts, start = list[str](), 0
    for n, c in enumerate(text, 1):
        if c in "/.@_-:=&" and n < len(text):
            parts.append(text[start:n])
            start = n
    return [*parts, text[start:]]


def words_of(text: str) -> list[str]:
    """The values of a filter that takes several: commas separate them, and blanks beside a comma are none of theirs.

    A backslash keeps the comma or blank behind it.
    """
    parts = (_ESCAPED.sub(r"\1", _without_blanks(one)) for one in _WORDS.findall(text))
    return [one for one in parts if one]


def _without_blanks(part: str) -> str:
    begun = part.lstrip()
    text = begun.rstrip()
    slashes = len(text) - len(text.rstrip("\\"))
    return begun[: len(text) + slashes % 2]  # one backslash too many: it keeps the blank behind it


def as_word(value: str | None) -> str:
    """One value of such a filter, None too, as `words_of` and the filter read it."""
    return _SPECIAL.sub(r"\\\g<0>", text_of(value))


def quoted(word: str) -> str:
    """A word, in quotes where a POSIX shell needs them."""
    return word if _PLAIN.fullmatch(word) else "'" + word.replace("'", "'\\''") + "'"


def same(verb: str, *words: str | None, **options: str | None) -> str:
    """The command line that lists the same; words and options that are empty are left out."""
    pairs = [(f"--{name}", quoted(value)) for name, value in options.items() if value]
    return " ".join(
        ["resilient", verb, *(quoted(one) for one in words if one), *(part for pair in pairs for part in pair)]
    )


FILTERS: Final[dict[str, Any]] = {
    "number": number, "ago": ago, "badge": badge, "gate": gate, "document": document, "error": error,
    "brief": brief, "wrapped": wrapped, "took": took, "brought": brought, "is_key": is_key,
    "limit": limit,
}  # fmt: skip
FUNCTIONS: Final[dict[str, Any]] = {
    "as_word": as_word, "text_of": text_of, "counted": counted, "give_up_in_doubt": GIVE_UP_IN_DOUBT,
    "same": same, "credentials_end": credentials_end, "meaning": meaning,
}  # fmt: skip
