"""Every bound on what is believed from outside: providers, tenants, senders of webhooks, handlers' results.

Each number a stranger controls meets one of these before it reaches a clock, a size, a regular expression, a row or a
log. They stand here, once; ``resilient doctor --verbose`` prints them. One that has a ``setting`` is only a default.

To add one: declare it below by the name of what is bounded, say in ``beyond`` what becomes of the rest, use ``.value``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Unit = Literal["bytes", "characters", "seconds", "items", "levels", "windows"]
_KIB: Final = 1024
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Bound:
    """The most of one thing that is believed. ``name`` is stable; ``beyond``: what happens to more than that.

    ``setting``: where a program chooses another value, "" if it cannot.
    """

    name: str
    value: int
    unit: Unit
    beyond: str
    setting: str = ""


# -- answers -------------------------------------------------------------------------------------------------

ANSWER_BODY: Final = Bound(
    "answer_body", 64 * _MIB, "bytes", "the request fails as answer_too_large; it is never decoded further",
    "http=PoolSettings(largest=...)",
)  # fmt: skip
ANSWER_TIME: Final = Bound(
    "answer_time", 300, "seconds", "the request fails as answer_too_large", "http=PoolSettings(whole=...)"
)
ANSWER_BODIES: Final = Bound(
    "answer_bodies", 512 * _MIB, "bytes",
    "of all in a process, without the first MiB of each: an account that would hold more than is left free is refused",
    "http=PoolSettings(bodies=...)",
)  # fmt: skip
ERROR_BODY: Final = Bound(
    "error_body", 64 * _KIB, "bytes", "the rest of an error's body is not read", "http=PoolSettings(error_largest=...)"
)
TOKEN_ANSWER: Final = Bound("token_answer", 256 * _KIB, "bytes", "the rest is not read, so the answer holds no token")
TOKEN: Final = Bound("token", 32 * _KIB, "characters", "it is no token: no header would hold it")
KEPT_VALUE: Final = Bound(
    "kept_value", 2_000, "characters", "what a token answer says of the account is not kept: the value before stays"
)
SINK_ANSWER: Final = Bound("sink_answer", 4 * _KIB, "bytes", "the rest of a webhook receiver's answer is not read")
STRUCTURED_FIELD: Final = Bound("structured_field", 8 * _KIB, "characters", "the header field says nothing")
STATED_TIME: Final = Bound("stated_time", 64, "characters", "the text is no time")
SEARCHED_FIELD: Final = Bound(
    "searched_field", 8 * _KIB, "characters", "patterns look at the beginning of a header field only"
)
SEARCHED_CODE: Final = Bound("searched_code", 500, "characters", "patterns look at the beginning of a code only")
SEARCHED_TEXT: Final = Bound(
    "searched_text", 64 * _KIB, "characters", "patterns look at the beginning of a body's text only"
)
LISTED: Final = Bound("listed", 100, "items", "of a list within an error's body the first ones are looked at")

COOKIES: Final = Bound(
    "cookies", 100, "items", "of one answer's cookies the first are kept, and of all that a job's client has the latest"
)
COOKIE: Final = Bound("cookie", 4 * _KIB, "characters", "the cookie is not kept")

# -- words of others -----------------------------------------------------------------------------------------

ERROR_CODE: Final = Bound("error_code", 100, "characters", "cut")
ERROR_MESSAGE: Final = Bound("error_message", 500, "characters", "cut")
ERROR_TEXT: Final = Bound("error_text", 8_000, "characters", "a job's error and its traceback are cut")
SCRUBBED_TEXT: Final = Bound(
    "scrubbed_text", 16 * _KIB, "characters", "cut before secrets are looked for, with what stands at the edge"
)
LOGGED_TEXT: Final = Bound("logged_text", 2_000, "characters", "each thing that a line of the log tells is cut")
LOGGED_TRACEBACK: Final = Bound(
    "logged_traceback", 16 * _KIB, "characters", "of a traceback in the log the last frames are kept"
)
BUDGET_NAME: Final = Bound("budget_name", 64, "characters", "cut")
CURSOR: Final = Bound("cursor", 8 * _KIB, "characters", "the page is refused: the stream's job fails")

# -- pages ---------------------------------------------------------------------------------------------------

PAGE_RECORDS: Final = Bound(
    "page_records", 10_000, "items", "the page is refused, unless its request asks for as many: the stream's job fails",
    "Paginator(most=...)",
)  # fmt: skip
LIST_RECORDS: Final = Bound(
    "list_records", 100_000, "items", "the same of a list without pages, and of pages, however many their requests ask",
    "Paginator(most=...)",
)  # fmt: skip
PAGE_PARTS: Final = Bound(
    "page_parts", 500_000, "items", "a page of more JSON objects and lists is not decoded: the stream's job fails",
    "Paginator(most=...): a hundred for each record",
)  # fmt: skip

# -- clocks --------------------------------------------------------------------------------------------------

TOLD_WAIT: Final = Bound(
    "told_wait", 24 * 3600, "seconds",
    "believed up to the longest window of the provider's facts, or this where they state none; then one probe a day",
)  # fmt: skip

ACTUAL_COST: Final = Bound(
    "actual_cost", 1, "windows", "an answer's cost beyond what a limit gives in its whole window is taken as that much"
)

# -- what comes in -------------------------------------------------------------------------------------------

WEBHOOK_BODY: Final = Bound(
    "webhook_body", 256 * _KIB, "bytes", "answered with 413", "webhook_routes(max_body=...)"
)  # fmt: skip
WEBHOOK_EVENTS: Final = Bound("webhook_events", 1_000, "items", "a delivery of more is answered with 413")
WEBHOOK_HEADERS: Final = Bound("webhook_headers", 64, "items", "the rest is not shown to the job")
WEBHOOK_HEADER: Final = Bound("webhook_header", 1_000, "characters", "cut")
WEBHOOK_SHOWN: Final = Bound(
    "webhook_shown", 2 * _MIB, "bytes",
    "of the headers that all jobs of one delivery are shown, each the same: the rest is not shown to them",
)  # fmt: skip
WEBHOOK_NAME: Final = Bound(
    "webhook_name", 1_000, "characters", "cut, where a job is shown the name of an event or the id of a delivery"
)
WEBHOOK_FIELDS: Final = Bound(
    "webhook_fields", 1_000, "items", "a form of more is taken as a text, and a query of more says nothing"
)
WEBHOOK_CHALLENGE: Final = Bound("webhook_challenge", 1_000, "characters", "it is not echoed")
CALLBACK_VALUE: Final = Bound(
    "callback_value", 200, "characters", "the callback is refused: what it says of the account is not kept"
)
CALLBACK_CODE: Final = Bound("callback_code", 8 * _KIB, "characters", "the callback is refused, its code not exchanged")
OPEN_CONSENTS: Final = Bound(
    "open_consents", 50, "items", "of one account the oldest is forgotten: whoever comes back there starts again"
)

# -- what handlers give back -----------------------------------------------------------------------------------

RESULT: Final = Bound(
    "result", _MIB, "bytes", "the job has succeeded; in place of its result stands why that is not kept"
)
PROGRESS: Final = Bound("progress", _MIB, "bytes", "job.progress raises")


def bounds() -> tuple[Bound, ...]:
    """Every bound of this page, by its name."""
    return tuple(sorted((one for one in globals().values() if isinstance(one, Bound)), key=lambda one: one.name))


def whole_number(text: str) -> int | None:
    """The number that a text of digits is; None for any other, and for one of more digits than Python reads."""
    try:
        return int(text) if text.isascii() and text.isdecimal() else None
    except ValueError:
        return None


def believed_wait(seconds: float, window: float = 0.0) -> float:
    """How long to wait where a provider asks to wait ``seconds``; ``window``: the longest one of its facts.

    Up to `TOLD_WAIT` and up to that window the provider is believed to the second. Beyond both it is tried once a day.
    """
    return seconds if seconds <= window else min(seconds, float(TOLD_WAIT.value))
