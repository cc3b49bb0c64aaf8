"""How credentials of one API are got, kept fresh and sent: facts only, no tokens.

A rotated refresh token is the dangerous part: where the old one dies with its use, an answer lost on the way
costs the connection, so `Rotation` says what may be tried again. Errors of the token endpoint have a dialect
like the API's own (`Errors`); the codes of RFC 6749, 5.2, apply after the provider's rules. In both, `AUTH` means a
dead grant (of this account), and `AUTH` with `Scope.PROVIDER` that the application itself is refused.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from resilient.core.base.errors import InvalidInput
from resilient.core.base.hosts import origin_of, without_secrets
from resilient.core.base.misfit import check_number, check_paths, check_texts, check_word, explained_class
from resilient.core.provider.placeholders import at_origin, check_placeholders, fill_url, names_a_host, prefix_of
from resilient.core.provider.rules import NONE, Errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.core.gates.rate_limit import Limit

RFC_CODES: Final = Errors(code=("error",))  # RFC 6749, 5.2
ClientAuth = Literal["post", "basic", "jwt", "none"]
Flow = Literal["authorization_code", "client_credentials", "jwt_bearer"]
Pkce = Literal["required", "supported", "none"]
TokenBody = Literal["form", "json"]
ZeroLifetime = Literal["expired", "endless"]
URLS: Final = ("authorize_url", "token_url", "refresh_url", "revoke_url")
_OF_REFRESHING: Final = ("refresh_url", "refresh_params", "refresh_lifetime", "refresh_lifetime_field")
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class Rotation(StrEnum):
    """What a refresh does to the refresh token that was sent."""

    NONE = "none"  # it stays the same
    OLD_KEPT = "old_kept"  # a new one comes, the old one goes on working
    GRACE = "grace"  # a new one comes, the old one can be replayed for a while: see `OAuth2.grace`
    SINGLE_USE = "single_use"  # it is dead as soon as it was used


_WORDS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "client_auth": ClientAuth,
        "pkce": Pkce,
        "body": TokenBody,
        "zero_lifetime": ZeroLifetime,
        "rotation": Rotation,
    }
)


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """A token the account gives us, sent as ``prefix`` and token in ``header``."""

    kind: Literal["bearer"] = field(init=False, default="bearer")
    header: str = "Authorization"
    prefix: str = "Bearer "

    def headers(self, token: str) -> dict[str, str]:
        """What a request carries."""
        return {self.header: f"{self.prefix}{token}"}


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key the account gives us: ``prefix`` and key in ``header``, or the parameter ``query`` of the URL."""

    kind: Literal["api_key"] = field(init=False, default="api_key")
    header: str = "X-API-Key"
    prefix: str = ""
    query: str = ""

    def headers(self, key: str) -> dict[str, str]:
        """What a request carries; nothing if the key goes into the URL."""
        return {} if self.query else {self.header: f"{self.prefix}{key}"}

    def params(self, key: str) -> dict[str, str]:
        """What a request's URL carries."""
        return {self.query: f"{self.prefix}{key}"} if self.query else {}


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Basic:
    """User and password, as RFC 7617 says. ``user``, ``password``: what the provider calls them, for people."""

    kind: Literal["basic"] = field(init=False, default="basic")
    user: str = "user"
    password: str = "password"  # noqa: S105 - the name of the field a person is asked for

    def headers(self, user: str, password: str) -> dict[str, str]:
        """What a request carries."""
        if ":" in user:
            raise InvalidInput("basic: a user name cannot contain a colon (RFC 7617, 2)")
        text = base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
        return {"Authorization": f"Basic {text}"}


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OAuth2:
    """The OAuth facts of a provider, and with `Provider.configured` the application's client.

    ``authorize_url``, ``token_url``, ``refresh_url`` (where it differs), ``revoke_url``: with
    ``{placeholders}`` they are filled per account. ``authorize_params``, ``token_params``,
    ``refresh_params``: what is added to each request; ``token_headers``: likewise. ``body``: how the token
    endpoint wants to be asked: a ``form`` or ``json``. ``flows``: the ways to a grant it knows; none: tokens come from
    a login of its own, and are only refreshed. ``pkce``: whether a consent is bound by a code of ours (RFC 7636).
    ``refreshes``: whether there are refresh tokens at all.

    ``client_id``, ``client_secret``, ``redirect_uri``, ``scopes``: the application's own. ``client_auth``: how it
    proves itself: id and secret in the ``post``ed body, by HTTP ``basic`` (RFC 6749, 2.3.1), by a ``jwt``, for which
    ``client_secret`` is a private key in PEM (RFC 7523) and ``key_header`` says which (``kid``, ``x5t``), or ``none``:
    the id alone. ``scope_separator``: between scopes. ``offline_scopes``: asked for beside the application's, or there
    is no refresh token. ``refresh_redirect``: the redirect URI is repeated on refresh. ``sends``: how an access token
    is sent.

    ``lifetime``: seconds an access token lasts if the answer does not say (None: until it is refused);
    ``lifetime_field`` and ``lifetime_unit``: where the answer says it, and in how many seconds (0.001: milliseconds).
    ``zero_lifetime``: what a stated 0 means, ``expired`` or ``endless``. ``margin``: seconds before the end at which it
    is refreshed, but not before half of its life; ``early_field``: where the answer itself states when, in seconds from
    now. ``refresh_lifetime``: seconds the refresh token lasts, and ``refresh_lifetime_field``. ``rotation``, and
    ``grace``: seconds for which the old refresh token may be replayed (None with `Rotation.GRACE`: until its successor
    is used).

    ``keep``: paths in the token answer that belong to the connection (Salesforce's ``instance_url``);
    ``keep_callback``: parameters of the callback that do (Intuit's ``realmId``). ``shared``: one grant may serve
    several tenants. ``success``: paths of which one must hold the token. ``errors``: the dialect of the token
    endpoint. The scopes and the id token of its answers are not looked at. ``limits``: its own. ``issuer``: what
    each callback says in ``iss`` (RFC 9207); where it is not stated, an ``iss`` must at least be of the server's
    origin. Raises `InvalidInput`.
    """

    kind: Literal["oauth2"] = field(init=False, default="oauth2")
    authorize_url: str = ""
    token_url: str
    refresh_url: str = ""
    revoke_url: str = ""
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    redirect_uri: str = ""
    scopes: tuple[str, ...] = ()
    scope_separator: str = " "
    offline_scopes: tuple[str, ...] = ()
    flows: tuple[Flow, ...] = ("authorization_code",)
    pkce: Pkce = "none"
    client_auth: ClientAuth = "post"
    key_header: Mapping[str, str] = field(default_factory=lambda: NONE)
    body: TokenBody = "form"
    authorize_params: Mapping[str, str] = field(default_factory=lambda: NONE)
    token_params: Mapping[str, str] = field(default_factory=lambda: NONE)
    refresh_params: Mapping[str, str] = field(default_factory=lambda: NONE)
    token_headers: Mapping[str, str] = field(default_factory=lambda: NONE)
    refresh_redirect: bool = False
    sends: Bearer = Bearer()
    lifetime: float | None = None
    lifetime_field: str = "expires_in"
    lifetime_unit: float = 1.0
    zero_lifetime: ZeroLifetime = "expired"
    margin: float = 300.0
    early_field: str = ""
    refreshes: bool = True  # there are refresh tokens at all
    refresh_lifetime: float | None = None
    refresh_lifetime_field: str = ""
    rotation: Rotation = Rotation.NONE
    grace: float | None = None
    keep: tuple[str, ...] = ()
    keep_callback: tuple[str, ...] = ()
    shared: bool = False
    success: tuple[str, ...] = ("access_token",)
    errors: Errors = RFC_CODES
    limits: Sequence[Limit] = ()
    issuer: str = ""
    guarded: bool = field(default=False, repr=False)  # by `Provider.oauth_for`: only public addresses are asked

    def __post_init__(self) -> None:
        for url in (getattr(self, name) for name in URLS):
            check_placeholders(url)
            if url and not url.startswith(("https://", "{")) and origin_of(url)[1] not in _LOOPBACK:
                raise InvalidInput(f"{without_secrets(url)!r}: secrets are sent there, so it must be https://")
        for name, words in _WORDS.items():
            check_word("OAuth2", name, getattr(self, name), words)
        check_texts("OAuth2", self, "scopes", "offline_scopes", "flows", "keep", "keep_callback", "success")
        for flow in self.flows:
            check_word("OAuth2", "flows", flow, Flow)
        for name in ("lifetime", "lifetime_unit", "refresh_lifetime"):
            check_number("OAuth2", name, getattr(self, name))
        check_number("OAuth2", "margin", self.margin, above=False)
        check_paths("OAuth2", self, "keep", "success", "lifetime_field", "early_field", "refresh_lifetime_field")
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Refuse facts that contradict each other. Raises `InvalidInput`."""
        if not self.token_url:
            raise InvalidInput("OAuth2(token_url=''): say where tokens are asked for")
        if not self.success:
            raise InvalidInput("OAuth2(success=()): say at which path of an answer the token is")
        if self.key_header and self.client_auth != "jwt":
            raise InvalidInput(f"OAuth2(client_auth={self.client_auth!r}): key_header= is for client_auth='jwt'")
        if not self.refreshes and (unused := [name for name in _OF_REFRESHING if getattr(self, name)]):
            raise InvalidInput(f"OAuth2(refreshes=False): there are no refreshes for {', '.join(unused)}")
        if self.grace is not None and (self.rotation is not Rotation.GRACE or self.grace <= 0):
            raise InvalidInput(f"OAuth2(grace={self.grace!r}) needs rotation=Rotation.GRACE and more than 0 s")
        if not self.refreshes and self.rotation is not Rotation.NONE:
            raise InvalidInput("OAuth2(refreshes=False): there is no refresh token that could rotate")

    @property
    def replayable(self) -> bool:
        """Whether a refresh whose answer was lost may be sent again with the same refresh token."""
        return self.rotation is not Rotation.SINGLE_USE

    @property
    def at_tenants(self) -> bool:
        """Whether each account names the host of its token endpoint, before it is filled in: see `filled`."""
        return names_a_host(self.token_url) or names_a_host(self.refresh_url)

    def filled(self, values: Mapping[str, str]) -> Self:
        """These facts with placeholders in the addresses filled. Raises `InvalidInput`."""
        urls: dict[str, Any] = {name: fill_url(getattr(self, name), values) for name in URLS}
        return replace(self, issuer=fill_url(self.issuer, values), **urls)

    def is_issuer(self, iss: str | None) -> bool:
        """Whether a callback may come from this authorization server, by its ``iss`` (RFC 9207, 2.4)."""
        if self.issuer:
            return iss == self.issuer
        if iss is None:
            return True
        try:
            return origin_of(iss) in [origin_of(url) for url in (self.authorize_url, self.token_url) if url]
        except InvalidInput:
            return False

    def moved(self, origin: str) -> Self:
        """These facts on another origin, paths kept: an instance of one's own, or a test server."""
        urls: dict[str, Any] = {name: at_origin(getattr(self, name), origin) for name in URLS}
        return replace(self, guarded=False, **urls)

    def following(self, here: str, there: str) -> Self:
        """These facts, with each address at the origin ``here`` moved to ``there``, paths kept."""
        urls: dict[str, Any] = {
            name: there + url.removeprefix(here) for name in URLS if prefix_of(url := getattr(self, name)) == here
        }
        return replace(self, **urls)

    def scope_text(self) -> str:
        """The scopes to ask for, as the provider writes them."""
        every = dict.fromkeys((*self.scopes, *self.offline_scopes))
        return self.scope_separator.join(every)


Auth = OAuth2 | Bearer | ApiKey | Basic
