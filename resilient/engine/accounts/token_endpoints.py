"""Token endpoints as resources of their own: ``github:token`` has limits, a cooldown and a breaker like any other.

No job is claimed through them, so the refresh itself elects the breaker's probe. Every answer of the endpoint counts as
a success, a refusal too; silence, an outage or a throttle counts as a failure. Only `AT_ONCE` requests of a process are
under way to one endpoint, so that of thousands of tokens that expire together only a few meet an outage.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from uuid_utils.compat import uuid7

from resilient.core.base.errors import Failure, FailureKind
from resilient.core.base.exchange import AnswerFacts
from resilient.core.gates.breaker import counts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from resilient.engine.gates.gate import Gate
    from resilient.engine.gates.permits import GatePermit
    from resilient.engine.ground.ground import Ground
    from resilient.store.gates.circuits import Change
    from resilient.wire.oauth.endpoints import TokenAnswer, TokenClient
    from resilient.wire.requests.pool import PoolSettings

AT_ONCE: Final = 16  # requests of one process to one token endpoint
_MOST_SEMAPHORES: Final = 1_000
_ALIVE: Final = AnswerFacts(200)
_THROTTLES: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA})


class TokenEndpoints:
    """The gates of one app's token endpoints."""

    def __init__(self, ground: Ground, on_change: Callable[[Change], None]) -> None:
        self._ground, self._on_change, self._owner = ground, on_change, f"grants:{uuid7()}"
        self._gate: Gate | None = None
        self._clients: dict[PoolSettings | None, TokenClient] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # an app may be used from one loop after another
        self._semaphores: dict[str, asyncio.Semaphore] = {}

    async def close(self) -> None:
        """Write what the gate has counted, and close the connections."""
        if self._gate is not None and self._loop is asyncio.get_running_loop():
            await self._gate.close()
        self._gate, self._loop = None, None
        for client in self._clients.values():
            await client.aclose()

    def client_of(self, provider: str) -> TokenClient:
        """The HTTP client for a provider's token endpoint."""
        settings = self._ground.http_of(provider)
        if settings not in self._clients:
            from resilient.wire.oauth.endpoints import TokenClient  # noqa: PLC0415 - httpx: only where something is sent

            self._clients[settings] = TokenClient(settings)
        return self._clients[settings]

    async def check(self, key: str) -> None:
        """Raise `ResourceStopped` if nothing may be sent now; a breaker that is due for its probe stops nobody."""
        gate = await self._gate_of_loop()
        await gate.check(key, own="")

    async def semaphore(self, key: str) -> asyncio.Semaphore:
        """The semaphore to enter before sending."""
        await self._gate_of_loop()
        if key not in self._semaphores and len(self._semaphores) >= _MOST_SEMAPHORES:  # hosts that accounts named
            self._semaphores = {name: semaphore for name, semaphore in self._semaphores.items() if semaphore.locked()}
        return self._semaphores.setdefault(key, asyncio.Semaphore(AT_ONCE))

    async def admit(self, key: str) -> GatePermit:
        """The permit to send one request, perhaps as the probe. Raises `ResourceStopped`."""
        gate = await self._gate_of_loop()
        return await gate.admit(key, own="")

    async def unsent(self, permit: GatePermit) -> None:
        """Nothing was sent: if this was the probe, the next one need not wait for the end of its lease."""
        gate = await self._gate_of_loop()
        for key, generation in permit.elected:
            gate.give_back(key, generation)

    async def trace(self, key: str, asking: Awaitable[TokenAnswer]) -> TokenAnswer:
        """Wait for the answer of an account's token endpoint, within a span; counted."""
        with self._ground.tracing.refresh(key.partition("/")[0]) as span:
            answer = await asking
            failure = answer.failure
            if span is not None and failure is not None:
                span.fail(failure.kind.value)
        self._ground.counts.refresh(key, "ok" if failure is None else failure.kind.value)
        return answer

    async def answered(self, permit: GatePermit, failure: Failure | None) -> None:
        """Report the outcome of a request; ``failure`` None: it succeeded."""
        gate = await self._gate_of_loop()
        if failure is None or not (counts(failure) or failure.kind in _THROTTLES):
            await gate.answered(permit, permit.key, _ALIVE, None)
        else:
            await gate.failed(permit, permit.key, failure)

    async def _gate_of_loop(self) -> Gate:
        from resilient.engine.gates.gate import Gate  # noqa: PLC0415 - only where something is sent

        loop = asyncio.get_running_loop()
        if self._gate is None or self._loop is not loop:
            self._semaphores = {}
            ground, on_change = self._ground, self._on_change
            gate = Gate(
                ground.database, ground.policies, owner=self._owner, on_change=on_change,
                on_cooldown=ground.note_cooldown,
            )  # fmt: skip
            self._gate, self._loop = gate, loop
            await gate.start()
        return self._gate
