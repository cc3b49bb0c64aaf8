"""A batch of requests in one: each part is admitted, drawn, classified and told to the engine as a request of its own.

The envelope itself draws nothing. A part that is throttled by its answer closes no gate: its neighbours were served, so
the answer speaks of that part only. Credentials that are refused, an outage, a throttle of the whole batch are the
envelope's answer, and have their usual effects.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from resilient.core.budgets import Fields, budgets
from resilient.core.classify import classify
from resilient.core.errors import InvalidInput, ResourceStopped
from resilient.core.exchange import IDEMPOTENT, AnswerFacts
from resilient.core.failure import Failure, FailureKind
from resilient.core.hosts import address
from resilient.core.parts import Part, PartAnswer
from resilient.wire.redact import without_secrets_in_code
from resilient.wire.trail import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.core.parts import BatchEndpoint
    from resilient.wire.conduct import Permit
    from resilient.wire.flow import Flow
    from resilient.wire.trail import Trail

_OWN: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA, FailureKind.AUTH})  # of the part alone


class Envelope:
    """Parts that go into one request. ``options``: what the client's ``post`` takes."""

    def __init__(self, trail: Trail, base_url: str, parts: Sequence[Part]) -> None:
        self._trail, self._parts = trail, parts
        self._base = base_url.rstrip("/")
        self._facts = endpoint(trail)
        self._stopped: dict[int, ResourceStopped] = {}
        self._permits: dict[int, Permit] = {}

    def admit(self) -> Flow:
        """Draw for each part. Raises `ResourceStopped` if none may go."""
        try:
            for number, part in enumerate(self._parts):
                target = f"{self._base}/{part.url.lstrip('/')}"
                split = address(target)
                body = None if part.body is None else json.dumps(part.body).encode()
                asked = self._trail.facts(
                    part.method.upper(), Target(target, *split),
                    part.headers, body, {"idempotent": True},
                )  # fmt: skip
                try:
                    self._permits[number] = yield self._trail.conduct.admit(asked)
                except ResourceStopped as stopped:
                    self._stopped[number] = stopped
        except BaseException:
            self.abandon()
            raise
        if self._stopped and not self._permits:
            raise next(iter(self._stopped.values()))

    def abandon(self) -> None:
        """The envelope came to nothing."""
        for permit in self._permits.values():
            self._trail.conduct.abandoned(permit)

    @property
    def options(self) -> dict[str, Any]:
        """The request."""
        going = [(n, self._parts[n]) for n in self._permits]
        written = []
        for number, part in going:
            one: dict[str, Any] = {"id": str(number), "method": part.method.upper(), "url": part.url}
            headers = dict(part.headers)
            if part.body is not None:
                headers = {"Content-Type": "application/json", **headers}
                one["body"] = part.body
            written.append({**one, "headers": headers} if headers else one)
        safe = all(
            part.method.upper() in IDEMPOTENT or self._trail.provider.is_read(part.method.upper(), part.url)
            for _, part in going
        )
        extensions = {"cost": 0.0, **({"idempotent": True} if safe else {})}
        return {"url": self._facts.path, "json": {self._facts.requests: written}, "extensions": extensions}

    def tell(self, answer: Any) -> Flow:
        """The parts' answers, in the order of the parts; the engine is told of each."""
        said = answer.get(self._facts.responses) if isinstance(answer, dict) else None
        said = said if isinstance(said, list) else ()
        every = {str(one.get("id")): one for one in said if isinstance(one, dict)}
        found = []
        for number, part in enumerate(self._parts):
            if number in self._stopped:
                stopped = self._stopped[number]
                failure = Failure(FailureKind.THROTTLED, retry_at=stopped.until, code=f"stopped_{stopped.gate}")
                found.append(PartAnswer(part, None, failure=failure))
                continue
            found.append((yield from self._one(part, self._permits[number], every.get(str(number)))))
        return found

    def _one(self, part: Part, permit: Permit, said: dict[str, Any] | None) -> Flow:
        conduct, provider = self._trail.conduct, self._trail.provider
        if said is None or type(said.get("status")) is not int:
            conduct.abandoned(permit)
            lost = Failure(FailureKind.AMBIGUOUS if part.method.upper() not in IDEMPOTENT else FailureKind.TRANSIENT)
            return PartAnswer(part, None, failure=lost)
        now, body = conduct.now(), said.get("body")
        told = said.get("headers")
        fields = Fields.of({str(k): str(v) for k, v in (told if isinstance(told, dict) else {}).items()})
        left = budgets(fields, now, fields=provider.waits.budgets)
        text = body if isinstance(body, str) else json.dumps(body)
        facts = AnswerFacts(
            said["status"], fields, body=None if isinstance(body, str) else body, text=text, budgets=left
        )
        failure = without_secrets_in_code(classify(facts, permit.asked, provider, now), self._trail.secrets)
        yield conduct.answered(permit, facts, None if failure is not None and failure.kind in _OWN else failure)
        return PartAnswer(part, facts.status, fields, body, failure)


def endpoint(trail: Trail) -> BatchEndpoint:
    """The provider's batch endpoint. Raises `InvalidInput`."""
    found = trail.provider.batch
    if found is None:
        raise InvalidInput(f"provider {trail.provider.name!r} declares no batch endpoint: Provider(batch=...)")
    return found


def envelopes(trail: Trail, base_url: str, parts: Sequence[Part]) -> list[Envelope]:
    """As many as the provider's largest batch needs. Raises `InvalidInput`."""
    most = endpoint(trail).most
    return [Envelope(trail, base_url, parts[at : at + most]) for at in range(0, len(parts), most)]
