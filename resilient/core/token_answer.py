"""What a token endpoint's answer means: a token, or one of four kinds of refusal.

An answer counts as a token only if it is one: 2xx, JSON, and a text that is not empty where the token should
be; some endpoints answer 200 with an error. A refusal is a dead grant only by a code that says so, because a
false alarm costs the customer a re-authorisation: a page of HTML, an unknown code or a bare 400 is none.

    AUTH                        this grant is dead
    AUTH, Scope.PROVIDER        the application is refused: all its accounts would be; marks none of them
    THROTTLED, QUOTA            come back later
    TRANSIENT                   no answer that can be read: the grant may be well
    AMBIGUOUS                   a gateway lost the answer, and the refresh token may be used up
    PERMANENT                   refused for a reason nobody declared: an operator should look
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from resilient.core.body import pick
from resilient.core.classify import classify
from resilient.core.exchange import RequestFacts
from resilient.core.failure import Failure, FailureKind, Scope
from resilient.core.provider import Provider
from resilient.core.rules import Rule

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.auth import OAuth2
    from resilient.core.exchange import AnswerFacts

_APP: Final = ("invalid_client", "unauthorized_client", "redirect_uri_mismatch", "unsupported_grant_type")
_LATER: Final = ("temporarily_unavailable", "server_error", "internal_failure", "internal_error")
RFC_6749: Final = (  # 5.2, and what servers send beside it; asked after a provider's own rules
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
    found = (value for path in oauth.success for value in pick(answer.body, path))
    return next((value for value in found if isinstance(value, str) and value.strip()), None)


def classify_token(answer: AnswerFacts, oauth: OAuth2, now: datetime) -> Failure | None:
    """What a token endpoint's answer means; None for a token. See the top of this file."""
    if token_in(answer, oauth) is not None:
        return None
    asked = RequestFacts("POST", "", "", "", repeatable=oauth.replayable)
    if answer.status in _SUCCESS or 300 <= answer.status < _REFUSED:  # noqa: PLR2004 - redirects
        said = replace(answer, status=_REFUSED)
        failure = classify(said, asked, _endpoint(oauth), now)
        if failure is None or failure.kind is FailureKind.PERMANENT:
            failure = Failure(FailureKind.TRANSIENT, code="no_token", provider_wide=True)
        return replace(failure, status=answer.status)
    return classify(answer, asked, _endpoint(oauth), now)


@lru_cache(maxsize=256)
def _endpoint(oauth: OAuth2) -> Provider:
    """The token endpoint as something to classify by."""
    return Provider(name="token", errors=replace(oauth.errors, rules=(*oauth.errors.rules, *RFC_6749)))
