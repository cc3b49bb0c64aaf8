"""Dropbox: one account, or a member of a team.

409 is the error of an endpoint (a path that is not there), not a conflict to repeat; among them is the cursor that
must start again. 429 with ``too_many_write_operations`` is a locked folder, no throttle of the account. Bodies of
400 are plain text. Limits are per user of an app and not published; refused requests count too, and a 429 may be
plain text.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Errors, FailureKind, Incremental, NextCursor, OAuth2, Provider
from resilient import Rule, Signature, Wait, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides

_WAIT: Final = Wait(body="error.retry_after", word=Word.DELTA_S, fallback=5)

DROPBOX: Final = Provider(
    name="dropbox",
    title="Dropbox",
    base_url="https://api.dropboxapi.com/2",
    whoami="POST /users/get_current_account",
    hosts=("content.dropboxapi.com", "notify.dropboxapi.com"),
    auth=(
        OAuth2(
            authorize_url="https://www.dropbox.com/oauth2/authorize",
            token_url="https://api.dropboxapi.com/oauth2/token",
            authorize_params={"token_access_type": "offline"},
            pkce="supported",
            lifetime=14_400,
        ),
    ),
    reads=(
        "POST /2/files/list_folder*",
        "POST /2/files/get_*",
        "POST /2/files/search*",
        "POST /2/files/download",
        "POST /2/users/*",
        "POST /2/check/*",
    ),
    errors=Errors(
        code=("error.reason['.tag']", "error['.tag']"),
        message=("user_message.text", "error_summary"),
        rules=(
            Rule(FailureKind.CONFLICT, status=429, code="too_many_write_operations", wait=_WAIT),
            Rule(FailureKind.THROTTLED, status=429, wait=_WAIT),
            Rule(FailureKind.RESET_CURSOR, status=409, code="reset"),
            Rule(FailureKind.PERMANENT, status=(409, 507)),
        ),
    ),
    pagination={
        "list_folder": NextCursor(
            items="entries",
            cursor="cursor",
            body="cursor",
            more="has_more",
            path="/continue",
            alone=True,
            resume="cursor",
        )
    },
    incremental={
        "list_folder": Incremental(
            style="token",
            body="cursor",
            cursor="cursor",
            source="every_page",
            deletions="marked",
            deleted="['.tag']=deleted",
        )
    },
    webhook=Webhook(
        signatures=(Signature(header="x-dropbox-signature"),),
        events="list_folder.accounts",
        challenge="echo",
        challenge_field="query:challenge",
        ping=True,
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "dropbox/dropbox-sdk-python dropbox/dropbox_client.py, dropbox/oauth.py, dropbox/exceptions.py",
        "developers.dropbox.com/dbx-performance-guide; www.dropbox.com/developers/reference/data-ingress-guide",
        "dropbox.tech/developers/using-oauth-2-0-with-offline-access; www.dropbox.com/developers/reference/webhooks",
    ),
    unverified=(
        "whoami",
        "auth: what a dead grant is told",
        "errors.rules: 507",
        "limits: not published",
        "idempotency: none",
        "reads",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Dropbox's facts for one app."""
    return DROPBOX.configured(client_id, client_secret, **overrides)
