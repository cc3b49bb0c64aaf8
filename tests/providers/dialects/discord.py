"""Answers of Discord."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import NOW, Dialect, Hook, Page, Pages, Sample


def limited(wait, *, everywhere=False):
    return {"message": "You are being rate limited.", "retry_after": wait, "global": everywhere}


SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(32))
AT = str(int(NOW.timestamp()) - 3)
BODY = b'{"type":1}'
ON = "GET /api/v10/channels/41771983423143937/messages"
KEY = "channels:41771983423143937"
DIALECT = Dialect(
    throttled=[
        Sample(
            "one route",
            429,
            K.THROTTLED,
            limited(1.336),
            {"Retry-After": "2", "X-RateLimit-Scope": "user"},
            on=ON,
            key=KEY,
            scope=Scope.ENDPOINT,
            wait=1.336,
        ),
        Sample(
            "all routes",
            429,
            K.THROTTLED,
            limited(64.57, everywhere=True),
            {"Retry-After": "65", "X-RateLimit-Global": "true"},
            on=ON,
            wait=64.57,
        ),
        Sample("no body", 429, K.THROTTLED, {}, {"Retry-After": "3"}, on=ON, scope=Scope.ENDPOINT, wait=3),
        Sample(
            "banned", 429, K.QUOTA, "<html>error 1015</html>", {"Retry-After": "4000"}, scope=Scope.PROVIDER, wait=4000
        ),
        Sample("banned, told nothing", 429, K.QUOTA, "<html>error 1015</html>", scope=Scope.PROVIDER, wait=600),
    ],
    refused=[
        Sample(
            "permission",
            403,
            K.PERMANENT,
            {"code": 50013, "message": "Missing Permissions"},
            {"X-RateLimit-Remaining": "4", "X-RateLimit-Reset-After": "1.5"},
        ),
        Sample("unknown", 404, K.PERMANENT, {"code": 10003, "message": "Unknown Channel"}),
    ],
    expired=[Sample("expired", 401, K.AUTH, {"code": 0, "message": "401: Unauthorized"})],
    no_reset="ids do not expire",
    dead_grant=[Sample("revoked", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "messages",
            PageRequest("https://discord.com/api/v10/channels/1/messages?limit=2"),
            [
                Page("limit=2", [{"id": "9"}, {"id": "8"}]),
                Page("before=8", [{"id": "7"}]),
            ],
            items=3,
        ),
    ],
    hooks=[
        Hook(
            SIGNER.public_key().public_bytes_raw().hex(),
            BODY,
            {"X-Signature-Ed25519": SIGNER.sign(AT.encode() + BODY).hex(), "X-Signature-Timestamp": AT},
        )
    ],
)
