"""Box: one user or service account.

A refresh token is dead once it was used. The event stream may repeat events, so they are told apart by their id.
Most of this is from memory.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Errors, Incremental, Limit, NextCursor, OAuth2, Offset
from resilient import Provider, Rotation, Signature, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides

BOX: Final = Provider(
    name="box",
    title="Box",
    base_url="https://api.box.com/2.0",
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
    limits={"account": [Limit(1000, per="1m", name="user")]},
    errors=Errors(code=("code",)),
    pagination={
        "marker": NextCursor(items="entries", found="next_marker", query="marker", size="limit", most=1000),
        "offset": Offset(items="entries", total="total_count", size="limit", most=1000),
    },
    incremental={
        "events": Incremental(
            style="token",
            query="stream_position",
            found="next_stream_position",
            taken="every_page",
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
        delivery="box-delivery-id",
    ),
    verified_on=date(2026, 11, 1),
    sources=(
        "developer.box.com guides authentication tokens refresh",
        "NangoHQ/nango packages/providers/providers.yaml",
    ),
    unverified=(
        "limits",
        "errors",
        "waits",
        "pagination",
        "incremental",
        "webhook",
        "auth: lifetime, pkce",
        "idempotency: none",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Box's facts for one app."""
    return BOX.configured(client_id, client_secret, **overrides)
