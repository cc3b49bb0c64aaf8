"""Tokens: when to refresh them, what an answer makes of them, and what a failed refresh means.

A grant's state changes only as `TRANSITIONS` says; what is missing there must not happen. `REFRESHING` is
committed before the request, so that a crash leaves a mark: whoever finds it after the lease is over knows that
an answer may have been lost (`UNKNOWN`). From there a refresh is tried again with the token that is stored: where
the provider has a replay grace that heals the grant, elsewhere the provider's refusal settles the matter.
Only a provider's word makes a grant `NEEDS_REAUTH`, never an outage, however long; and not even its word if too many
grants die at once (`SUSPECT`, see `core.fuse`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from resilient.core.auth import OAuth2, Rotation
from resilient.core.body import pick
from resilient.core.failure import Failure, FailureKind, Scope
from resilient.core.misfit import explained_class

if TYPE_CHECKING:
    from collections.abc import Mapping

EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
LEAST_LIFE: Final = 60.0  # seconds; a token whose lifetime is stated as 0 is used for so long
PATIENCE: Final = 20.0  # seconds for the whole exchange with a token endpoint; leases of a refresh are longer
_LARGEST: Final = 10**20  # of the numbers that are kept
_LONGEST: Final = 10 * 366 * 86400.0  # seconds; later ends are none
REFRESHING: Final = "refreshing"  # the code of an account's rest that ends with a refresh
NOT_CONNECTED: Final = "not_connected"  # an account's gate: it has no credentials
UNREADABLE: Final = "unreadable"  # an account's gate: its secrets need a key that is not here, or its row was changed
HOPELESS_TRIES: Final = 10
HOPELESS_AFTER: Final = timedelta(hours=1)
_FIRST_DELAY: Final = 5.0  # seconds
_LONGEST_DELAY: Final = 300.0


class GrantState(StrEnum):
    """Where a grant stands."""

    ACTIVE = "active"
    REFRESHING = "refreshing"  # a request to the token endpoint is under way, or was when its worker died
    UNKNOWN = "unknown"  # its answer was lost: the refresh token may be used up
    NEEDS_REAUTH = "needs_reauth"  # dead; a person has to grant access again
    SUSPECT = "suspect"  # called dead together with too many others: see `core.fuse`
    REVOKED = "revoked"  # given up by us


class GrantEvent(StrEnum):
    """What happens to a grant."""

    BEGUN = "begun"  # a refresh is about to be sent
    RENEWED = "renewed"  # a token came back
    REFUSED = "refused"  # an answer came that leaves the grant as it was
    LOST = "lost"  # no answer came, or its reader died
    DIED = "died"  # the provider said so
    DOUBTED = "doubted"  # the provider said so, of too many at once
    CLEARED = "cleared"  # it was not so
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
    (S.UNKNOWN, E.RENEWED): S.ACTIVE,  # its lease ended, and it answered before anybody else asked
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
PROBED: Final = USABLE | {S.SUSPECT}  # may be refreshed to find out whether they live


class RefreshFailure(StrEnum):
    """The classes of a failed refresh."""

    DEAD = "dead"  # this grant, by the provider's word
    MISCONFIGURED = "misconfigured"  # the application itself: every account would fail, so none is marked
    THROTTLED = "throttled"
    TRANSIENT = "transient"
    LOST = "lost"  # the request may have been received: the refresh token may be used up
    UNEXPLAINED = "unexplained"  # refused for a reason nobody declared: see `is_hopeless`


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What one account is reached with. The ``repr`` shows none of it.

    ``token`` is the access token, the key or the password; ``user`` belongs to a password. ``previous`` is the
    refresh token before the latest rotation, as long as the provider may still take it. ``values`` are what the
    provider's answers said about the account (``instance_url``). ``version`` counts the changes.
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
    """The state after an event; None where that must not happen."""
    return TRANSITIONS.get((state, event))


def due(credentials: Credentials, now: datetime) -> bool:
    """Whether a refresh is wanted; the token may still be good."""
    return not credentials.token or (credentials.refresh_at is not None and credentials.refresh_at <= now)


def expired(credentials: Credentials, now: datetime) -> bool:
    """Whether the token is surely no good any more."""
    return not credentials.token or (credentials.expires_at is not None and credentials.expires_at <= now)


def merged(old: Credentials, body: Any, oauth: OAuth2, now: datetime) -> Credentials | None:
    """What a token endpoint's answer of ``now`` makes of ``old``; None if it is no token answer.

    A field that is missing or null keeps what was known: a null refresh token wipes nothing.
    """
    found = _token_path(body, oauth)
    if found is None:
        return None
    token, parent = found
    fresh = _text(body, parent, "refresh_token")
    kept = {path.rpartition(".")[2]: _plain(value) for path in oauth.keep for value in pick(body, path)[:1]}
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
    """The previous refresh token, if the provider may still take it."""
    until = credentials.previous_until
    return credentials.previous if until is None or until > now else ""


def failed(failure: Failure) -> RefreshFailure:
    """Which of the classes a token endpoint's refusal belongs to."""
    if failure.kind is FailureKind.AUTH:
        return RefreshFailure.MISCONFIGURED if failure.scope is Scope.PROVIDER else RefreshFailure.DEAD
    if failure.kind in (FailureKind.THROTTLED, FailureKind.QUOTA):
        return RefreshFailure.THROTTLED
    if failure.kind is FailureKind.AMBIGUOUS:
        return RefreshFailure.LOST
    return RefreshFailure.UNEXPLAINED if failure.kind is FailureKind.PERMANENT else RefreshFailure.TRANSIENT


def is_hopeless(refusals: int, since: datetime | None, now: datetime) -> bool:
    """Whether a grant is dead that was refused so often in a row, first at ``since``, for reasons nobody declared.

    An outage never counts: these are answers, neither 5xx nor throttles. Some servers say no more about a dead grant.
    """
    return refusals >= HOPELESS_TRIES and since is not None and now - since >= HOPELESS_AFTER


def delay(failures: int, roll: float) -> float:
    """Seconds until the next try after so many failures in a row: doubling, half of it jitter."""
    whole: float = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(failures - 1, 10))
    return whole / 2 * (1 + roll)


def _token_path(body: Any, oauth: OAuth2) -> tuple[str, str] | None:
    for path in oauth.success:
        for value in pick(body, path):
            if isinstance(value, str) and value.strip():
                return value, path.rpartition(".")[0]
    return None


def _at(body: Any, parent: str, name: str) -> Any:
    """The field beside the token, else at the top; None where it is missing or null."""
    paths = (f"{parent}.{name}", name) if parent else (name,)
    return next((value for path in paths for value in pick(body, path) if value is not None), None)


def _text(body: Any, parent: str, name: str) -> str:
    value = _at(body, parent, name)
    return value if isinstance(value, str) and value.strip() else ""


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    if isinstance(value, str):
        return "" if any("\ud800" <= c <= "\udfff" for c in value) else value  # half a character
    return str(value) if abs(value) < _LARGEST else ""


def _seconds(value: Any) -> float | None:
    """A number, also one written as text; nothing else."""
    written = isinstance(value, str) and value.isascii() and value.strip().replace(".", "", 1).isdigit()
    if isinstance(value, bool) or not (written or isinstance(value, int | float)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if isfinite(number) and 0 <= number <= _LONGEST * 1000 else None


def _ends(body: Any, parent: str, oauth: OAuth2, now: datetime) -> tuple[datetime | None, datetime | None]:
    """When the token ends and when it is refreshed; None where that is not known."""
    said = _seconds(_at(body, parent, oauth.lifetime_field)) if oauth.lifetime_field else None
    life = oauth.lifetime if said is None else said * oauth.lifetime_unit
    if life == 0:
        life = None if oauth.zero_lifetime == "endless" else LEAST_LIFE
    if life is None or life > _LONGEST:
        return None, None
    early = _seconds(_at(body, parent, oauth.early_field)) if oauth.early_field else None
    use = early if early is not None and 0 < early < life else life - min(oauth.margin, life / 2)
    return now + timedelta(seconds=life), now + timedelta(seconds=use)
