"""GitHub: REST and GraphQL, for OAuth apps and GitHub Apps.

A 403 is a throttle only if a budget is spent (``x-ratelimit-remaining: 0``), a wait is told, or its message
speaks of a secondary limit; otherwise it is a missing permission, which waiting does not heal. Going on while
limited may get an integration banned. Errors of the token endpoint come as 200. A refresh kills the old access
token too. 304 answers do not count. Failed webhooks are not sent again by themselves.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, BudgetFields, Errors, FailureKind, GraphQLPages, Incremental, Limit, LinkHeader, OAuth2
from resilient import Provider, Rotation, Rule, Scope, Signature, Wait, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts

_SEARCH: Final = {"/search/code": "code_search"}
_WRITES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def route(request: RequestFacts) -> tuple[str, float]:
    """Search, GraphQL and what creates content have budgets of their own."""
    path = request.path.removeprefix("/api/v3")
    if path in ("/graphql", "/api/graphql"):
        return "graphql", 1
    if path.startswith("/search/"):
        return _SEARCH.get(path, "search"), 1
    return ("write", 1) if request.method in _WRITES else ("", 1)


GITHUB: Final = Provider(
    name="github",
    title="GitHub",
    base_url="https://api.github.com",
    whoami="GET /rate_limit",
    hosts=("uploads.github.com",),
    headers={"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2026-03-10"},
    auth=(
        OAuth2(
            authorize_url="https://github.com/login/oauth/authorize",
            token_url="https://github.com/login/oauth/access_token",
            token_headers={"Accept": "application/json"},
            pkce="supported",
            refresh_lifetime=183 * 86400,
            refresh_lifetime_field="refresh_token_expires_in",
            rotation=Rotation.SINGLE_USE,
            limits=(Limit(2000, per="1h", name="tokens"),),
            errors=Errors(
                code=("error",),
                rules=(
                    Rule(FailureKind.AUTH, code="bad_refresh_token"),
                    Rule(FailureKind.AUTH, code="incorrect_client_credentials", scope=Scope.PROVIDER),
                ),
            ),
        ),
        Bearer(),
    ),
    limits={
        "account": [Limit(5000, per="1h", name="core"), Limit(900, per="1m", name="points")],
        "account/graphql": [Limit(5000, per="1h", name="graphql")],
        "account/search": [Limit(30, per="1m", name="search")],
        "account/code_search": [Limit(10, per="1m", name="code_search")],
        "account/write": [Limit(80, per="1m", name="content-minute"), Limit(500, per="1h", name="content-hour")],
    },
    route=route,
    waits=WaitDialect(
        budgets=(
            BudgetFields(
                "core",
                limit="x-ratelimit-limit",
                remaining="x-ratelimit-remaining",
                reset="x-ratelimit-reset",
                word=Word.EPOCH_S,
                named_by="x-ratelimit-resource",
            ),
        )
    ),
    errors=Errors(
        message=("message", "errors[0].message"),
        rules=(
            Rule(
                FailureKind.QUOTA,
                status=(403, 429),
                scope=Scope.ENDPOINT,
                header={"x-ratelimit-remaining": "^0$", "x-ratelimit-resource": "^(?!core$)."},
            ),
            Rule(FailureKind.QUOTA, status=(403, 429), header={"x-ratelimit-remaining": "^0$"}),
            Rule(FailureKind.THROTTLED, status=(403, 429), header={"retry-after": "."}),
            Rule(FailureKind.THROTTLED, status=(403, 429), text="secondary rate", wait=Wait(fallback=60)),
            Rule(FailureKind.QUOTA, status=200, where={"errors[].type": "RATE_LIMITED"}, scope=Scope.ENDPOINT),
            Rule(FailureKind.QUOTA, status=200, where={"errors[].type": "RATE_LIMIT"}, scope=Scope.ENDPOINT),
        ),
    ),
    pagination={
        "rest": LinkHeader(size="per_page", most=100),
        "search": LinkHeader(items="items", size="per_page", most=100),
        "graphql": GraphQLPages(),
    },
    incremental={
        "since": Incremental(style="filter", query="since", field="updated_at"),
        "etag": Incremental(style="conditional", header="If-None-Match"),
    },
    webhook=Webhook(
        signatures=(Signature(header="x-hub-signature-256", pattern="sha256=([0-9a-f]+)"),),
        delivery="x-github-delivery",
        event="x-github-event",
        answer_within=30,
        repeats=False,
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "docs.github.com rest/using-the-rest-api/rate-limits-for-the-rest-api",
        "docs.github.com apps/creating-github-apps/authenticating-with-a-github-app/refreshing-user-access-tokens",
        "docs.github.com webhooks/using-webhooks/handling-failed-webhook-deliveries",
        "docs.github.com rest/rate-limit (whoami: it counts against no limit)",
        "octokit/plugin-throttling.js src/index.ts",
        "github.blog changelog 2026-03-12 (version 2026-03-10), in a stored copy of 2026",
        "yanyongyu/githubkit issue 271 of 2026-01 (RATE_LIMIT beside RATE_LIMITED)",
    ),
    unverified=(
        "auth: pkce, the codes of a dead refresh token and of a refused client",
        "limits: of search and code search",
        "incremental",
        "idempotency: none",
    ),
)


def provider(
    client_id: str = "", client_secret: str = "", *, version: str = "2026-03-10", **overrides: Unpack[Overrides]
) -> Provider:
    """GitHub's facts for one app and version of the API; a header of the same name in ``headers`` has the last word.

    Enterprise Server: ``base_url="https://github.example.com/api/v3"``; an older one needs ``version="2022-11-28"``.
    People sign in at the same host, without its ``api.``; say ``sign_in_at=`` if not.
    """
    if (own := overrides.get("base_url", GITHUB.base_url)) != GITHUB.base_url:  # or its codes would go to github.com
        scheme, _, host = own.partition("/api/v3")[0].rstrip("/").partition("://")
        overrides.setdefault("sign_in_at", f"{scheme}://{host.partition('/')[0].removeprefix('api.')}")
    dated = GITHUB.configured(headers={"X-GitHub-Api-Version": version})
    return dated.configured(client_id, client_secret, **overrides)
