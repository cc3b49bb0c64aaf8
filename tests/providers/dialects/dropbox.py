"""Answers of Dropbox."""

import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample


def tagged(reason, wait=None):
    found = {"reason": {".tag": reason}} | ({} if wait is None else {"retry_after": wait})
    return {"error_summary": f"{reason}/...", "error": found}


BODY = b'{"list_folder":{"accounts":["dbid:1"]}}'
DIALECT = Dialect(
    throttled=[
        Sample("by the body", 429, K.THROTTLED, tagged("too_many_requests", 15), wait=15),
        Sample("by the header", 429, K.THROTTLED, "", {"Retry-After": "9"}, wait=9),
        Sample("told nothing", 429, K.THROTTLED, "", wait=5),
        Sample(
            "a locked folder",
            429,
            K.CONFLICT,
            tagged("too_many_write_operations", 1),
            on="POST /2/files/upload",
            wait=1,
        ),
    ],
    refused=[
        Sample("no permission", 403, K.PERMANENT, {"error": {".tag": "invalid_account_type"}}),
        Sample("no such path", 409, K.PERMANENT, {"error_summary": "path/not_found/.", "error": {".tag": "path"}}),
        Sample("no space", 507, K.PERMANENT, ""),
        Sample("wrong call", 400, K.PERMANENT, "Error in call to API function"),
    ],
    expired=[
        Sample("expired", 401, K.AUTH, {"error": {".tag": "expired_access_token"}}),
        Sample("invalid", 401, K.AUTH, {"error": {".tag": "invalid_access_token"}}),
    ],
    reset=[
        Sample(
            "cursor",
            409,
            K.RESET_CURSOR,
            {"error_summary": "reset/...", "error": {".tag": "reset"}},
            on="POST /2/files/list_folder/continue",
        ),
    ],
    others=[
        Sample("overload", 503, K.TRANSIENT, "", {"Retry-After": "4"}, wait=4),
        Sample("a list that got lost", 502, K.TRANSIENT, "", on="POST /2/files/list_folder"),
        Sample("an upload that got lost", 502, K.AMBIGUOUS, "", on="POST /2/files/upload"),
    ],
    dead_grant=[Sample("revoked", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 400, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "list_folder",
            PageRequest("https://api.dropboxapi.com/2/files/list_folder", "POST", {"path": "", "recursive": True}),
            [
                Page("recursive=True", {"entries": [1], "cursor": "c1", "has_more": True}),
                Page("cursor=c1", {"entries": [{".tag": "deleted"}], "cursor": "c2", "has_more": True}),
                Page("/2/files/list_folder/continue", {"entries": [], "cursor": "c3", "has_more": False}),
            ],
            items=2,
            resume="c3",
        ),
    ],
    hooks=[
        Hook("app-secret", BODY, {"X-Dropbox-Signature": hmac.new(b"app-secret", BODY, hashlib.sha256).hexdigest()}),
    ],
)
