"""What a fake provider saw: the truth for every count a test makes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from resilient.core.failure import FailureKind

What = Literal["api", "part", "token", "authorize", "revoke"]
JSON = Any


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request. ``path`` is without its query; ``headers`` have lower-case names.

    ``account``: whose credentials it carried, "" if none; ``key``: the resource it draws on; ``cost``: how much.
    ``what``: of the API itself, a ``part`` of a batch, or of OAuth. ``status``: what was answered, None if the
    connection was closed instead; ``kind``: which failure that meant, None for none. ``replayed``: answered out
    of the memory for its idempotency key. ``early``: it came although the provider had said to wait;
    ``over``: it broke a limit. ``below``: its path below that of the base URL.
    """

    at: datetime
    method: str
    path: str
    query: dict[str, str] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    what: What = "api"
    account: str = ""
    key: str = ""
    cost: float = 1.0
    idempotency_key: str | None = None
    status: int | None = None
    kind: FailureKind | None = None
    replayed: bool = False
    early: bool = False
    over: bool = False
    below: str = ""

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def target(self) -> str:
        """As in ``on=``: ``"POST /v1/charges"``."""
        return f"{self.method} {self.path}"


class Log(list[Seen]):
    """Every request, in the order of arrival."""

    def where(self, test: Callable[[Seen], bool] | None = None, /, **fields: Any) -> Log:
        """Those with these fields: ``fake.log.where(account="acct-7", status=429)``, or that pass a test."""
        found = (one for one in self if all(getattr(one, name) == value for name, value in fields.items()))
        return Log(one for one in found if test is None or test(one))

    @property
    def api(self) -> Log:
        """Requests to the API itself, parts of batches included."""
        return Log(one for one in self if one.what in ("api", "part"))

    @property
    def tokens(self) -> Log:
        """Requests to the token endpoint."""
        return self.where(what="token")


@dataclass(slots=True)
class Reply:
    """One answer. ``body``: JSON, or text or bytes as they are.

    ``fault`` instead of a whole answer: ``lost`` (the connection is closed without one), ``cut`` (closed in the
    middle of the body), ``slow`` (a byte at a time, ``pace`` seconds apart), ``endless`` (a body without end),
    ``hang`` (nothing at all until the client gives up).
    """

    status: int = 200
    body: JSON = None
    headers: dict[str, str] = field(default_factory=dict)
    fault: Literal["", "lost", "cut", "slow", "endless", "hang"] = ""
    pace: float = 0.2

    def content(self) -> bytes:
        """The body's bytes."""
        if self.body is None:
            return b""
        if isinstance(self.body, bytes):
            return self.body
        return self.body.encode() if isinstance(self.body, str) else json.dumps(self.body).encode()

    @property
    def content_type(self) -> str:
        """What the body is."""
        if isinstance(self.body, (str, bytes)):
            return "text/html; charset=utf-8" if self.content()[:1] == b"<" else "text/plain; charset=utf-8"
        return "application/json"


def query_of(text: str) -> dict[str, str]:
    """Parameters by name; of several the last."""
    return dict(parse_qsl(text, keep_blank_values=True))
