"""Discord: one bot's token, or one user's grant.

Budgets are per route and channel, guild or webhook, so each of these is an endpoint; the answer names its bucket. A
global throttle holds all routes. 10,000 refused answers in ten minutes get the address banned: that 429 has no
JSON. Waits have fractions. A message is made repeatable by ``nonce`` and ``enforce_nonce`` in its body, for a few
minutes. Revoking one token revokes all of an authorisation.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, BudgetFields, Errors, FailureKind, Incremental, LastKey, Limit, OAuth2, Provider
from resilient import Rotation, Rule, Scope, Signature, Wait, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts

_MAJOR: Final = frozenset({"channels", "guilds", "webhooks"})
_RETRY_AFTER: Final = Wait(body="retry_after", word=Word.DELTA_S_FLOAT)


def route(request: RequestFacts) -> tuple[str, float]:
    """The channel, guild or webhook."""
    parts = request.path.strip("/").split("/")[2:]  # without api and the version
    return (f"{parts[0]}:{parts[1]}", 1) if len(parts) > 1 and parts[0] in _MAJOR and parts[1].isdigit() else ("", 1)


DISCORD: Final = Provider(
    name="discord",
    title="Discord",
    base_url="https://discord.com/api/v10",
    whoami="GET /users/@me",
    auth=(
        Bearer(prefix="Bot "),
        OAuth2(
            authorize_url="https://discord.com/oauth2/authorize",
            token_url="https://discord.com/api/oauth2/token",
            revoke_url="https://discord.com/api/oauth2/token/revoke",
            client_auth="basic",
            pkce="supported",
            lifetime=604_800,
            rotation=Rotation.SINGLE_USE,
        ),
    ),
    limits={"account": [Limit(50, per="1s", name="global")]},
    route=route,
    waits=WaitDialect(
        retry_after=Word.DELTA_S_FLOAT,
        budgets=(
            BudgetFields(
                "bucket",
                limit="x-ratelimit-limit",
                remaining="x-ratelimit-remaining",
                reset="x-ratelimit-reset-after",
                word=Word.DELTA_S_FLOAT,
                named_by="x-ratelimit-bucket",
            ),
        ),
    ),
    errors=Errors(
        code=("code",),
        rules=(
            Rule(FailureKind.QUOTA, status=429, json=False, scope=Scope.PROVIDER, wait=Wait(fallback=600)),
            Rule(FailureKind.THROTTLED, status=429, where={"global": True}, wait=_RETRY_AFTER),
            Rule(FailureKind.THROTTLED, status=429, scope=Scope.ENDPOINT, wait=_RETRY_AFTER),
        ),
    ),
    pagination={"messages": LastKey(key="id", query="before", size="limit", most=100)},
    incremental={"messages": Incremental(style="key", query="after", field="id", deletions="webhook")},
    webhook=Webhook(
        signatures=(
            Signature(
                header="x-signature-ed25519",
                scheme="ed25519",
                signed="{timestamp}{body}",
                timestamp="x-signature-timestamp",
                key="hex",
            ),
        ),
        challenge="status",
        event="body:event.type",
        answer_within=3,
        status=204,
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "discord/discord-api-docs developers/topics/rate-limits.mdx, oauth2.mdx",
        "discord/discord-api-docs developers/resources/message.mdx, developers/events/webhook-events.mdx",
        "support-dev.discord.com article 6223003921559 (refused requests)",
        "Rapptz/discord.py discord/http.py",
    ),
    unverified=(
        "whoami",
        "auth: pkce, that a used refresh token is dead, what a dead grant is told",
        "errors.rules: how long a banned address waits",
        "pagination",
        "incremental",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Discord's facts; a client's id and secret are needed for users' grants only."""
    return DISCORD.configured(client_id, client_secret, **overrides)
