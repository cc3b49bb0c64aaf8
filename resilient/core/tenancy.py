"""What the accounts of one root have in common, and so what one of them may say about the others.

Accounts of one API on the same hosts fall ill together: what enough of them report is true of all. An account with a
host of its own says less, because whoever connected it may have chosen that host, and runs it:

                        no answer at all    an answer (5xx, throttle, budget, cost)
    SHARED              root                root
    SUBDOMAIN           account             root       `https://{shop}.shop.example`, or one of the hosts the facts list
    APART               account             account    `https://{homeserver}`: wherever the account says

"root" means that it may count there, beside what others report (`breaker`), not that it decides.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

_PLACEHOLDER: Final = re.compile(r"\{\w+\}")
_SCHEME: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")


class Tenancy(StrEnum):
    """See the top of this file."""

    SHARED = "shared"
    SUBDOMAIN = "subdomain"
    APART = "apart"


def tenancy_of(address: str, *, confined: bool = False) -> Tenancy:
    """What accounts share whose address follows this template (`Provider.base_url`).

    ``confined``: whatever an account says, its host must be one that the provider's facts list.
    """
    authority = re.split(r"[/?#]", _SCHEME.sub("", address, count=1), maxsplit=1)[0]
    if "{" not in authority:
        return Tenancy.SHARED
    fixed = _PLACEHOLDER.split(authority)[-1]  # what follows the last placeholder is the provider's word
    name = fixed.partition(":")[0]
    return Tenancy.SUBDOMAIN if confined or (name.startswith(".") and "." in name[1:]) else Tenancy.APART
