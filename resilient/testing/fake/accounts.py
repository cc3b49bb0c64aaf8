"""Accounts at a fake provider, their tokens, and the OAuth endpoints that issue the tokens, as the facts say.

`Accounts` issues, rotates, expires and revokes. `TokenServer` answers consent, token, refresh and revocation in the
provider's own dialect. What a client gets wrong there is refused as strictly as RFC 6749, 7009 and 7636 allow: a code
works once, with its redirect URI and its verifier. Consent is given at once, or refused where the script says so.
"""

from __future__ import annotations

import base64
import itertools
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote_plus, urlencode, urlsplit

from authlib.oauth2.rfc7636 import create_s256_code_challenge  # type: ignore[import-untyped]

from resilient.core.accounts.tokens import classify_token
from resilient.core.base.body import pick
from resilient.core.base.errors import FailureKind, Scope
from resilient.core.gates.retry_after import STANDARD
from resilient.core.provider.auth import ApiKey, Basic, Bearer, OAuth2, Rotation
from resilient.testing.fake.answers import ErrorDialect, compose, put
from resilient.testing.fake.server import Reply

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from resilient.core.provider.facts import Provider
    from resilient.testing.fake.server import Seen


@dataclass(slots=True, eq=False)
class Family:
    """All tokens that came of one consent, by refreshing it."""

    revoked: bool = False


@dataclass(slots=True, eq=False)
class Token:
    """One token. ``used_at``: a refresh token's first use; ``successor``: the one that came of it."""

    text: str = field(repr=False)
    account: Account = field(repr=False)
    family: Family
    expires_at: datetime | None = None
    used_at: datetime | None = None
    successor: Token | None = field(default=None, repr=False)


@dataclass(slots=True, eq=False)
class Account:
    """One customer's account. ``refreshes``: how often its tokens were renewed; ``kept``: see `OAuth2.keep`.

    ``family``: that of its latest consent; ``revoked``: none of its credentials is valid.
    """

    name: str
    family: Family = field(default_factory=Family, repr=False)
    access: Token | None = field(default=None, repr=False)
    refresh: Token | None = field(default=None, repr=False)
    user: str = ""
    secret: str = field(default="", repr=False)  # a key or password that never changes
    kind: str = "token"  # of ``secret``, as `connections.add` names it
    refreshes: int = 0
    revoked: bool = False
    kept: dict[str, str] = field(default_factory=dict)
    lifetime: float | None = None  # seconds of the access tokens issued from now on; None: the provider's

    @property
    def access_token(self) -> str:
        """The access token issued last."""
        return "" if self.access is None else self.access.text

    @property
    def refresh_token(self) -> str:
        """The refresh token issued last."""
        return "" if self.refresh is None else self.refresh.text

    @property
    def tokens(self) -> dict[str, Any]:
        """The arguments of ``app.connections.import_``."""
        expires_at = None if self.access is None else self.access.expires_at
        return {"access_token": self.access_token, "refresh_token": self.refresh_token, "expires_at": expires_at}

    @property
    def key(self) -> dict[str, str]:
        """The arguments of ``app.connections.add``, where the provider has no OAuth."""
        if self.user:
            return {"user": self.user, "password": self.secret}
        return {self.kind: self.secret}


class Accounts:
    """Every account of a fake. Tokens are numbered, so each run issues the same ones."""

    def __init__(self, provider: Provider, lifetime: float | None) -> None:
        self.provider = provider
        self.lifetime = lifetime
        self.by_name: dict[str, Account] = {}
        self._tokens: dict[str, Token] = {}
        self._serial = itertools.count(1)

    def get(self, name: str, now: datetime) -> Account:
        """An account with tokens, made if it is new."""
        if name not in self.by_name:
            account = self.by_name[name] = Account(name)
            if self.provider.oauth is not None:
                self.issue(account, now)
            else:
                self._give_key(account)
        return self.by_name[name]

    def issue(self, account: Account, now: datetime, *, refreshes: bool = True) -> None:
        """New tokens, as after a consent."""
        oauth = self.provider.oauth
        account.family = Family()
        account.access = self._token("access", account, account.family, self._end(account, now))
        if refreshes and oauth is not None and oauth.refreshes:
            account.refresh = self._token("refresh", account, account.family, None)
        account.revoked = False

    def renew(self, account: Account, old: Token, now: datetime) -> None:
        """Issue tokens for a refresh token; the caller has checked it."""
        oauth = self.provider.oauth
        assert oauth is not None  # noqa: S101 - who has no OAuth has no refresh tokens
        first = old.used_at is None
        old.used_at = old.used_at or now
        account.refreshes += 1
        account.access = self._token("access", account, old.family, self._end(account, now))
        if oauth.rotation is Rotation.NONE:
            return
        if first or old.successor is None:
            old.successor = self._token("refresh", account, old.family, None)
        account.refresh = old.successor

    def usable(self, token: Token, now: datetime) -> bool:
        """Whether a refresh token still gives tokens.

        A used one that comes again was copied: either the client or the thief uses the copy. So all tokens of its
        consent are revoked (RFC 9700, 4.14.2).
        """
        if token.family.revoked:
            return False
        if token.used_at is None or self._replayable(token, token.used_at, now):
            return True
        self._end_family(token)
        return False

    def _replayable(self, token: Token, used_at: datetime, now: datetime) -> bool:
        oauth = self.provider.oauth
        if oauth is None or oauth.rotation is Rotation.SINGLE_USE:
            return False
        if oauth.rotation is not Rotation.GRACE:
            return True
        if oauth.grace is None:  # until its successor is used
            return token.successor is None or token.successor.used_at is None
        return now <= used_at + timedelta(seconds=oauth.grace)

    def refresh_token(self, text: str) -> Token | None:
        """The refresh token with this text; None if none was issued."""
        return self._tokens.get(f"refresh:{text}")

    def revoke_token(self, text: str) -> None:
        """Revoke, for the client (RFC 7009), all tokens of the same consent."""
        token = self._tokens.get(f"refresh:{text}") or self._tokens.get(f"access:{text}")
        if token is not None:
            self._end_family(token)

    def revoke(self, account: Account) -> None:
        """Revoke every token of an account; a later consent makes none of them good again."""
        account.revoked = True
        for token in self._tokens.values():
            if token.account is account:
                token.family.revoked = True

    def _end_family(self, token: Token) -> None:
        token.family.revoked = True
        if token.family is token.account.family:
            token.account.revoked = True

    def expire(self, account: Account, now: datetime) -> None:
        """End the access tokens of an account; its refresh token stays good."""
        for token in self._tokens.values():
            if token.account is account and token.text.startswith("access"):
                token.expires_at = now

    def bearer(
        self, headers: Mapping[str, str], query: Mapping[str, str], now: datetime
    ) -> tuple[Account | None, Family | None, bool]:
        """Whose credentials a request carries, of which consent, and whether they are good."""
        owner: Account | None = None
        family: Family | None = None
        for text in self._credentials_in(headers, query):
            token = self._tokens.get(f"access:{text}")
            if token is not None:
                owner, family = token.account, token.family
                if not family.revoked and (token.expires_at is None or now < token.expires_at):
                    return owner, family, True
            for account in self.by_name.values():
                if account.secret and text in (account.secret, f"{account.user}\0{account.secret}"):
                    return account, account.family, not account.revoked
        return owner, family, False

    # -- inside ----------------------------------------------------------------------------------------------

    def _token(self, what: str, account: Account, family: Family, expires_at: datetime | None) -> Token:
        token = Token(f"{what}-{next(self._serial)}-of-{account.name}", account, family, expires_at)
        self._tokens[f"{what}:{token.text}"] = token
        return token

    def _end(self, account: Account, now: datetime) -> datetime | None:
        seconds = self.seconds(account)
        return None if seconds is None else now + timedelta(seconds=seconds)

    def seconds(self, account: Account) -> float | None:
        """How long an access token issued now lasts; None: for ever."""
        oauth = self.provider.oauth
        if account.lifetime is not None:
            return account.lifetime
        if self.lifetime is not None or oauth is None:
            return self.lifetime
        return oauth.lifetime or (max(3600.0, 6 * oauth.margin) if oauth.refreshes else None)

    def _give_key(self, account: Account) -> None:
        account.secret = f"key-{next(self._serial)}-of-{account.name}"
        if any(isinstance(one, Basic) for one in self.provider.auth):
            account.user = f"user-of-{account.name}"
        elif any(isinstance(one, ApiKey) for one in self.provider.auth):
            account.kind = "api_key"

    def _credentials_in(self, headers: Mapping[str, str], query: Mapping[str, str]) -> list[str]:
        """Every text in the request that could be a token."""
        texts = []
        for auth in (*self.provider.auth, Bearer()):
            sends = auth.sends if isinstance(auth, OAuth2) else auth
            if isinstance(sends, Basic):
                texts.append(_user_and_password(headers.get("authorization", "")))
            elif isinstance(sends, ApiKey) and sends.query:
                texts.append(query.get(sends.query, ""))
            else:
                value = headers.get(sends.header.lower(), "")
                if value.startswith(sends.prefix):
                    texts.append(value.removeprefix(sends.prefix))
        return [text for text in texts if text]


def _user_and_password(value: str) -> str:
    if not value.startswith("Basic "):
        return ""
    try:
        return base64.b64decode(value.removeprefix("Basic "), validate=True).decode().replace(":", "\0", 1)
    except ValueError:  # no base64, no UTF-8, or a character beyond ASCII
        return ""


_JWT: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"


@dataclass(frozen=True, slots=True)
class _Consent:
    """What a code stands for until it is exchanged."""

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

    def answer(self, what: str, request: Seen, now: datetime) -> Reply:
        """The answer to one request of an OAuth endpoint."""
        if what == "authorize":
            return self._authorize(request.query)
        fields = self._fields(request)
        if not self._client_is_known(request, fields):
            return self.refusal(now, scope=Scope.PROVIDER)
        if what == "revoke":
            self._accounts.revoke_token(fields.get("token", ""))
            return Reply(200, {})
        account = self._grant(fields, now)
        if account is None:
            return self.refusal(now)
        request.account = account.name
        return Reply(200, self._tokens(account, fields), {"cache-control": "no-store"})

    def refusal(self, now: datetime, scope: Scope = Scope.ACCOUNT) -> Reply:
        """The refusal of a dead grant; with the provider's scope, that of an unknown application."""
        usual = "invalid_grant" if scope is Scope.ACCOUNT else "invalid_client"
        rules = [
            r for r in self.oauth.errors.rules if r.kind is FailureKind.AUTH and (r.scope or Scope.ACCOUNT) is scope
        ]
        own = [code for r in rules for code in ((r.code,) if isinstance(r.code, str) else r.code) if "*" not in code]
        reply, _ = compose(self.dialect(now), FailureKind.AUTH, scope=scope, code=own[0] if own else usual)
        return reply

    def dialect(self, now: datetime) -> ErrorDialect:
        """The token endpoint's dialect."""
        return ErrorDialect(
            self.oauth.errors, STANDARD, lambda answer: classify_token(answer, self.oauth, now), now, refused=(400, 401)
        )

    # -- consent ---------------------------------------------------------------------------------------------

    def _authorize(self, query: Mapping[str, str]) -> Reply:
        redirect_uri, state = query.get("redirect_uri", ""), query.get("state", "")
        if query.get("client_id") != self.oauth.client_id or not redirect_uri:
            return Reply(400, "<html><h1>Unknown application</h1></html>")
        challenge = query.get("code_challenge", "")
        error = self.denied or ("invalid_request" if self.oauth.pkce == "required" and not challenge else "")
        answer: dict[str, str] = {"state": state}
        if error:
            answer["error"] = error
        else:
            code = f"code-{next(self._serial)}"
            self._codes[code] = _Consent(self.next_account, redirect_uri, challenge)
            account = self._accounts.by_name.get(self.next_account)
            kept = {} if account is None else account.kept
            answer |= {"code": code, **{name: kept.get(name, f"{name}-1") for name in self.oauth.keep_callback}}
        return Reply(302, None, {"location": f"{redirect_uri}{'&' if '?' in redirect_uri else '?'}{urlencode(answer)}"})

    # -- tokens ----------------------------------------------------------------------------------------------

    def _fields(self, request: Seen) -> dict[str, str]:
        if self.oauth.body == "json" and isinstance(request.json, dict):
            return {str(name): str(value) for name, value in request.json.items()}
        return dict(parse_qsl(request.body.decode("utf-8", "replace"), keep_blank_values=True))

    def _client_is_known(self, request: Seen, fields: Mapping[str, str]) -> bool:
        oauth = self.oauth
        if fields.get("grant_type") == _JWT:
            return bool(fields.get("assertion"))
        if oauth.client_auth == "basic":
            user, password = _basic(request.headers.get("authorization", ""))
            return (user, password) == (oauth.client_id, oauth.client_secret)
        if oauth.client_auth == "jwt":
            return bool(fields.get("client_assertion"))
        if oauth.client_auth == "none":
            return fields.get("client_id", oauth.client_id) == oauth.client_id
        client = fields.get("client_id"), fields.get("client_secret", "")
        return client == (oauth.client_id, oauth.client_secret)

    def _grant(self, fields: Mapping[str, str], now: datetime) -> Account | None:
        grant = fields.get("grant_type")
        if grant == "refresh_token":
            return self._refresh(fields.get("refresh_token", ""), now)
        if grant == "authorization_code":
            return self._exchange(fields, now)
        if grant in ("client_credentials", "account_credentials", _JWT):
            account = self._accounts.by_name.get(self.next_account) or self._accounts.get(self.next_account, now)
            self._accounts.issue(account, now, refreshes=False)
            return account
        return None

    def _refresh(self, text: str, now: datetime) -> Account | None:
        token = self._accounts.refresh_token(text)
        if token is None or not self._accounts.usable(token, now):
            return None
        self._accounts.renew(token.account, token, now)
        return token.account

    def _exchange(self, fields: Mapping[str, str], now: datetime) -> Account | None:
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
                body = put(body, path, account.kept.get(path, self._default_of(path, account)))
        if oauth.errors.code and any(rule.fits_status(200) for rule in oauth.errors.rules):
            body.setdefault("ok", True)
        return body

    def _default_of(self, path: str, account: Account) -> str:
        return self._origin if path.endswith("url") else f"{path.rpartition('.')[2]}-of-{account.name}"


def _basic(value: str) -> tuple[str, str]:
    """User and password; RFC 6749, 2.3.1 has them encoded like a form's fields."""
    try:
        text = base64.b64decode(value.removeprefix("Basic ")).decode()
    except ValueError:
        return "", ""
    user, _, password = text.partition(":")
    return unquote_plus(user), unquote_plus(password)
