"""Token endpoints as resources of their own: ``github:token`` has limits, a cooldown and a circuit like any other.

No job is claimed through them, so who asks for a refresh elects the circuit's probe. Every answer of the endpoint is
proof of life, a refusal too; what stops everybody is silence, an outage or a throttle. A few requests of each provider
are under way at a time, so that thousands of accounts whose tokens end together do not all find out by themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Final

from uuid_utils.compat import uuid7

from resilient.core.errors import InvalidInput
from resilient.core.evidence import counts
from resilient.core.exchange import AnswerFacts
from resilient.core.failure import Failure, FailureKind
from resilient.core.hosts import origin_of

if TYPE_CHECKING:
    from resilient.core.auth import OAuth2
    from resilient.engine.app import Resilient
    from resilient.engine.gate import Gate, Ticket
    from resilient.wire.oauth import TokenAnswer, TokenClient

AT_ONCE: Final = 16  # requests of one process to one token endpoint
_LONGEST: Final = 200  # characters of a key
_MOST_ROOMS: Final = 1_000
_ALIVE: Final = AnswerFacts(200)
_THROTTLES: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA})


def token_key(name: str, facts: OAuth2 | None, filled: OAuth2 | None) -> str:
    """The resource that an account's token endpoint is; ``facts``: the provider's, before they were ``filled``.

    One host is one resource: where accounts name the host of theirs, what it says is about them alone.
    """
    if facts is None or filled is None or not facts.at_tenants:
        return f"{name}:token"
    try:
        _, host, port = origin_of(filled.refresh_url or filled.token_url)
    except InvalidInput:  # the account has no value for it
        return f"{name}:token"
    text = f"{name}:token@{host}:{port}"
    if len(text) > _LONGEST or not text.isascii() or "[" in text:
        text = f"{name}:token@{hashlib.sha256(host.encode()).hexdigest()[:32]}:{port}"
    return text


def nothing_to_refresh() -> TokenAnswer:
    """What stands for an answer where there is no refresh token to send."""
    from resilient.wire.oauth import TokenAnswer  # noqa: PLC0415 - httpx: only where something is sent

    return TokenAnswer(failure=Failure(FailureKind.AUTH, code="no_refresh_token"))


class TokenEndpoints:
    """The gates of one app's token endpoints."""

    def __init__(self, app: Resilient) -> None:
        self._app, self._owner = app, f"grants:{uuid7()}"
        self._gate: Gate | None = None
        self._client: TokenClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # an app may be used from one loop after another
        self._rooms: dict[str, asyncio.Semaphore] = {}

    def is_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this loop is the one in use."""
        return self._loop is loop

    async def close(self) -> None:
        """Write what is known."""
        if self._gate is not None and self.is_on(asyncio.get_running_loop()):
            await self._gate.close()
        self._gate, self._loop = None, None
        if self._client is not None:
            await self._client.aclose()

    @property
    def client(self) -> TokenClient:
        """Who talks to them."""
        if self._client is None:
            from resilient.wire.oauth import TokenClient  # noqa: PLC0415 - httpx: only where something is sent

            self._client = TokenClient()
        return self._client

    async def check(self, key: str) -> None:
        """Raise `ResourceStopped` if nothing may be sent now; a circuit that is due does not stop the one who asks."""
        gate = await self._opened()
        await gate.check(key, own="")

    async def room(self, key: str) -> asyncio.Semaphore:
        """Enter it to send."""
        await self._opened()
        if key not in self._rooms and len(self._rooms) >= _MOST_ROOMS:  # hosts that accounts named
            self._rooms = {name: room for name, room in self._rooms.items() if room.locked()}
        return self._rooms.setdefault(key, asyncio.Semaphore(AT_ONCE))

    async def admit(self, key: str) -> Ticket:
        """Leave to send one request, perhaps as the probe. Raises `ResourceStopped`."""
        gate = await self._opened()
        return await gate.admit(key, own="")

    async def unsent(self, ticket: Ticket) -> None:
        """Nothing was sent after all: if it was the probe, the next one need not wait for its lease."""
        gate = await self._opened()
        for key, generation in ticket.elected:
            gate.give_back(key, generation)

    async def answered(self, ticket: Ticket, failure: Failure | None) -> None:
        """What came of it."""
        gate = await self._opened()
        if failure is None or not (counts(failure) or failure.kind in _THROTTLES):
            await gate.answered(ticket, ticket.key, _ALIVE, None)
        else:
            await gate.failed(ticket, ticket.key, failure)

    async def _opened(self) -> Gate:
        from resilient.engine.gate import Gate  # noqa: PLC0415 - only where something is sent

        loop = asyncio.get_running_loop()
        if self._gate is None or self._loop is not loop:
            self._rooms = {}
            told = self._app.circuit_changed
            gate = Gate(self._app.database, self._app.policies, owner=self._owner, on_change=told)
            self._gate, self._loop = gate, loop
            await gate.start()
        return self._gate
