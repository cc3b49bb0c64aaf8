"""Answers of a Matrix homeserver."""

from resilient import FailureKind as K
from resilient import PageRequest
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample, Token


def error(code, **more):
    return {"errcode": code, "error": "...", **more}


SEND = "PUT /_matrix/client/v3/rooms/!a:b/send/m.room.message/txn1"
DIALECT = Dialect(
    throttled=[
        Sample(
            "told",
            429,
            K.THROTTLED,
            error("M_LIMIT_EXCEEDED", retry_after_ms=1820),
            {"Retry-After": "2"},
            on=SEND,
            key="send",
            wait=1.82,
        ),
        Sample("header", 429, K.THROTTLED, error("M_LIMIT_EXCEEDED"), {"Retry-After": "4"}, wait=4),
        Sample("resources", 403, K.QUOTA, error("M_RESOURCE_LIMIT_EXCEEDED"), wait=3600),
    ],
    refused=[
        Sample("forbidden", 403, K.PERMANENT, error("M_FORBIDDEN")),
        Sample("guest", 403, K.PERMANENT, error("M_GUEST_ACCESS_FORBIDDEN")),
    ],
    expired=[Sample("expired", 401, K.AUTH, error("M_UNKNOWN_TOKEN", soft_logout=True))],
    no_reset="a gap is told by limited: true within a good answer",
    others=[Sample("sent, but lost", 502, K.TRANSIENT, "", on=SEND)],
    dead_grant=[
        Sample("logged out", 401, K.AUTH, error("M_UNKNOWN_TOKEN")),
        Sample("used up", 403, K.AUTH, error("M_FORBIDDEN")),  # Synapse, of a refresh token that was used before
    ],
    tokens=[
        Token("in milliseconds", {"access_token": "a", "refresh_token": "r", "expires_in_ms": 300000}, "a", "r", 300)
    ],
    pages=[
        Pages(
            "messages",
            PageRequest("https://matrix.example/_matrix/client/v3/rooms/!a:b/messages?dir=b"),
            [
                Page("limit=100", {"chunk": [1], "start": "s", "end": "e"}),
                Page("from=e", {"chunk": [], "start": "e"}),
            ],
            items=1,
        ),
        Pages(
            "sync",
            PageRequest("https://matrix.example/_matrix/client/v3/sync?since=s1"),
            [
                Page(
                    "since=s1",
                    {
                        "next_batch": "s2",
                        "rooms": {
                            "join": {
                                "!a:example.org": {"timeline": {"events": [1, 2], "limited": False}},
                                "!b:example.org": {"timeline": {"events": [3]}},
                            }
                        },
                    },
                ),
            ],
            items=3,
        ),
        Pages(
            "sync",
            PageRequest("https://matrix.example/_matrix/client/v3/sync?since=s2"),
            [Page("since=s2", {"next_batch": "s3"})],
            items=0,
        ),
        Pages(
            "sync",
            PageRequest("https://matrix.example/_matrix/client/v3/sync?since=s1"),
            [Page("since=s1", {"rooms": {"join": {"!a:example.org": {"timeline": {"events": [1, 2]}}}}})],
            items=2,
            changes={"items": "rooms.join['!a:example.org'].timeline.events"},
        ),
    ],
    hooks=[Hook("hs-token", b'{"events":[]}', {"Authorization": "Bearer hs-token"})],
)
