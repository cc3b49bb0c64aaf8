"""An error dialect: how a provider says what went wrong, and how long to wait.

Rules are asked in order and the first that fits decides, so the narrow ones stand first. `classify` asks them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core.instants import Word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.core.failure import FailureKind, Scope

NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
PERIODS: Final = MappingProxyType({"hour": 3600.0, "day": 86400.0, "month": 31 * 86400.0})  # seconds, the longest
MESSAGES: Final = ("error.message", "message", "error_description", "errors[0].message", "detail", "title")


@dataclass(frozen=True, slots=True)
class Wait:
    """Where one error says how long to wait, before the provider's general `WaitDialect` is asked.

    ``header`` and ``body`` (a path) name a field in the dialect ``word``; ``text`` is a pattern whose group
    ``value`` is one; ``seconds`` computes it from the JSON body. Told nothing: ``fallback`` seconds, or the
    start of the next ``period`` (UTC), which is when such a budget is full again.
    """

    header: str = ""
    body: str = ""
    text: str = ""
    word: Word = Word.AUTO
    seconds: Callable[[Any], float | None] | None = None
    fallback: float | None = None
    period: Literal["", "hour", "day", "month"] = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of an error dialect: if all that is stated fits, the answer is a failure of ``kind``.

    ``kind``: None says that it is none at all. ``status``: one, several, or a range; without it the rule fits
    every answer from 400 up, so a rule about a 200 names it. ``code``: patterns (``*``) of which one fits one
    of the codes found by `Errors`. ``where``: body paths and their values (``...`` stands for any but a
    missing, null, false or empty one). ``header``: names and regular expressions. ``text``: a regular
    expression within the body. ``json``: whether the body is JSON. ``path``: a pattern of the request's path.
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

    def fits_status(self, status: int) -> bool:
        """Whether the rule speaks about this status."""
        if self.status is None:
            return status >= 400  # noqa: PLR2004 - HTTP's own border of failure
        return status == self.status if isinstance(self.status, int) else status in self.status


@dataclass(frozen=True, slots=True)
class Errors:
    """An error dialect: where codes and messages are, and what they mean.

    ``code``, ``message``: body paths, the first that is there names the error. ``code_header``: a header with
    a code; ``code_text``: a regular expression whose first group is a code in a body that is no JSON;
    ``code_form``: one whose first group is the part of a found code that matters.
    """

    code: tuple[str, ...] = ()
    message: tuple[str, ...] = MESSAGES
    code_header: str = ""
    code_text: str = ""
    code_form: str = ""
    rules: tuple[Rule, ...] = ()
    reads_success: bool = field(init=False, default=False)  # a 2xx may be an error: its JSON has to be read

    def __post_init__(self) -> None:
        found = any(rule.kind and any(rule.fits_status(s) for s in range(200, 300)) for rule in self.rules)
        object.__setattr__(self, "reads_success", found)
