"""Notion: one workspace's grant of one connection.

A refresh gives a new refresh token, which may also be null: then the old one stays. 404 may mean that a page was
not shared. A webhook is signed with a token that Notion sends once, and that a person then types into Notion's own
settings: see `Inbound`'s ``handshake``. Times of change are whole minutes. 529 is an overload of Notion, no limit of
the account.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, Errors, Incremental, Limit, NextCursor, OAuth2, Provider, Rotation, Signature, Webhook

if TYPE_CHECKING:
    from resilient import Overrides

NOTION: Final = Provider(
    name="notion",
    title="Notion",
    base_url="https://api.notion.com/v1",
    whoami="GET /users/me",
    headers={"Notion-Version": "2026-03-11"},
    auth=(
        OAuth2(
            authorize_url="https://api.notion.com/v1/oauth/authorize",
            token_url="https://api.notion.com/v1/oauth/token",
            authorize_params={"owner": "user"},
            client_auth="basic",
            body="json",
            rotation=Rotation.SINGLE_USE,
            keep=("bot_id", "workspace_id"),
        ),
        Bearer(),
    ),
    limits={"account": [Limit(180, per="1m", name="connection")]},  # three a second on average
    reads=("POST /v1/search", "POST /v1/databases/*/query", "POST /v1/data_sources/*/query"),
    errors=Errors(code=("code",)),
    pagination={
        "list": NextCursor(
            items="results", cursor="next_cursor", query="start_cursor", more="has_more", size="page_size", most=100
        ),
        "query": NextCursor(
            items="results", cursor="next_cursor", body="start_cursor", more="has_more", size="page_size", most=100
        ),
    },
    incremental={
        "query": Incremental(
            style="filter",
            body="filter",
            field="last_edited_time",
            precision=60,
            deletions="marked",
            deleted="in_trash",
        )
    },
    webhook=Webhook(
        signatures=(Signature(header="x-notion-signature", pattern="sha256=([0-9a-f]+)"),),
        delivery="body:id",
        event="body:type",
        challenge="secret",
        challenge_field="body:verification_token",
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "developers.notion.com/reference/request-limits, /reference/refresh-a-token",
        "developers.notion.com upgrade guide 2026-03-11, reference/webhooks, in stored copies of 2026",
        "makenotion/notion-sdk-js src/Client.ts, src/errors.ts, src/api-endpoints/oauth.ts",
    ),
    unverified=(
        "whoami",
        "auth: pkce, keep",
        "idempotency: none",
        "webhook: that an event keeps its id over its attempts, by the shape of the events",
        "reads: data_sources",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Notion's facts for one public connection."""
    return NOTION.configured(client_id, client_secret, **overrides)
