"""Names and idempotency keys of an execution's requests: the same in every execution of the job.

A request is named by its ``op``, else by method, path and ordinal ("POST /v1/charges #2"). The ordinal counts
requests that came to a conclusion: one whose predecessor has no known outcome, with the same body or with the
same key out of an SDK's own retry, *is* that predecessor again and keeps its name. Bodies are not part of a
name, because they often contain the time of day.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Final

from resilient.core.errors import InvalidInput
from resilient.core.failure import Failure, FailureKind

KEY_LENGTH: Final = 32  # hexadecimal digits; QuickBooks takes at most 50 characters
_NO_BODY: Final = "-"


class Names:
    """The names given out in one execution, each beginning with ``prefix``."""

    __slots__ = ("_bodies", "_count", "_made_up", "_open", "_prefix")

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._count: dict[str, int] = defaultdict(int)  # by stem: method and path
        self._open: dict[str, dict[str, str]] = {}  # stem -> names without a known outcome -> body hash
        self._made_up: dict[str, str] = {}  # an SDK's key -> the name it stands for
        self._bodies: dict[str, str] = {}  # op -> body hash

    def given(self, op: str, body_hash: str | None) -> str:
        """Check that one ``op`` stands for one request. Raises `InvalidInput`."""
        known = self._bodies.setdefault(op, body_hash or _NO_BODY)
        if known != (body_hash or _NO_BODY):
            raise InvalidInput(
                f"two different requests of this job are called op={op!r}: they would share a key;"
                f" name each for what it does, such as '{op}:2'"
            )
        return self._prefix + op

    def next(self, method: str, path: str, body_hash: str | None, made_up: str | None = None) -> str:
        """The name of a request without an ``op``."""
        stem = f"{self._prefix}{method} {path}"
        waiting = self._open.get(stem, {})
        name = self._made_up.get(made_up) if made_up is not None else None
        if name is None:
            name = next((n for n, known in waiting.items() if known == (body_hash or _NO_BODY)), None)
        if name is None:
            self._count[stem] += 1
            name = f"{stem} #{self._count[stem]}"
        waiting.pop(name, None)  # it is on its way again
        if made_up is not None:
            self._made_up[made_up] = name
        return name

    def settle(self, name: str, body_hash: str | None, failure: Failure | None) -> None:
        """Note the outcome of a request; without a conclusion its name is open again."""
        if failure is not None and failure.kind is not FailureKind.PERMANENT:
            self._open.setdefault(name.rpartition(" #")[0], {})[name] = body_hash or _NO_BODY


def derive(base_key: str, name: str) -> str:
    """The idempotency key of the request ``name`` of the job with ``base_key``."""
    return hashlib.sha256(f"{base_key}\n{name}".encode()).hexdigest()[:KEY_LENGTH]


def hash_of(body: bytes | None) -> str | None:
    """SHA-256 of a body in memory."""
    return None if body is None else hashlib.sha256(body).hexdigest()
