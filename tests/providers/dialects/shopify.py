"""Answers of Shopify."""

import base64
import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample

BODY = b'{"id":1}'
COST = {
    "requestedQueryCost": 500,
    "throttleStatus": {"maximumAvailable": 2000, "currentlyAvailable": 100, "restoreRate": 100},
}
GRAPHQL = "POST /admin/api/2026-07/graphql.json"
DIALECT = Dialect(
    throttled=[
        Sample(
            "REST",
            429,
            K.THROTTLED,
            {"errors": "Exceeded 2 calls per second for api client."},
            {"Retry-After": "2.0", "X-Shopify-Shop-Api-Call-Limit": "40/40"},
            key="rest",
            wait=2,
        ),
        Sample(
            "GraphQL",
            200,
            K.THROTTLED,
            {"errors": [{"message": "Throttled", "extensions": {"code": "THROTTLED"}}], "extensions": {"cost": COST}},
            on=GRAPHQL,
            key="graphql",
            scope=Scope.ENDPOINT,
            wait=4,
        ),
        Sample(
            "GraphQL, told nothing",
            200,
            K.THROTTLED,
            {"errors": [{"extensions": {"code": "THROTTLED"}}]},
            on=GRAPHQL,
            scope=Scope.ENDPOINT,
            wait=1,
        ),
        Sample("rejected", 430, K.THROTTLED, "<html>", wait=60),
    ],
    refused=[
        Sample(
            "scope",
            403,
            K.PERMANENT,
            {"errors": "[API] This action requires merchant approval for read_orders scope."},
            {"X-Shopify-Shop-Api-Call-Limit": "40/40"},
        ),
        Sample("frozen", 402, K.PERMANENT, {"errors": "Unavailable Shop"}),
        Sample("locked", 423, K.PERMANENT, {"errors": "Unavailable Shop"}),
    ],
    expired=[Sample("expired", 401, K.AUTH, {"errors": "[API] Invalid API key or access token"})],
    no_reset="updated_at_min takes any time",
    others=[Sample("fine", 200, None, {"data": {}}, on=GRAPHQL)],
    dead_grant=[Sample("uninstalled", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "rest",
            PageRequest("https://acme.myshopify.com/admin/api/2026-07/products.json"),
            [
                Page(
                    "limit=250",
                    {"products": [1]},
                    {
                        "Link": "<https://acme.myshopify.com/admin/api/2026-07/products.json?"
                        'limit=250&page_info=e>; rel="previous", '
                        "<https://acme.myshopify.com/admin/api/2026-07/products.json?limit=250"
                        '&page_info=f>; rel="next"'
                    },
                ),
                Page("page_info=f", {"products": [2]}),
            ],
            items=2,
        ),
        Pages(
            "graphql",
            PageRequest("https://acme.myshopify.com/admin/api/2026-07/graphql.json", "POST", {"query": "q"}),
            [
                Page(
                    "query=q",
                    {"data": {"orders": {"edges": [{"node": 1}], "pageInfo": {"hasNextPage": True, "endCursor": "c"}}}},
                ),
                Page("variables.after=c", {"data": {"orders": {"edges": [], "pageInfo": {"hasNextPage": False}}}}),
            ],
            items=1,
        ),
    ],
    hooks=[
        Hook(
            "client-secret",
            BODY,
            {
                "X-Shopify-Hmac-Sha256": base64.b64encode(
                    hmac.new(b"client-secret", BODY, hashlib.sha256).digest()
                ).decode()
            },
        ),
    ],
)
