"""Matrix client-server API (Synapse): one user and device on one homeserver.

Whether a 401 is the end of the grant stands in ``soft_logout``. Lifetimes are in milliseconds, and the old refresh
token works until the new one is used. Events are sent by PUT with a transaction id in the path, so a repeat has one
effect; the ids are a device's, so a new login knows none of them, and Synapse keeps them for a day (in ``sendToDevice``
for half an hour). A timeline that is ``limited`` has a gap, to be filled backwards from ``prev_batch`` by
``/messages``, with ``dir=b``. ``/sync`` is one answer with the events of every room, which do not name their room: for
one of them say
``OnePage(items="rooms.join['!id:example.org'].timeline.events", absent="empty")``, in quotes because an id has a dot.
A redaction is an event of its own, and names the one that is gone.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, Errors, FailureKind, Idempotency, Incremental, Limit, NextCursor, OAuth2, OnePage
from resilient import Provider, Rotation, Rule, Signature, Wait, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts


def route(request: RequestFacts) -> tuple[str, float]:
    """Sending has a limit of its own."""
    return ("send", 1) if request.method == "PUT" and "/send/" in request.path else ("", 1)


MATRIX: Final = Provider(
    name="matrix",
    title="Matrix",
    base_url="https://{homeserver}/_matrix/client/v3",
    whoami="GET /account/whoami",
    auth=(
        OAuth2(
            token_url="https://{homeserver}/_matrix/client/v3/refresh",
            flows=(),
            client_auth="none",
            body="json",
            lifetime_field="expires_in_ms",
            lifetime_unit=0.001,
            rotation=Rotation.GRACE,  # until the new access or refresh token is used
            errors=Errors(
                code=("errcode",),
                message=("error",),
                rules=(
                    Rule(FailureKind.AUTH, code="M_UNKNOWN_TOKEN"),
                    Rule(FailureKind.AUTH, status=403, code="M_FORBIDDEN"),  # Synapse, of a used-up refresh token
                ),
            ),
        ),
        Bearer(),
    ),
    limits={"account/send": [Limit(12, per="1m", burst=10, name="messages")]},  # a server's default
    route=route,
    errors=Errors(
        code=("errcode",),
        message=("error",),
        rules=(
            Rule(FailureKind.THROTTLED, status=429, wait=Wait(body="retry_after_ms", word=Word.DELTA_MS)),
            Rule(FailureKind.QUOTA, status=403, code="M_RESOURCE_LIMIT_EXCEEDED", wait=Wait(fallback=3600)),
        ),
    ),
    idempotency=Idempotency(
        in_path=True,
        methods=frozenset({"PUT"}),
        paths=("*/send/*/*", "*/redact/*/*", "*/sendToDevice/*/*"),
        life=86400,
        lives_with="grant",
    ),
    pagination={
        "messages": NextCursor(items="chunk", cursor="end", query="from", size="limit", most=100),
        "sync": OnePage(items="rooms.join.*.timeline.events", absent="empty"),
    },
    incremental={
        "sync": Incremental(
            style="token",
            query="since",
            cursor="next_batch",
            source="every_page",
            deletions="marked",
            deleted="type=m.room.redaction",
            deleted_key="redacts content.redacts",  # at the top before room version 11
        )
    },
    webhook=Webhook(signatures=(Signature(header="authorization", scheme="equal", pattern=r"Bearer (\S+)"),)),
    verified_on=date(2026, 11, 22),
    sources=(
        "matrix-org/matrix-spec content/client-server-api/_index.md",
        "element-hq/synapse synapse/api/errors.py, synapse/config/ratelimiting.py",
        "element-hq/synapse synapse/storage/databases/main/events_worker.py",
    ),
    unverified=(
        "whoami",
        "pagination: the largest size",
        "webhook",
        "idempotency: how long homeservers but Synapse keep ids",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """The protocol's facts; ``{homeserver}`` belongs to each connection."""
    return MATRIX.configured(client_id, client_secret, **overrides)
