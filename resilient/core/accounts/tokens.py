"""Tokens: when to refresh them, what a token endpoint answers, and what follows for the grant.

A grant's state changes only as `TRANSITIONS` says; a transition that is missing there must not happen. `REFRESHING` is
committed before the request, so that a crash leaves it in the row: if it is there after its lease has ended, the
answer may be lost (`UNKNOWN`). Then the refresh is tried again with the stored token. If the provider accepts a token
twice (its replay grace), the grant is well again; if not, its refusal decides. Only the provider's refusal makes a
grant `NEEDS_REAUTH`, never an outage, however long; and if too many grants die at once, not even that (`SUSPECT`, see
`core.accounts.fuse`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.body import pick
from resilient.core.base.bounds import KEPT_VALUE, TOKEN
from resilient.core.base.errors import Failure, FailureKind, Scope
from resilient.core.base.exchange import RequestFacts
from resilient.core.base.misfit import explained_class
from resilient.core.base.phrases import fits_header
from resilient.core.provider.auth import OAuth2, Rotation
from resilient.core.provider.classify import classify
from resilient.core.provider.facts import Provider
from resilient.core.provider.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.base.exchange import AnswerFacts

EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
LEAST_LIFE: Final = 60.0  # seconds; a token whose lifetime is stated as 0 is used for so long
EXCHANGE_TIMEOUT: Final = 20.0  # seconds for the whole exchange with a token endpoint; leases of a refresh are longer
_LARGEST: Final = 10**20  # numbers of an answer are kept below it
_LONGEST: Final = 10 * 366 * 86400.0  # seconds; a token that lives longer has no end
REFRESHING: Final = "refreshing"  # the code of a cooldown that ends with the account's refresh
NOT_CONNECTED: Final = "not_connected"  # an account's gate: it has no credentials
MISSING_KEY: Final = "missing_key"  # code of what a worker leaves to others, because it lacks the account's key
LONGEST_PASSED_OVER: Final = 600.0  # seconds until a worker looks at an account again whose key it lacks
LEFT_LATELY: Final = timedelta(seconds=LONGEST_PASSED_OVER + 300)  # since a worker noted that
UNREADABLE: Final = "unreadable"  # an account's gate: its secrets need a key that is not here, or its row was changed
HOPELESS_TRIES: Final = 10
HOPELESS_AFTER: Final = timedelta(hours=1)
_FIRST_DELAY: Final = 5.0  # seconds
_LONGEST_DELAY: Final = 300.0


class GrantState(StrEnum):
    """Where a grant stands."""

    ACTIVE = "active"
    REFRESHING = "refreshing"  # a request to the token endpoint is under way, or was when its worker died
    UNKNOWN = "unknown"  # the answer to a refresh was lost: the refresh token may be used up
    NEEDS_REAUTH = "needs_reauth"  # dead; a person has to grant access again
    SUSPECT = "suspect"  # called dead together with too many others: see `core.accounts.fuse`
    REVOKED = "revoked"  # we gave it up


class GrantEvent(StrEnum):
    """What happens to a grant."""

    BEGUN = "begun"  # a refresh is about to be sent
    RENEWED = "renewed"  # a token came back
    REFUSED = "refused"  # an answer came that leaves the grant as it was
    LOST = "lost"  # no answer came, or the worker that waited for it died
    DIED = "died"  # the provider said that the grant is dead
    DOUBTED = "doubted"  # the provider said that too many grants are dead at once
    CLEARED = "cleared"  # a suspect is not dead
    AUTHORISED = "authorised"  # new credentials from a person
    GIVEN_UP = "given_up"


S, E = GrantState, GrantEvent
TRANSITIONS: Final[Mapping[tuple[GrantState, GrantEvent], GrantState]] = {
    (S.ACTIVE, E.BEGUN): S.REFRESHING,
    (S.UNKNOWN, E.BEGUN): S.REFRESHING,
    (S.REFRESHING, E.RENEWED): S.ACTIVE,
    (S.REFRESHING, E.REFUSED): S.ACTIVE,
    (S.REFRESHING, E.LOST): S.UNKNOWN,
    (S.REFRESHING, E.DIED): S.NEEDS_REAUTH,
    (S.UNKNOWN, E.RENEWED): S.ACTIVE,  # the answer came after the lease had ended, before another refresh began
    (S.UNKNOWN, E.REFUSED): S.ACTIVE,
    (S.UNKNOWN, E.LOST): S.UNKNOWN,
    (S.ACTIVE, E.DIED): S.NEEDS_REAUTH,
    (S.UNKNOWN, E.DIED): S.NEEDS_REAUTH,
    (S.REFRESHING, E.DOUBTED): S.SUSPECT,
    (S.ACTIVE, E.DOUBTED): S.SUSPECT,
    (S.UNKNOWN, E.DOUBTED): S.SUSPECT,
    (S.NEEDS_REAUTH, E.DOUBTED): S.SUSPECT,
    (S.SUSPECT, E.BEGUN): S.REFRESHING,
    (S.SUSPECT, E.CLEARED): S.ACTIVE,
    (S.SUSPECT, E.DIED): S.NEEDS_REAUTH,
    (S.SUSPECT, E.AUTHORISED): S.ACTIVE,
    (S.SUSPECT, E.GIVEN_UP): S.REVOKED,
    (S.ACTIVE, E.AUTHORISED): S.ACTIVE,
    (S.REFRESHING, E.AUTHORISED): S.ACTIVE,
    (S.UNKNOWN, E.AUTHORISED): S.ACTIVE,
    (S.NEEDS_REAUTH, E.AUTHORISED): S.ACTIVE,
    (S.REVOKED, E.AUTHORISED): S.ACTIVE,
    (S.ACTIVE, E.GIVEN_UP): S.REVOKED,
    (S.REFRESHING, E.GIVEN_UP): S.REVOKED,
    (S.UNKNOWN, E.GIVEN_UP): S.REVOKED,
    (S.NEEDS_REAUTH, E.GIVEN_UP): S.REVOKED,
}
USABLE: Final = frozenset({S.ACTIVE, S.REFRESHING, S.UNKNOWN})
PROBED: Final = USABLE | {S.SUSPECT}  # grants whose refresh may be a probe


class RefreshFailure(StrEnum):
    """The classes of a failed refresh."""

    DEAD = "dead"  # the provider refuses this grant
    MISCONFIGURED = "misconfigured"  # it refuses the application: every account would fail, so no grant dies
    THROTTLED = "throttled"
    TRANSIENT = "transient"
    LOST = "lost"  # the request may have been received: the refresh token may be used up
    UNEXPLAINED = "unexplained"  # refused for a reason nobody declared: see `is_hopeless`


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials of one account. The ``repr`` shows no secret and no value.

    ``token`` is the access token, the key or the password; ``user`` belongs to a password. ``previous`` is the
    refresh token before the latest rotation, as long as the provider may still take it: until ``previous_until`` (None:
    nobody knows). ``expires_at``: when the token ends, ``refresh_at``: when it is refreshed, both aware (None: as long
    as it is taken). ``values`` are what the provider's answers said about the account (``instance_url``). ``version``
    counts the changes.
    """

    token: str = field(default="", repr=False)
    refresh_token: str = field(default="", repr=False)
    user: str = field(default="", repr=False)
    expires_at: datetime | None = None
    refresh_at: datetime | None = None
    previous: str = field(default="", repr=False)
    previous_until: datetime | None = None
    values: Mapping[str, str] = field(default_factory=lambda: EMPTY, repr=False)
    version: int = 1


def after(state: GrantState, event: GrantEvent) -> GrantState | None:
    """The state after an event; None if the event must not happen in this state."""
    return TRANSITIONS.get((state, event))


def needs_refresh(credentials: Credentials, now: datetime) -> bool:
    """Whether it is time for a refresh; the token may still be good."""
    return not credentials.token or (credentials.refresh_at is not None and credentials.refresh_at <= now)


def is_expired(credentials: Credentials, now: datetime) -> bool:
    """Whether the token is certainly over; False if its end is not known."""
    return not credentials.token or (credentials.expires_at is not None and credentials.expires_at <= now)


def merge(old: Credentials, body: Any, oauth: OAuth2, now: datetime) -> Credentials | None:
    """``old`` with what a token endpoint answered at ``now``; None if the answer holds no token.

    A field that is missing or null leaves the old value: a null refresh token does not erase the old one. So does one
    that no request could carry.
    """
    token_path = _token_path(body, oauth)
    if token_path is None:
        return None
    token, parent = token_path
    fresh = _text(body, parent, "refresh_token")
    kept = {path.rpartition(".")[2]: _kept(value) for path in oauth.keep for value in pick(body, path)[:1]}
    ends = _ends(body, parent, oauth, now)
    rotated = bool(fresh) and fresh != old.refresh_token and bool(old.refresh_token)
    return replace(
        old,
        token=token,
        refresh_token=fresh or old.refresh_token,
        expires_at=ends[0],
        refresh_at=ends[1],
        previous=old.refresh_token if rotated and _replays(oauth) else "",
        previous_until=now + timedelta(seconds=oauth.grace) if rotated and oauth.grace else None,
        values={**old.values, **{name: text for name, text in kept.items() if text}},
        version=old.version + 1,
    )


def _replays(oauth: OAuth2) -> bool:
    return oauth.rotation in (Rotation.GRACE, Rotation.OLD_KEPT)


def replay(credentials: Credentials, now: datetime) -> str:
    """The previous refresh token, if the provider may still take it; else ""."""
    until = credentials.previous_until
    return credentials.previous if until is None or until > now else ""


def is_renewable(credentials: Credentials, flow: str | None) -> bool:
    """Whether there is something to ask a new token with."""
    return bool(credentials.refresh_token) or flow == "client_credentials"


def revocable(credentials: Credentials, flow: str | None) -> str:
    """The token to revoke at the provider; "" if there is none. A service account's key is none, and never sent."""
    return credentials.token if flow == "jwt_bearer" else credentials.refresh_token or credentials.token


def refresh_failure(failure: Failure) -> RefreshFailure:
    """The class of a token endpoint's refusal."""
    if failure.kind is FailureKind.AUTH:
        return RefreshFailure.MISCONFIGURED if failure.scope is Scope.PROVIDER else RefreshFailure.DEAD
    if failure.kind in (FailureKind.THROTTLED, FailureKind.QUOTA):
        return RefreshFailure.THROTTLED
    if failure.kind is FailureKind.AMBIGUOUS:
        return RefreshFailure.LOST
    return RefreshFailure.UNEXPLAINED if failure.kind is FailureKind.PERMANENT else RefreshFailure.TRANSIENT


def is_hopeless(refusals: int, since: datetime | None, now: datetime) -> bool:
    """Whether a grant is dead because it was refused so often in a row, first at ``since``.

    ``refusals`` are answers whose reason no fact declares (`RefreshFailure.UNEXPLAINED`), never outages or throttles.
    Some servers say no more than that about a dead grant.
    """
    return refusals >= HOPELESS_TRIES and since is not None and now - since >= HOPELESS_AFTER


def delay(failures: int, roll: float) -> float:
    """Seconds until the next try after so many failures in a row: doubling, half of it jitter."""
    whole: float = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(failures - 1, 10))
    return whole / 2 * (1 + roll)


def _token_path(body: Any, oauth: OAuth2) -> tuple[str, str] | None:
    for path in oauth.success:
        for value in pick(body, path):
            if isinstance(value, str) and value.strip() and len(value) <= TOKEN.value and fits_header(value):
                return value, path.rpartition(".")[0]
    return None


def _at(body: Any, parent: str, name: str) -> Any:
    """The field beside the token, else at the top; None where it is missing or null."""
    paths = (f"{parent}.{name}", name) if parent else (name,)
    return next((value for path in paths for value in pick(body, path) if value is not None), None)


def _text(body: Any, parent: str, name: str) -> str:
    value = _at(body, parent, name)
    return _plain(value) if isinstance(value, str) and value.strip() and len(value) <= TOKEN.value else ""


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    if isinstance(value, str):
        return "" if any("\ud800" <= c <= "\udfff" for c in value) else value  # a lone surrogate cannot be sent
    return str(value) if abs(value) < _LARGEST else ""


def _kept(value: Any) -> str:
    text = _plain(value)
    return "" if len(text) > KEPT_VALUE.value or any(c < " " or "\x7f" <= c <= "\x9f" for c in text) else text


def _seconds(value: Any) -> float | None:
    """Seconds out of a number, or of a text of digits; None for anything else."""
    written = isinstance(value, str) and value.isascii() and value.strip().replace(".", "", 1).isdigit()
    if isinstance(value, bool) or not (written or isinstance(value, int | float)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if isfinite(number) and 0 <= number <= _LONGEST * 1000 else None


def _ends(body: Any, parent: str, oauth: OAuth2, now: datetime) -> tuple[datetime | None, datetime | None]:
    """When the token ends, and when to refresh it; both None if its end is not known."""
    seconds = _seconds(_at(body, parent, oauth.lifetime_field)) if oauth.lifetime_field else None
    life = oauth.lifetime if seconds is None else seconds * oauth.lifetime_unit
    if life == 0:
        life = None if oauth.zero_lifetime == "endless" else LEAST_LIFE
    if life is None or life > _LONGEST:
        return None, None
    early = _seconds(_at(body, parent, oauth.early_field)) if oauth.early_field else None
    use = early if early is not None and 0 < early < life else life - min(oauth.margin, life / 2)
    return now + timedelta(seconds=life), now + timedelta(seconds=use)


# -- token endpoints --------------------------------------------------------------------------------------------------
#
# What a token endpoint's answer means: a token, or one of the kinds of failure below.
#
# An answer counts as a token only if it is one: 2xx, JSON, and a text that is not empty where the token should be; some
# endpoints answer 200 with an error. A refusal is a dead grant only by a code that says so, because a false alarm costs
# the customer a re-authorisation: a page of HTML, an unknown code or a bare 400 is none.
#
#     AUTH                        this grant is dead
#     AUTH, Scope.PROVIDER        the application is refused: all its accounts would be; marks none of them
#     THROTTLED, QUOTA            come back later
#     TRANSIENT                   no answer that can be read: the grant may be well
#     AMBIGUOUS                   a gateway lost the answer, and the refresh token may be used up
#     PERMANENT                   refused for a reason nobody declared: an operator should look

_APP: Final = ("invalid_client", "unauthorized_client", "redirect_uri_mismatch", "unsupported_grant_type")
_LATER: Final = ("temporarily_unavailable", "server_error", "internal_failure", "internal_error")
RFC_6749: Final = (  # 5.2, and what servers send beside it; they apply after a provider's own rules
    Rule(FailureKind.AUTH, code="invalid_grant"),
    Rule(FailureKind.AUTH, code=_APP, scope=Scope.PROVIDER),
    Rule(FailureKind.TRANSIENT, code=_LATER, provider_wide=True),
    Rule(FailureKind.THROTTLED, code="slow_down"),  # RFC 8628, 3.5
    Rule(FailureKind.AUTH, status=401, scope=Scope.PROVIDER),  # 5.2 knows 401 for invalid_client only
)
_REFUSED: Final = 400
_SUCCESS: Final = range(200, 300)


def token_in(answer: AnswerFacts, oauth: OAuth2) -> str | None:
    """The access token in an answer, or None if it is no token answer."""
    if answer.status not in _SUCCESS:
        return None
    place = _token_path(answer.body, oauth)
    return None if place is None else place[0]


def classify_token(answer: AnswerFacts, oauth: OAuth2, now: datetime) -> Failure | None:
    """What a token endpoint's answer means; None for a token. See the top of this file."""
    if token_in(answer, oauth) is not None:
        return None
    request = RequestFacts("POST", "", "", "", repeatable=oauth.replayable)
    if answer.status in _SUCCESS or 300 <= answer.status < _REFUSED:  # noqa: PLR2004 - redirects
        refusal = replace(answer, status=_REFUSED)
        failure = classify(refusal, request, _endpoint(oauth), now)
        if failure is None or failure.kind is FailureKind.PERMANENT:
            failure = Failure(FailureKind.TRANSIENT, code="no_token", provider_wide=True)
        return replace(failure, status=answer.status)
    return classify(answer, request, _endpoint(oauth), now)


@lru_cache(maxsize=256)
def _endpoint(oauth: OAuth2) -> Provider:
    """The token endpoint as something to classify by."""
    return Provider(name="token", errors=replace(oauth.errors, rules=(*oauth.errors.rules, *RFC_6749)))


# -- client refusal ---------------------------------------------------------------------------------------------------
#
# Whether a token endpoint refuses the application, or only the grant in whose name it was asked.
#
# Shutting a provider stops all its accounts, so no single customer may bring it about. A customer controls their own
# grant (by revoking it, some providers answer 401 or ``unauthorized_client`` for it) and, where the token endpoint is
# at a host of theirs, every answer. So:
#
# - what a customer's own endpoint or key says is about that grant, always;
# - so is an answer to a grant that never worked, as long as others did;
# - ``invalid_client`` (RFC 6749, 5.2; or a provider's own code) from one grant, and anything else from a second one,
#   raise the question, and a grant of proven health is asked as a witness: only if it is refused too, or there is none,
#   the application is refused.
#
# Evidence is void as soon as the provider accepts the application again: by a token, or by ``invalid_grant``, which is
# only said to a client that was recognised (RFC 6749, 5.2).

LATELY: Final = timedelta(minutes=1)  # for so long after the application was accepted, a refusal of it is not believed
_EXPLICIT: Final = "invalid_client"


class Verdict(StrEnum):
    """Whom a refusal is about."""

    GRANT = "grant"
    OPEN = "open"  # a witness decides
    APPLICATION = "application"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refusal that seems to be about the application, and what is known beside it.

    ``tenant_owned``: the endpoint, or the key, is the customer's own. ``explicit``: the code says so. ``credible``:
    this grant has worked before, or no grant of the provider ever has. ``others``: further credible grants that were
    refused since the application was last accepted. ``accepted_lately``: the application was accepted a moment ago.
    ``witness``: this grant is refreshed to decide an open question.
    """

    explicit: bool
    tenant_owned: bool = False
    credible: bool = True
    others: int = 0
    accepted_lately: bool = False
    witness: bool = False


def judge(refusal: Refusal) -> Verdict:
    """Whom the refusal is about; see the comment above."""
    if refusal.tenant_owned or refusal.accepted_lately or not refusal.credible:
        return Verdict.GRANT
    if refusal.witness:
        return Verdict.APPLICATION
    return Verdict.OPEN if refusal.explicit or refusal.others else Verdict.GRANT


def is_explicit(failure: Failure, oauth: OAuth2) -> bool:
    """Whether the code itself names the application: the standard's, or one of the provider's own rules."""
    code = failure.code or ""
    own = (rule for rule in oauth.errors.rules if rule.kind is FailureKind.AUTH and rule.scope is Scope.PROVIDER)
    patterns = (one for rule in own for one in ((rule.code,) if isinstance(rule.code, str) else rule.code))
    return code == _EXPLICIT or any(fnmatchcase(code, one) for one in patterns)
