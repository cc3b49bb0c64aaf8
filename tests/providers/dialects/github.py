"""Answers of GitHub."""

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import NOW, Dialect, Hook, Page, Pages, Sample, Token


def budget(remaining, resource="core", reset="1793534400"):
    return {
        "x-ratelimit-limit": "5000",
        "x-ratelimit-remaining": remaining,
        "x-ratelimit-reset": reset,
        "x-ratelimit-resource": resource,
    }


RESET = str(int(NOW.timestamp()) + 900)
SECONDARY = {"message": "You have exceeded a secondary rate limit. Please wait a few minutes before you try again."}
DIALECT = Dialect(
    throttled=[
        Sample("primary", 403, K.QUOTA, {"message": "API rate limit exceeded"}, budget("0", reset=RESET), wait=900),
        Sample(
            "search",
            403,
            K.QUOTA,
            {"message": "API rate limit exceeded"},
            budget("0", "search", RESET),
            on="GET /search/issues",
            key="search",
            scope=Scope.ENDPOINT,
            wait=900,
        ),
        Sample("secondary, told", 403, K.THROTTLED, SECONDARY, budget("4990") | {"Retry-After": "60"}, wait=60),
        Sample("secondary, told nothing", 403, K.THROTTLED, SECONDARY, budget("4990"), wait=60),
        Sample(
            "abuse, told",
            403,
            K.THROTTLED,
            {"message": "You have triggered an abuse detection mechanism."},
            {"Retry-After": "45"},
            wait=45,
        ),
        Sample("secondary as 429", 429, K.THROTTLED, SECONDARY, {"Retry-After": "30"}, wait=30),
        Sample(
            "GraphQL, in its other word",
            200,
            K.QUOTA,
            {"errors": [{"type": "RATE_LIMIT", "code": "graphql_rate_limit", "message": "already exceeded"}]},
            budget("0", "graphql", RESET),
            on="POST /graphql",
            key="graphql",
            scope=Scope.ENDPOINT,
            wait=900,
        ),
        Sample(
            "GraphQL",
            200,
            K.QUOTA,
            {"errors": [{"type": "RATE_LIMITED", "message": "API rate limit exceeded"}]},
            budget("0", "graphql", RESET),
            on="POST /graphql",
            key="graphql",
            scope=Scope.ENDPOINT,
            wait=900,
        ),
    ],
    refused=[
        Sample("permission", 403, K.PERMANENT, {"message": "Resource not accessible by integration"}, budget("4999")),
        Sample(
            "SAML", 403, K.PERMANENT, {"message": "Resource protected by organization SAML enforcement."}, budget("1")
        ),
        Sample("hidden", 404, K.PERMANENT, {"message": "Not Found"}, budget("4000")),
    ],
    expired=[Sample("expired", 401, K.AUTH, {"message": "Bad credentials"})],
    no_reset="since= takes any time",
    others=[
        Sample("heavy query", 502, K.TRANSIENT, "", on="GET /repos/a/b/issues"),
        Sample("lost write", 502, K.AMBIGUOUS, "", on="POST /repos/a/b/issues", key="write"),
        Sample("data", 200, None, {"data": {}}, on="POST /graphql"),
    ],
    dead_grant=[Sample("used up", 200, K.AUTH, {"error": "bad_refresh_token", "error_description": "expired"})],
    token_errors=[
        Sample("secret", 200, K.AUTH, {"error": "incorrect_client_credentials"}, scope=Scope.PROVIDER),
    ],
    tokens=[
        Token(
            "a user's",
            {
                "access_token": "ghu_1",
                "expires_in": 28800,
                "refresh_token": "ghr_1",
                "refresh_token_expires_in": 15897600,
                "token_type": "bearer",
                "scope": "",
            },
            "ghu_1",
            "ghr_1",
            28800,
        )
    ],
    pages=[
        Pages(
            "rest",
            PageRequest("https://api.github.com/repos/a/b/issues?state=all"),
            [
                Page(
                    "per_page=100",
                    [1, 2],
                    {
                        "Link": '<https://api.github.com/repositories/1/issues?page=2>; rel="next", '
                        '<https://api.github.com/repositories/1/issues?page=2>; rel="last"'
                    },
                ),
                Page("page=2", [3], {"Link": '<https://api.github.com/repositories/1/issues?page=1>; rel="prev"'}),
            ],
            items=3,
        ),
        Pages(
            "search",
            PageRequest("https://api.github.com/search/issues?q=x"),
            [
                Page("q=x", {"total_count": 1, "items": [1]}),
            ],
            items=1,
        ),
        Pages(
            "graphql",
            PageRequest("https://api.github.com/graphql", "POST", {"query": "...", "variables": {"n": 2}}),
            [
                Page(
                    "variables.n=2",
                    {
                        "data": {
                            "repository": {
                                "issues": {"nodes": [1, 2], "pageInfo": {"hasNextPage": True, "endCursor": "Y3"}}
                            }
                        }
                    },
                ),
                Page(
                    "variables.after=Y3",
                    {
                        "data": {
                            "repository": {
                                "issues": {"nodes": [3], "pageInfo": {"hasNextPage": False, "endCursor": "Y4"}}
                            }
                        }
                    },
                ),
            ],
            items=3,
        ),
    ],
    hooks=[  # the example of GitHub's own documentation
        Hook(
            "It's a Secret to Everybody",
            b"Hello, World!",
            {"X-Hub-Signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"},
        ),
    ],
)
