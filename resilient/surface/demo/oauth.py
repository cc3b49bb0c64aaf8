"""The demo provider's OAuth server: RFC 6749 with PKCE (RFC 7636), and rotation as strict as it gets.

Access tokens live for seconds, and shorter than they are said to: an engine that only believes the clock would run into
401s, one that only believes 401s would waste requests. A refresh token is good for one use. As at Xero or Linear its
answer is given once more to whoever did not get it (a worker was killed meanwhile); that is counted.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode

from starlette.responses import JSONResponse, RedirectResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

CLIENT_ID: Final = "resilient-demo"  # a public client: PKCE stands in for its secret


@dataclass(slots=True)
class Tokens:
    """What was granted. ``log`` takes one entry for each decision of the token endpoint."""

    told: float
    lives: float
    clock: Callable[[], float]
    log: Callable[[dict[str, Any]], None]
    codes: dict[str, tuple[str, str]] = field(default_factory=dict)  # code -> account, PKCE challenge
    access: dict[str, tuple[str, float]] = field(default_factory=dict)  # token -> account, until
    refresh: dict[str, str] = field(default_factory=dict)  # token -> account
    spent: dict[str, tuple[str, Response]] = field(default_factory=dict)  # token -> account, its answer

    async def authorize(self, request: Request) -> Response:
        """The consent page; whoever looks at it says yes at once. ``account`` is who that is."""
        asked = request.query_params
        if asked.get("client_id") != CLIENT_ID or asked.get("code_challenge_method") != "S256":
            return JSONResponse({"error": "invalid_request"}, status_code=400)
        code = secrets.token_urlsafe()
        self.codes[code] = (asked["account"], asked["code_challenge"])
        self._say("consented", asked["account"])
        return RedirectResponse(f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}", 302)

    async def token(self, request: Request) -> Response:
        """The token endpoint."""
        said = dict(parse_qsl((await request.body()).decode()))
        if said.get("grant_type") == "authorization_code":
            return self._exchange(said)
        token = said.get("refresh_token", "")
        if (account := self.refresh.pop(token, None)) is not None:
            answer = self._granted("refreshed", account)
            self.spent[token] = account, answer
            return answer
        if token in self.spent:
            account, answer = self.spent[token]
            self._say("replayed", account)
            return answer
        return JSONResponse({"error": "invalid_grant"}, status_code=400)

    def _exchange(self, said: dict[str, str]) -> Response:
        account, challenge = self.codes.pop(said.get("code", ""), ("", ""))
        digest = hashlib.sha256(said.get("code_verifier", "").encode()).digest()
        if not account or base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != challenge:
            return JSONResponse({"error": "invalid_grant"}, status_code=400)
        return self._granted("connected", account)

    def _granted(self, decision: str, account: str) -> Response:
        access, refresh = secrets.token_urlsafe(), secrets.token_urlsafe()
        self.access[access] = (account, self.clock() + self.lives)
        self.refresh[refresh] = account
        self._say(decision, account)
        return JSONResponse(
            {"access_token": access, "refresh_token": refresh, "token_type": "bearer", "expires_in": self.told}
        )

    def revoke(self, account: str) -> None:
        """The account's owner takes everything back."""
        for token in [token for token, (whose, _) in self.access.items() if whose == account]:
            del self.access[token]
        for token in [token for token, whose in self.refresh.items() if whose == account]:
            del self.refresh[token]
        self.spent = {token: granted for token, granted in self.spent.items() if granted[0] != account}
        self._say("revoked", account)

    def good(self, authorization: str | None, account: str) -> bool:
        """Whether a request of this account may be answered."""
        whose, until = self.access.get((authorization or "").removeprefix("Bearer "), ("", 0.0))
        return whose == account and self.clock() < until

    def _say(self, decision: str, account: str) -> None:
        self.log({"t": self.clock(), "decision": decision, "account": account})
