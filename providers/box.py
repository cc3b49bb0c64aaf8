"""Box: one user or service account.

A refresh token is dead once it was used. The event stream may repeat events, so they are told apart by their id.
A webhook that is sent again has another delivery id in its headers, and the same id in its body. All calls of an
enterprise in a month are counted too, by its plan (50,000 on Business): no limit here. Without a ``box-version``
header an answer is of 2024.0.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Errors, Incremental, Limit, NextCursor, OAuth2, Offset
from resilient import Provider, Rotation, Signature, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts


def route(request: RequestFacts) -> tuple[str, float]:
    """Search and uploads have limits of their own."""
    if request.path.endswith("/2.0/search"):
        return ("search", 1)
    return ("upload", 1) if request.host == "upload.box.com" and request.method == "POST" else ("", 1)


BOX: Final = Provider(
    name="box",
    title="Box",
    base_url="https://api.box.com/2.0",
    whoami="GET /users/me",
    hosts=("upload.box.com",),
    auth=(
        OAuth2(
            authorize_url="https://account.box.com/api/oauth2/authorize",
            token_url="https://api.box.com/oauth2/token",
            lifetime=3600,
            rotation=Rotation.SINGLE_USE,
            refresh_lifetime=60 * 86400,
        ),
    ),
    limits={
        "account": [Limit(1000, per="1m", name="user")],
        "account/search": [Limit(6, per="1s", name="search"), Limit(60, per="1m", name="search-minute")],
        "account/upload": [Limit(240, per="1m", name="upload")],
    },
    route=route,
    errors=Errors(code=("code",)),
    pagination={
        "marker": NextCursor(items="entries", cursor="next_marker", query="marker", size="limit", most=1000),
        "offset": Offset(items="entries", total="total_count", size="limit", most=1000),
    },
    incremental={
        "events": Incremental(
            style="token",
            query="stream_position",
            cursor="next_stream_position",
            source="every_page",
            deletions="marked",
            deleted="event_type=ITEM_TRASH",
            deleted_key="source.id source.item_id",
        )
    },
    webhook=Webhook(
        signatures=tuple(
            Signature(
                header=f"box-signature-{which}",
                signed="{body}{timestamp}",
                encoding="base64",
                timestamp="box-delivery-timestamp",
                word=Word.ISO8601,
                tolerance=600,
            )
            for which in ("primary", "secondary")
        ),
        delivery="body:id",  # box-delivery-id is another one in each attempt
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "developer.box.com/guides/authentication/tokens/refresh, /guides/tooling/postman/refresh",
        "developer.box.com/guides/api-calls/permissions-and-errors/rate-limits",
        "developer.box.com/guides/api-calls/api-versioning-strategy",
        "developer.box.com/guides/webhooks/v2",
        "support.box.com community posts 360049133654 (a dead grant), 10168678495635 (calls in a month)",
        "NangoHQ/nango packages/providers/providers.yaml",
    ),
    unverified=(
        "whoami",
        "limits: that uploads count by their host; calls in a month, and what is answered after them",
        "errors",
        "pagination",
        "incremental",
        "webhook: that the time is signed after the body, ten minutes of tolerance",
        "auth: pkce",
        "idempotency: none",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Box's facts for one app."""
    return BOX.configured(client_id, client_secret, **overrides)
