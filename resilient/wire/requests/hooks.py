"""What the engine does around each request of a job, as the wire sees it.

The wire decides nothing about gates, limits, marks or tokens: it asks its `RequestHooks`, one per execution of a
job, at fixed moments. For every physical request (a repeat and a redirect are requests of their own) the
calls are::

    permit = admit(request)                     may wait briefly; may refuse, before any I/O
    mark(permit)                                only if request.marked
    ... a connection is there ...
    if is_late(permit): again(permit)           before its first byte; may wait, and may refuse
    ... the request ...
    answered(permit, answer, failure)           an answer came; failure is None if it is a success
      or failed(permit, failure)                no (whole) answer came
      or abandoned(permit)                      nobody waits for it any more (cancelled); not a coroutine
    clear(permit, took_effect)                  only after mark, and only if the outcome is known; not a coroutine

Exactly one of answered, failed and abandoned follows each permit. A mark that is not cleared stands for a
request that may have been received: several may be open at once. ``refreshed`` is called between a refusal of
credentials and its ``answered``. Errors these calls raise go to the handler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from resilient.core.base.errors import Failure
    from resilient.core.base.exchange import AnswerFacts, RequestFacts


@dataclass(slots=True)
class Permit:
    """Leave to send one request.

    ``headers`` and ``params`` (of the URL) are the account's credentials; the wire sends them to trusted hosts
    only. ``state`` is the engine's own (generations, lease of a limit), ``access`` likewise (which credentials
    these are). ``fresh``: no earlier request of the same name stands unanswered. ``probing``: it tries out a circuit
    that is open, so it is sent once: another try is another probe's.
    """

    request: RequestFacts
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    params: Mapping[str, str] = field(default_factory=dict, repr=False)
    fresh: bool = True
    probing: bool = False
    state: Any = field(default=None, repr=False)
    access: Any = field(default=None, repr=False)
    mark: Any = field(default=None, repr=False)  # the engine's: what `clear` removed
    sent_at: float | None = None  # by `time.perf_counter`; None until it is sent

    @property
    def trusting(self) -> bool:
        """Whether it carries credentials at all."""
        return bool(self.headers or self.params)


class RequestHooks(Protocol):
    """The engine's side of a job's requests. Its coroutines run on the engine's loop, for threads too."""

    @property
    def resource_key(self) -> str:
        """The job's resource key."""

    @property
    def base_key(self) -> str:
        """What idempotency keys are derived from: the same in all executions of the job."""

    def now(self) -> datetime:
        """The engine's clock, aware UTC."""

    async def admit(self, request: RequestFacts) -> Permit:
        """Draw the limits of ``request.key`` and its ancestors, or refuse.

        Raises `ResourceStopped` (a gate), `TransactionOpen`, `LostLease`. If ``request.gated`` is false only
        the last two.
        """

    async def connection(self, account: str) -> object:
        """An account's credentials; None if it has none and needs none. Raises `ResourceStopped` if it needs some."""

    async def mark(self, permit: Permit) -> None:
        """Commit the mark of the request on the job's row, if it has none yet.

        Raises `LostLease`, or `JobFailure` for one whose key the provider may have forgotten; then nothing is sent.
        """

    def is_late(self, permit: Permit) -> bool:
        """Whether what was admitted waited too long to be sent as it is. Must not wait; may come from any thread."""

    async def again(self, permit: Permit) -> None:
        """Admit it once more, before its first byte. Raises `ResourceStopped`; nothing was sent then."""

    def clear(self, permit: Permit, *, took_effect: bool) -> None:
        """Forget the mark `mark` made: the request took effect, or certainly did not. It must not wait, nor fail."""

    def cut_off(self, permit: Permit, *, by_us: bool = False) -> None:
        """The answer's body broke off after `clear`: its outcome is open again. Must not wait, as `abandoned`.

        ``by_us``: there was no room for it, so nothing is said about its server.
        """

    async def answered(self, permit: Permit, answer: AnswerFacts, failure: Failure | None) -> None:
        """Take in an answer: breaker, budgets, a cooldown at once. Not called unless ``request.gated``."""

    async def failed(self, permit: Permit, failure: Failure) -> None:
        """Take in a request without an answer. Not called unless ``request.gated``."""

    def abandoned(self, permit: Permit) -> None:
        """The request was given up: it counts as neither ok nor failed. Must not wait; may come from any thread."""

    async def refreshed(self, permit: Permit, failure: Failure) -> bool:
        """After refused credentials: whether there are newer ones now, worth one repeat of the request."""
