"""Answers of Mailchimp."""

from resilient import FailureKind as K
from resilient import PageRequest
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample


def problem(status, title):
    return {
        "type": "https://mailchimp.com/developer/marketing/docs/errors/",
        "title": title,
        "status": status,
        "detail": "...",
    }


DIALECT = Dialect(
    throttled=[
        Sample("connections", 429, K.THROTTLED, problem(429, "Too Many Requests"), wait=None),
        Sample("at the edge", 403, K.THROTTLED, "<html>Access Denied</html>", wait=None),
        Sample("at the edge, 429", 429, K.THROTTLED, "<html></html>"),
    ],
    refused=[
        Sample("disabled", 403, K.PERMANENT, problem(403, "User Disabled")),
        Sample("data centre", 403, K.PERMANENT, problem(403, "Wrong Datacenter")),
        Sample(
            "unsubscribed", 400, K.PERMANENT, problem(400, "Member In Compliance State"), on="POST /3.0/lists/1/members"
        ),
    ],
    expired=[
        Sample("revoked", 401, K.AUTH, problem(401, "API Key Invalid")),
        Sample("metadata", 200, K.AUTH, {"error": "invalid_token"}, on="GET /oauth2/metadata"),
    ],
    no_reset="since_last_changed takes any time",
    others=[
        Sample("there already", 400, K.CONFLICT, problem(400, "Member Exists"), on="POST /3.0/lists/1/members"),
        Sample("fine", 200, None, {"dc": "us6"}, on="GET /oauth2/metadata"),
    ],
    token_errors=[Sample("code", 400, K.AUTH, {"error": "invalid_grant"})],
    pages=[
        Pages(
            "list",
            PageRequest("https://us6.api.mailchimp.com/3.0/lists/1/members"),
            [
                Page("count=1000", {"members": [1, 2], "total_items": 3}),
                Page("offset=2", {"members": [3], "total_items": 3}),
            ],
            items=3,
        ),
    ],
    hooks=[Hook("agreed", b"type=subscribe", {}, url="https://hooks.example.com/in?secret=agreed")],
)
