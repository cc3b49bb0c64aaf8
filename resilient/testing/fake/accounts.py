"""Accounts at a fake provider, and their tokens: issued, rotated, expired, revoked as the provider's facts say."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from resilient.core.auth import ApiKey, Basic, Bearer, OAuth2, Rotation

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from resilient.core.provider import Provider


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

    ``family``: of its latest consent; ``revoked``: it has nothing that is good.
    """

    name: str
    family: Family = field(default_factory=Family, repr=False)
    access: Token | None = field(default=None, repr=False)
    refresh: Token | None = field(default=None, repr=False)
    user: str = ""
    secret: str = field(default="", repr=False)  # a key or password it never changes
    kind: str = "token"  # what that is
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
        """What ``app.connections.import_`` takes."""
        expires_at = None if self.access is None else self.access.expires_at
        return {"access_token": self.access_token, "refresh_token": self.refresh_token, "expires_at": expires_at}

    @property
    def key(self) -> dict[str, str]:
        """What ``app.connections.add`` takes, where the provider has no OAuth."""
        if self.user:
            return {"user": self.user, "password": self.secret}
        return {self.kind: self.secret}


class Accounts:
    """All of them. ``serial`` numbers make tokens of a run the same in the next run."""

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
        """Tokens for a refresh token, which the caller found good."""
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

        One that was rotated away and comes again was stolen, or its thief rotated it: nobody can tell which, so nothing
        of its consent is good any more (RFC 9700, 4.14.2).
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
        """One that was issued."""
        return self._tokens.get(f"refresh:{text}")

    def revoke_token(self, text: str) -> None:
        """By the client itself (RFC 7009): everything that came of the same consent."""
        token = self._tokens.get(f"refresh:{text}") or self._tokens.get(f"access:{text}")
        if token is not None:
            self._end_family(token)

    def revoke(self, account: Account) -> None:
        """Its grants are gone, and stay so whatever is consented to later."""
        account.revoked = True
        for token in self._tokens.values():
            if token.account is account:
                token.family.revoked = True

    def _end_family(self, token: Token) -> None:
        token.family.revoked = True
        if token.family is token.account.family:
            token.account.revoked = True

    def expire(self, account: Account, now: datetime) -> None:
        """Its access tokens are over, its refresh token is well."""
        for token in self._tokens.values():
            if token.account is account and token.text.startswith("access"):
                token.expires_at = now

    def bearer(
        self, headers: Mapping[str, str], query: Mapping[str, str], now: datetime
    ) -> tuple[Account | None, bool]:
        """Whose credentials a request carries, and whether they are good."""
        known: Account | None = None
        for text in self._carried(headers, query):
            token = self._tokens.get(f"access:{text}")
            if token is not None:
                known = token.account
                if not token.family.revoked and (token.expires_at is None or now < token.expires_at):
                    return known, True
            for account in self.by_name.values():
                if account.secret and text in (account.secret, f"{account.user}\0{account.secret}"):
                    return account, not account.revoked
        return known, False

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

    def _carried(self, headers: Mapping[str, str], query: Mapping[str, str]) -> list[str]:
        """Every text in the request that could be a token."""
        found = []
        for auth in (*self.provider.auth, Bearer()):
            sends = auth.sends if isinstance(auth, OAuth2) else auth
            if isinstance(sends, Basic):
                found.append(_user_and_password(headers.get("authorization", "")))
            elif isinstance(sends, ApiKey) and sends.query:
                found.append(query.get(sends.query, ""))
            else:
                value = headers.get(sends.header.lower(), "")
                if value.startswith(sends.prefix):
                    found.append(value.removeprefix(sends.prefix))
        return [text for text in found if text]


def _user_and_password(value: str) -> str:
    import base64  # noqa: PLC0415 - few need it
    import binascii  # noqa: PLC0415

    if not value.startswith("Basic "):
        return ""
    try:
        return base64.b64decode(value.removeprefix("Basic "), validate=True).decode().replace(":", "\0", 1)
    except (binascii.Error, UnicodeDecodeError):
        return ""
