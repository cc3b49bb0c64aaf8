"""GitLab: gitlab.com, or an instance of one's own (``host=``).

A refresh invalidates the old access and refresh token at once, and wants the redirect URI again. Limits of single
endpoints answer 429 with plain text and no headers.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, BudgetFields, Errors, FailureKind, Incremental, Limit, LinkHeader, OAuth2, PageNumber
from resilient import Provider, Rotation, Rule, Signature, Wait, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts


_RESET: Final = Wait(header="ratelimit-resettime", word=Word.HTTP_DATE, fallback=60)


def route(asked: RequestFacts) -> tuple[str, float]:
    """The list of projects has a limit of its own."""
    return ("projects", 1) if asked.method == "GET" and asked.path.endswith("/api/v4/projects") else ("", 1)


GITLAB: Final = Provider(
    name="gitlab",
    title="GitLab",
    base_url="https://gitlab.com/api/v4",
    auth=(
        OAuth2(
            authorize_url="https://gitlab.com/oauth/authorize",
            token_url="https://gitlab.com/oauth/token",
            pkce="supported",
            lifetime=7200,
            rotation=Rotation.SINGLE_USE,
            refresh_redirect=True,
        ),
        Bearer(header="PRIVATE-TOKEN", prefix=""),
    ),
    limits={
        "account": [Limit(2000, per="1m", name="user")],
        "account/projects": [Limit(2000, per="10m", name="projects")],
    },
    route=route,
    waits=WaitDialect(
        budgets=(
            BudgetFields(
                "user",
                limit="ratelimit-limit",
                remaining="ratelimit-remaining",
                reset="ratelimit-reset",
                word=Word.EPOCH_S,
                named_by="ratelimit-name",
            ),
        )
    ),
    errors=Errors(
        code=("error",),
        message=("message", "error_description", "error"),
        rules=(
            Rule(
                FailureKind.THROTTLED,
                status=429,
                wait=Wait(header="ratelimit-resettime", word=Word.HTTP_DATE, fallback=60),
            ),
        ),
    ),
    pagination={
        "list": LinkHeader(size="per_page", most=100),
        "numbered": PageNumber(header="x-next-page", size="per_page", most=100),
    },
    incremental={"updated": Incremental(style="filter", query="updated_after", field="updated_at")},
    webhook=Webhook(
        signatures=(
            Signature(
                header="webhook-signature",
                pattern=r"v1,(\S+)",
                signed="{id}.{timestamp}.{body}",
                encoding="base64",
                timestamp="webhook-timestamp",
                key="whsec",
            ),
            Signature(header="x-gitlab-token", scheme="equal"),
        ),
        delivery="webhook-id",
        event="x-gitlab-event",
    ),
    verified_on=date(2026, 11, 1),
    sources=(
        "docs.gitlab.com administration/settings/user_and_ip_rate_limits, security/rate_limits",
        "docs.gitlab.com api/oauth2",
        "about.gitlab.com blog 2021 (figure of gitlab.com)",
        "hookdeck/webhook-skills skills/gitlab-webhooks/references/verification.md",
    ),
    unverified=(
        "errors: codes and messages, 60 s where a 429 tells nothing",
        "idempotency: none",
        "pagination",
        "incremental",
        "webhook: how the signing key is written",
    ),
)


def provider(
    client_id: str = "", client_secret: str = "", *, host: str = "gitlab.com", **overrides: Unpack[Overrides]
) -> Provider:
    """GitLab's facts for one application, on ``host``."""
    made = GITLAB.configured(client_id, client_secret, **overrides)
    return made if host == "gitlab.com" else made.moved(f"https://{host}")
