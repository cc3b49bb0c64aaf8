"""Answers of Twilio."""

from resilient import FailureKind as K
from resilient import PageRequest
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample

DIALECT = Dialect(
    throttled=[
        Sample(
            "concurrency",
            429,
            K.THROTTLED,
            {"code": 20429, "message": "Too Many Requests", "status": 429},
            on="POST /2010-04-01/Accounts/AC1/Messages.json",
            wait=None,
        ),
        Sample("of one product", 429, K.THROTTLED, {"code": 25109, "message": "Rate limit exceeded"}),
        Sample(
            "of another",
            429,
            K.THROTTLED,
            {"code": 25021, "message": "Too many requests"},
            {"Retry-After": "3"},
            wait=3,
        ),
        Sample("without JSON", 429, K.THROTTLED, "Too Many Requests"),
    ],
    refused=[
        Sample(
            "tries", 429, K.PERMANENT, {"code": 60203, "message": "Max send attempts reached"}, on="POST /v2/Services/1"
        ),
        Sample("permission", 403, K.PERMANENT, {"code": 20403, "message": "Forbidden"}),
        Sample("number", 400, K.PERMANENT, {"code": 21211}, on="POST /2010-04-01/Accounts/AC1/Messages.json"),
    ],
    expired=[Sample("refused", 401, K.AUTH, {"code": 20003, "message": "Authenticate"})],
    no_reset="filters by day, no cursor",
    others=[
        Sample("a message that got lost", 502, K.AMBIGUOUS, "", on="POST /2010-04-01/Accounts/AC1/Messages.json"),
    ],
    pages=[
        Pages(
            "list",
            PageRequest("https://api.twilio.com/2010-04-01/Accounts/AC1/Messages.json"),
            [
                Page(
                    "PageSize=1000",
                    {"messages": [1], "next_page_uri": "/2010-04-01/Accounts/AC1/Messages.json?Page=1&PageToken=t"},
                ),
                Page("PageToken=t", {"messages": [2], "next_page_uri": None}),
            ],
            items=2,
        ),
        Pages(
            "meta",
            PageRequest("https://verify.twilio.com/v2/Services"),
            [
                Page(
                    "PageSize=100",
                    {"services": [1], "meta": {"next_page_url": "https://verify.twilio.com/v2/Services?Page=1"}},
                ),
                Page("Page=1", {"services": [], "meta": {"next_page_url": None}}),
            ],
            items=1,
        ),
    ],
    hooks=[  # the example of Twilio's own documentation
        Hook(
            "12345",
            b"CallSid=CA1234567890ABCDE&Caller=%2B14158675309&Digits=1234&From=%2B14158675309&To=%2B18005551212",
            {"X-Twilio-Signature": "RSOYDt4T1cUTdK1PDd93/VVr8B8=", "Content-Type": "application/x-www-form-urlencoded"},
            url="https://mycompany.com/myapp.php?foo=1&bar=2",
        ),
        Hook(  # both of twilio-python's own tests
            "12345",
            b'{"property": "value", "boolean": true}',
            {"X-Twilio-Signature": "a9nBmqA0ju/hNViExpshrM61xv4=", "Content-Type": "application/json"},
            url="https://mycompany.com/myapp.php?foo=1&bar=2"
            "&bodySHA256=0a1ff7634d9ab3b95db5c9a2dfe9416e41502b283a80c7cf19632632f96e6620",
        ),
    ],
)
