"""Whether a token endpoint refuses the application, or only the grant in whose name it was asked.

Shutting a provider stops all its accounts, so no single customer may bring it about. A customer controls their own
grant (by revoking it, some providers answer 401 or ``unauthorized_client`` for it) and, where the token endpoint is at
a host of theirs, every answer. So:

- what a customer's own endpoint or key says is about that grant, always;
- so is what a grant hears that never worked, as long as others did;
- ``invalid_client`` (RFC 6749, 5.2; or a provider's own code) from one grant, and anything else from a second one,
  raise the question, and a grant of proven health is asked as a witness: only if it is refused too, or there is none,
  the application is refused.

Evidence is void as soon as the provider took the application again: by a token, or by ``invalid_grant``, which is only
said to a client that was recognised (RFC 6749, 5.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from resilient.core.failure import FailureKind, Scope

if TYPE_CHECKING:
    from resilient.core.auth import OAuth2
    from resilient.core.failure import Failure

LATELY: Final = timedelta(minutes=1)  # so long after it was taken, a refusal of the application is not believed
_EXPLICIT: Final = "invalid_client"


class Verdict(StrEnum):
    """Whom a refusal is about."""

    GRANT = "grant"
    OPEN = "open"  # a witness decides
    APPLICATION = "application"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refusal that seems to be about the application, and what is known beside it.

    ``tenants``: the endpoint, or the key, is the customer's own. ``explicit``: the code says so. ``credible``: this
    grant has worked before, or no grant of the provider ever has. ``others``: further credible grants that were
    refused since the application was last taken. ``lately``: it was taken a moment ago. ``witness``: this grant was
    asked to decide an open question.
    """

    explicit: bool
    tenants: bool = False
    credible: bool = True
    others: int = 0
    lately: bool = False
    witness: bool = False


def judge(refusal: Refusal) -> Verdict:
    """Whom it is about; see the top of this file."""
    if refusal.tenants or refusal.lately or not refusal.credible:
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
