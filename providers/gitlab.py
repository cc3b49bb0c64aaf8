"""GitLab: gitlab.com, or an instance of one's own (``host=``).

A refresh invalidates the old access and refresh token at once, and wants the redirect URI again. Limits of single
endpoints answer 429 with plain text and no headers. A webhook carries its ``Idempotency-Key`` with either secret;
``webhook-id``, the same value, comes with a signing token only.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, BudgetFields, Errors, FailureKind, Incremental, Limit, LinkHeader, OAuth2, PageNumber
from resilient import Provider, Rotation, Rule, Signature, Wait, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts


_RESET: Final = Wait(header="ratelimit-resettime", word=Word.HTTP_DATE, fallback=60)


def route(request: RequestFacts) -> tuple[str, float]:
    """Projects and groups, as lists and one by one, have limits of their own."""
    parts = request.path.partition("/api/v4/")[2].strip("/").split("/")
    if request.method != "GET" or parts[0] not in ("projects", "groups") or len(parts) > 2:  # noqa: PLR2004 - name and id
        return ("", 1)
    return (parts[0] if len(parts) == 1 else parts[0].removesuffix("s"), 1)


GITLAB: Final = Provider(
    name="gitlab",
    title="GitLab",
    base_url="https://gitlab.com/api/v4",
    whoami="GET /user",
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
        "account/project": [Limit(400, per="1m", name="project")],
        "account/groups": [Limit(200, per="1m", name="groups")],
        "account/group": [Limit(400, per="1m", name="group")],
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
        delivery="idempotency-key",
        event="x-gitlab-event",
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "docs.gitlab.com administration/settings/user_and_ip_rate_limits, security/rate_limits",
        "docs.gitlab.com administration/settings/rate_limit_on_projects_api; gitlab.com/gitlab-org/gitlab issue 458904",
        "docs.gitlab.com api/oauth2",
        "about.gitlab.com blog 2020/12/17 (figure of gitlab.com)",
        "docs.gitlab.com user/project/integrations/webhooks (delivery headers)",
        "gitlab.com/gitlab-org/gitlab merge requests 230944 (what is signed), 231325 (how the signing key is written)",
        "hookdeck/webhook-skills skills/gitlab-webhooks/references/verification.md",
    ),
    unverified=(
        "whoami",
        "errors: codes and messages, 60 s where a 429 tells nothing",
        "idempotency: none",
        "pagination",
        "incremental",
        "limits: of other single endpoints (those of users, say)",
    ),
)


def provider(
    client_id: str = "", client_secret: str = "", *, host: str = "gitlab.com", **overrides: Unpack[Overrides]
) -> Provider:
    """GitLab's facts for one application, on ``host``; ``base_url``, ``hosts`` and ``sign_in_at`` go before it."""
    if host == "gitlab.com":
        return GITLAB.configured(client_id, client_secret, **overrides)
    overrides.setdefault("sign_in_at", f"https://{host}")  # also of an ``auth=`` of the app's own
    return GITLAB.moved(f"https://{host}").configured(client_id, client_secret, **overrides)
