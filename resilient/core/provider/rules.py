"""An error dialect: how a provider says what went wrong, and how long to wait.

Rules apply in order and the first that fits decides, so the narrow ones stand first. `classify` applies them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core.base.errors import FailureKind, InvalidInput, Scope
from resilient.core.base.instants import Word
from resilient.core.base.misfit import (
    check_number,
    check_paths,
    check_pattern,
    check_texts,
    check_word,
    explained_class,
    in_small_letters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Period = Literal["", "hour", "day", "month"]
_ANSWERS: Final = tuple(FailureKind)[: tuple(FailureKind).index(FailureKind.RESET_CURSOR) + 1]  # what one can mean
NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
PERIODS: Final = MappingProxyType({"hour": 3600.0, "day": 86400.0, "month": 31 * 86400.0})  # seconds, the longest
MESSAGES: Final = ("error.message", "message", "error_description", "errors[0].message", "detail", "title")


@explained_class
@dataclass(frozen=True, slots=True)
class Wait:
    """Where one error says how long to wait, before the provider's general `WaitDialect` is asked.

    ``header`` and ``body`` (a path) name a field in the dialect ``word``; ``text`` is a pattern whose group
    ``value`` is one; ``seconds`` computes it from the JSON body. If none states one: ``fallback`` seconds, or the
    start of the next ``period`` (UTC), which is when such a budget is full again. Raises `InvalidInput`.
    """

    header: str = ""
    body: str = ""
    text: str = ""
    word: Word = Word.AUTO
    seconds: Callable[[Any], float | None] | None = None
    fallback: float | None = None
    period: Period = ""

    def __post_init__(self) -> None:
        check_word("Wait", "word", self.word, Word)
        check_word("Wait", "period", self.period, Period)
        check_number("Wait", "fallback", self.fallback)
        check_pattern("Wait", "text", self.text)
        check_paths("Wait", self, "body")
        in_small_letters(self, "header")
        if self.fallback is not None and self.period:
            raise InvalidInput(
                f"Wait(fallback={self.fallback!r}, period={self.period!r}): told nothing, it is one or the other"
            )


@explained_class
@dataclass(frozen=True, slots=True)
class Rule:
    """One line of an error dialect: if all that is stated fits, the answer is a failure of ``kind``.

    ``kind``: None says that it is none at all. ``status``: one, several, or a range; without it the rule fits
    every answer from 400 up, so a rule about a 200 names it. ``code``: patterns (``*``) of which one fits one
    of the codes found by `Errors`. ``where``: body paths and their values (``...`` stands for any but a
    missing, null, false or empty one). ``header``: names and regular expressions. ``text``: a regular
    expression within the body. ``json``: whether the body is JSON. ``path``: a pattern of the request's path.

    ``scope``: what the failure is about, the account unless said; ``wait``: where it says how long.
    ``counts_for_breaker``: whether it counts for the circuit, ``provider_wide``: whether for the whole provider's
    too (None: by its kind and status). Raises `InvalidInput`.
    """

    kind: FailureKind | None
    status: int | range | tuple[int, ...] | None = None
    code: str | tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=lambda: NONE)
    header: Mapping[str, str] = field(default_factory=lambda: NONE)
    text: str = ""
    json: bool | None = None
    path: str = ""
    scope: Scope | None = None
    wait: Wait | None = None
    counts_for_breaker: bool | None = None
    provider_wide: bool | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in _ANSWERS:
            choices = ", ".join(f"FailureKind.{kind.name}" for kind in _ANSWERS)
            raise InvalidInput(f"Rule({self.kind!r}): an answer means one of {choices}, or None for a success")
        if self.kind is not None:
            check_word("Rule", "kind", self.kind, FailureKind)
        if self.scope is not None:
            check_word("Rule", "scope", self.scope, Scope)
        if self.kind is None and (self.scope is not None or self.wait is not None):
            raise InvalidInput("Rule(None): a success has no scope= and no wait=")
        if not isinstance(self.code, str):
            check_texts("Rule", self, "code")
        check_paths("Rule", self, "where")
        for pattern in (*self.header.values(), self.text):
            check_pattern("Rule", "header" if pattern != self.text else "text", pattern)
        self._check_status()

    def _check_status(self) -> None:
        """Refuse what is no status, and a rule that would make every success a failure. Raises `InvalidInput`."""
        every = () if self.status is None else (self.status,) if isinstance(self.status, int) else self.status
        if any(not isinstance(one, int) or not 100 <= one < 600 for one in every):  # noqa: PLR2004
            raise InvalidInput(
                f"Rule(status={self.status!r}): a status is a number from 100 to 599, several or a range"
            )
        narrows = self.code or self.where or self.header or self.text or self.path or self.json is not None
        if self.kind is not None and not narrows and any(200 <= one < 300 for one in every):  # noqa: PLR2004 - HTTP's own border
            raise InvalidInput(
                f"Rule({self.kind!r}, status={self.status!r}): say by what such a success is told from others"
            )

    def fits_status(self, status: int) -> bool:
        """Whether the rule speaks about this status."""
        if self.status is None:
            return status >= 400  # noqa: PLR2004 - HTTP's own border of failure
        return status == self.status if isinstance(self.status, int) else status in self.status


@explained_class
@dataclass(frozen=True, slots=True)
class Errors:
    """An error dialect: where codes and messages are, and what they mean.

    ``code``, ``message``: body paths, the first that is there names the error. ``code_header``: a header with a code;
    ``rules``: asked in their order, the first that fits decides; ``code_text``: a regular expression whose first
    group is a code in a body that is no JSON; ``code_form``: one whose first group is the part of a found code that
    matters. Raises `InvalidInput`.
    """

    code: tuple[str, ...] = ()
    message: tuple[str, ...] = MESSAGES
    code_header: str = ""
    code_text: str = ""
    code_form: str = ""
    rules: tuple[Rule, ...] = ()
    reads_success: bool = field(init=False, default=False)  # a 2xx may be an error: its JSON has to be read

    def __post_init__(self) -> None:
        check_texts("Errors", self, "code", "message")
        check_paths("Errors", self, "code", "message")
        for name in ("code_text", "code_form"):
            if text := getattr(self, name):
                check_pattern("Errors", name, text, groups=(1,))
        if wrong := [rule for rule in self.rules if not isinstance(rule, Rule)]:
            raise InvalidInput(f"Errors(rules=...): rules lists Rule(...), not {wrong[0]!r}")
        in_small_letters(self, "code_header")
        reads_success = any(rule.kind and any(rule.fits_status(s) for s in range(200, 300)) for rule in self.rules)
        object.__setattr__(self, "reads_success", reads_success)
