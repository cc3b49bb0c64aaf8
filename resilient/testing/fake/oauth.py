"""The OAuth endpoints of a fake provider: consent, token, refresh, revocation, in the provider's own dialect.

What a client gets wrong here is refused as strictly as RFC 6749, 7009 and 7636 allow: a code works once, with its
redirect URI and its verifier. Consent is given at once, or refused where the script says so.
"""

from __future__ import annotations

import base64
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote_plus, urlencode, urlsplit

from authlib.oauth2.rfc7636 import create_s256_code_challenge  # type: ignore[import-untyped]

from resilient.core.body import pick
from resilient.core.failure import FailureKind, Scope
from resilient.core.retry_after import STANDARD
from resilient.core.token_answer import classify_token
from resilient.testing.fake.answers import Voice, compose
from resilient.testing.fake.log import Reply
from resilient.testing.fake.shapes import put

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from resilient.core.auth import OAuth2
    from resilient.testing.fake.accounts import Account, Accounts
    from resilient.testing.fake.log import Seen

_JWT: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"


@dataclass(frozen=True, slots=True)
class _Consent:
    """What waits behind a code."""

    account: str
    redirect_uri: str
    challenge: str


class TokenServer:
    """One per fake. ``next_account``: who consents next; ``denied``: the error consent is refused with."""

    def __init__(self, accounts: Accounts, oauth: OAuth2, origin: str) -> None:
        self._accounts, self.oauth, self._origin = accounts, oauth, origin
        self._codes: dict[str, _Consent] = {}
        self._serial = itertools.count(1)
        self.next_account = "account"
        self.denied = ""
        self.paths = {
            urlsplit(url).path: what
            for url, what in (
                (oauth.authorize_url, "authorize"), (oauth.token_url, "token"), (oauth.refresh_url, "token"),
                (oauth.revoke_url, "revoke"),
            )
            if url
        }  # fmt: skip

    def answer(self, what: str, seen: Seen, now: datetime) -> Reply:
        """One request to an endpoint of ours."""
        if what == "authorize":
            return self._authorize(seen.query)
        fields = self._fields(seen)
        if not self._client_is_known(seen, fields):
            return self.refusal(now, scope=Scope.PROVIDER)
        if what == "revoke":
            self._accounts.revoke_token(fields.get("token", ""))
            return Reply(200, {})
        account = self._granted(fields, now)
        if account is None:
            return self.refusal(now)
        seen.account = account.name
        return Reply(200, self._tokens(account, fields), {"cache-control": "no-store"})

    def refusal(self, now: datetime, scope: Scope = Scope.ACCOUNT) -> Reply:
        """A grant that is dead, or, at the provider's scope, an application that is refused."""
        usual = "invalid_grant" if scope is Scope.ACCOUNT else "invalid_client"
        rules = [
            r for r in self.oauth.errors.rules if r.kind is FailureKind.AUTH and (r.scope or Scope.ACCOUNT) is scope
        ]
        own = [code for r in rules for code in ((r.code,) if isinstance(r.code, str) else r.code) if "*" not in code]
        reply, _ = compose(self.voice(now), FailureKind.AUTH, scope=scope, code=own[0] if own else usual)
        return reply

    def voice(self, now: datetime) -> Voice:
        """The token endpoint's dialect."""
        return Voice(
            self.oauth.errors, STANDARD, lambda answer: classify_token(answer, self.oauth, now), now, refused=(400, 401)
        )

    # -- consent ---------------------------------------------------------------------------------------------

    def _authorize(self, query: Mapping[str, str]) -> Reply:
        redirect_uri, state = query.get("redirect_uri", ""), query.get("state", "")
        if query.get("client_id") != self.oauth.client_id or not redirect_uri:
            return Reply(400, "<html><h1>Unknown application</h1></html>")
        challenge = query.get("code_challenge", "")
        error = self.denied or ("invalid_request" if self.oauth.pkce == "required" and not challenge else "")
        given: dict[str, str] = {"state": state}
        if error:
            given["error"] = error
        else:
            code = f"code-{next(self._serial)}"
            self._codes[code] = _Consent(self.next_account, redirect_uri, challenge)
            account = self._accounts.by_name.get(self.next_account)
            kept = {} if account is None else account.kept
            given |= {"code": code, **{name: kept.get(name, f"{name}-1") for name in self.oauth.keep_callback}}
        return Reply(302, None, {"location": f"{redirect_uri}{'&' if '?' in redirect_uri else '?'}{urlencode(given)}"})

    # -- tokens ----------------------------------------------------------------------------------------------

    def _fields(self, seen: Seen) -> dict[str, str]:
        if self.oauth.body == "json" and isinstance(seen.json, dict):
            return {str(name): str(value) for name, value in seen.json.items()}
        return dict(parse_qsl(seen.body.decode("utf-8", "replace"), keep_blank_values=True))

    def _client_is_known(self, seen: Seen, fields: Mapping[str, str]) -> bool:
        oauth = self.oauth
        if fields.get("grant_type") == _JWT:
            return bool(fields.get("assertion"))
        if oauth.client_auth == "basic":
            user, password = _basic(seen.headers.get("authorization", ""))
            return (user, password) == (oauth.client_id, oauth.client_secret)
        if oauth.client_auth == "jwt":
            return bool(fields.get("client_assertion"))
        if oauth.client_auth == "none":
            return fields.get("client_id", oauth.client_id) == oauth.client_id
        given = fields.get("client_id"), fields.get("client_secret", "")
        return given == (oauth.client_id, oauth.client_secret)

    def _granted(self, fields: Mapping[str, str], now: datetime) -> Account | None:
        grant = fields.get("grant_type")
        if grant == "refresh_token":
            return self._refreshed(fields.get("refresh_token", ""), now)
        if grant == "authorization_code":
            return self._exchanged(fields, now)
        if grant in ("client_credentials", "account_credentials", _JWT):
            account = self._accounts.by_name.get(self.next_account) or self._accounts.get(self.next_account, now)
            self._accounts.issue(account, now, refreshes=False)
            return account
        return None

    def _refreshed(self, text: str, now: datetime) -> Account | None:
        token = self._accounts.refresh_token(text)
        if token is None or not self._accounts.usable(token, now):
            return None
        self._accounts.renew(token.account, token, now)
        return token.account

    def _exchanged(self, fields: Mapping[str, str], now: datetime) -> Account | None:
        consent = self._codes.pop(fields.get("code", ""), None)
        if consent is None or consent.redirect_uri != fields.get("redirect_uri"):
            return None
        if consent.challenge and create_s256_code_challenge(fields.get("code_verifier", "")) != consent.challenge:
            return None
        account = self._accounts.get(consent.account, now)
        self._accounts.issue(account, now)
        return account

    def _tokens(self, account: Account, fields: Mapping[str, str]) -> Any:
        oauth, seconds = self.oauth, self._accounts.seconds(account)
        body = put({}, oauth.success[0], account.access_token)
        body["token_type"] = "Bearer"  # noqa: S105 - RFC 6749, 7.1
        if seconds is not None and account.access is not None:
            body = put(body, oauth.lifetime_field, int(seconds / oauth.lifetime_unit))
        kept = oauth.rotation.value == "none" and fields.get("grant_type") == "refresh_token"
        if account.refresh is not None and oauth.refreshes and not kept:
            body["refresh_token"] = account.refresh.text
            if oauth.refresh_lifetime is not None and oauth.refresh_lifetime_field:
                body = put(body, oauth.refresh_lifetime_field, int(oauth.refresh_lifetime))
        if oauth.early_field and seconds is not None:
            body = put(body, oauth.early_field, int(seconds / 2))
        for path in oauth.keep:
            if not pick(body, path):
                body = put(body, path, account.kept.get(path, self._kept(path, account)))
        if oauth.errors.code and any(rule.fits_status(200) for rule in oauth.errors.rules):
            body.setdefault("ok", True)
        return body

    def _kept(self, path: str, account: Account) -> str:
        return self._origin if path.endswith("url") else f"{path.rpartition('.')[2]}-of-{account.name}"


def _basic(value: str) -> tuple[str, str]:
    """User and password; RFC 6749, 2.3.1 has them encoded like a form's fields."""
    try:
        text = base64.b64decode(value.removeprefix("Basic ")).decode()
    except ValueError:
        return "", ""
    user, _, password = text.partition(":")
    return unquote_plus(user), unquote_plus(password)
