"""What a resource is allowed: limits, concurrency, breaker thresholds, chosen by key pattern.

Owns the declarations and their choice, knows no state. The most specific pattern wins for each aspect by
itself (limits, concurrency, breaker); its limits replace those of broader patterns. A resource's row may
override aspects at runtime (`override`, a JSON object made by `Policy.to_json`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from resilient.core.errors import InvalidInput
from resilient.core.limit import Limit
from resilient.core.misfit import explained_class
from resilient.core.resource_key import check_pattern, matches, path
from resilient.core.tenancy import Tenancy

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_CHILDREN, MOST_CHILDREN = 2, 16  # accounts whose failures may open a provider's circuit; the most remembered
_MOST_KNOWN: Final = 65536  # keys whose choice is remembered


@explained_class
@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a circuit opens, for how long, and how it comes back. Times are in seconds.

    Opens on ``streak`` failures in a row, or when ``ratio`` of at least ``volume`` requests within ``window``
    failed; None switches either off. A provider's own circuit also needs failures from at least ``children``
    distinct accounts, and no fewer than work (`quorum`). Open times begin at ``first_open``, double up to
    ``longest_open`` and come down a step per ``calm`` without trouble; up to half is added as jitter, within
    ``longest_open``. After closing, ``ramp_first`` jobs run at once, doubling ten times within
    ``ramp``.
    """

    streak: int | None = 5
    ratio: float | None = 0.5
    volume: int = 20
    window: float = 60.0
    children: int = 3
    first_open: float = 15.0
    longest_open: float = 600.0
    probe_lease: float = 60.0
    calm: float = 60.0
    ramp: float = 30.0
    ramp_first: int = 2

    def __post_init__(self) -> None:
        whole = (self.volume, self.children, self.ramp_first, 1 if self.streak is None else self.streak)
        spans = (self.window, self.first_open, self.longest_open, self.probe_lease, self.calm)
        ratio = 1.0 if self.ratio is None else self.ratio
        if min(whole) < 1 or min(spans) <= 0 or self.ramp < 0 or not 0 < ratio <= 1:
            raise InvalidInput(
                f"{self} is no breaker policy: counts start at 1, times are positive, ratio is in (0, 1]"
            )
        if not LEAST_CHILDREN <= self.children <= MOST_CHILDREN:
            raise InvalidInput(
                f"BreakerPolicy(children={self.children}): use {LEAST_CHILDREN} to {MOST_CHILDREN};"
                " one account never stops its provider, its own circuit does that work"
            )
        if self.first_open > self.longest_open:
            raise InvalidInput(
                f"BreakerPolicy(first_open={self.first_open:g}, longest_open={self.longest_open:g}): a circuit cannot"
                " first be open for longer than it may be; raise longest_open too"
            )


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything one resource key is allowed."""

    limits: tuple[Limit, ...] = ()
    concurrency: int | None = None
    breaker: BreakerPolicy = BreakerPolicy()
    job_limits: tuple[Limit, ...] = field(init=False, repr=False, compare=False, default=())
    request_limits: tuple[Limit, ...] = field(init=False, repr=False, compare=False, default=())
    plain: bool = field(init=False, repr=False, compare=False, default=True)  # no limit, no cap

    def __post_init__(self) -> None:
        if self.concurrency is not None and not (isinstance(self.concurrency, int) and self.concurrency >= 1):
            raise InvalidInput(f"a concurrency cap starts at 1, not {self.concurrency!r}; to stop a resource, pause it")
        names = [limit.name for limit in self.limits]
        if len(set(names)) != len(names):
            raise InvalidInput(f"two limits of one resource share a name ({', '.join(names)}): give them names")
        object.__setattr__(self, "job_limits", tuple(x for x in self.limits if x.counts == "jobs"))
        object.__setattr__(self, "request_limits", tuple(x for x in self.limits if x.counts == "requests"))
        object.__setattr__(self, "plain", not self.limits and self.concurrency is None)

    def to_json(self) -> dict[str, Any]:
        """All aspects as a JSON object; drop members to override only the others."""
        return {
            "limits": [limit.to_json() for limit in self.limits],
            "concurrency": self.concurrency,
            "breaker": asdict(self.breaker),
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Policy:
        """Read what `to_json` wrote."""
        return cls().overridden(doc)

    def stored(self, doc: Any) -> Policy:
        """This policy with the override of a row. Never raises, because it must not stop a worker.

        It was written long ago, by older or newer code, over another declaration, or by hand: a breaker's times and
        counts are brought within what they may be, and what cannot be read leaves the declared aspect as it is.
        """
        found = self
        for name, value in doc.items() if isinstance(doc, Mapping) else ():
            with suppress(InvalidInput, TypeError, ValueError, AttributeError):
                found = found.overridden({name: _possible(self.breaker, value) if name == "breaker" else value})
        return found

    def overridden(self, doc: Mapping[str, Any]) -> Policy:
        """This policy with the aspects in ``doc`` replaced (members of ``breaker`` one by one).

        Raises `InvalidInput` for anything that is not an aspect, so that a typing error is not silently no limit.
        """
        if unknown := set(doc) - {"limits", "concurrency", "breaker"}:
            raise InvalidInput(f"a policy has limits, concurrency and breaker, not {', '.join(sorted(unknown))}")
        changes: dict[str, Any] = {}
        if "limits" in doc:
            changes["limits"] = tuple(Limit.from_json(one) for one in doc["limits"] or ())
        if "concurrency" in doc:
            changes["concurrency"] = doc["concurrency"]
        if "breaker" in doc:
            try:
                members = dict(doc["breaker"] or {})
                changes["breaker"] = replace(self.breaker, **members)
            except TypeError:
                known = [item.name for item in fields(BreakerPolicy)]
                wrong = ", ".join(repr(name) for name in doc["breaker"] if name not in known)
                raise InvalidInput(f"a breaker policy has no {wrong}, only {', '.join(known)}") from None
        return replace(self, **changes)


class Policies:
    """The policies of one app, by key pattern.

    ``limits={"github/*": [Limit(5000, per="1h")]}``, ``concurrency={"github": 8}``, ``breakers={"github/**":
    ...}``; ``tenancies`` by root, `SHARED` where nothing is said. Raises `InvalidInput` or
    `BadResourceKey` for what cannot be meant.
    """

    def __init__(
        self,
        limits: Mapping[str, Sequence[Limit]] | None = None,
        concurrency: Mapping[str, int] | None = None,
        breakers: Mapping[str, BreakerPolicy] | None = None,
        tenancies: Mapping[str, Tenancy] | None = None,
    ) -> None:
        self._tenancies = tenancies or {}
        self._limits = _sorted({pattern: _declared(pattern, found) for pattern, found in (limits or {}).items()})
        self._caps = _sorted(concurrency or {})
        self._breakers = _sorted(breakers or {})
        for _, found in self._limits:
            Policy(limits=found)  # refuse a bad declaration at start-up, not at its first key
        for _, cap in self._caps:
            Policy(concurrency=cap)
        for pattern, breaker in self._breakers:
            if not isinstance(breaker, BreakerPolicy):
                raise InvalidInput(f"the breaker of {pattern!r} is {breaker!r}: write BreakerPolicy(streak=5)")
        self._known: dict[str, Policy] = {}
        self._shared: dict[Policy, Policy] = {}  # keys of one pattern share one object

    def for_key(self, key: str, override: Mapping[str, Any] | None = None) -> Policy:
        """The policy of ``key``, with its row's ``override``."""
        if override:
            return self._plain(key).stored(override)
        return self._known.get(key) or self._plain(key)

    def tenancy(self, key: str) -> Tenancy:
        """What the accounts below the root of ``key`` have in common."""
        return self._tenancies.get(key.partition("/")[0], Tenancy.SHARED)

    def capped(self, key: str) -> tuple[str, ...]:
        """The keys of a path with a declared concurrency cap."""
        if not self._caps:
            return ()
        return tuple(level for level in path(key) if self.for_key(level).concurrency is not None)

    def _plain(self, key: str) -> Policy:
        policy = Policy(
            limits=_best(key, self._limits) or (),
            concurrency=_best(key, self._caps),
            breaker=_best(key, self._breakers) or BreakerPolicy(),
        )
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        policy = self._known[key] = self._shared.setdefault(policy, policy)
        return policy


def _possible(breaker: BreakerPolicy, override: Mapping[str, Any] | None) -> dict[str, Any]:
    """Overriding members of a breaker policy as they fit together with the others; those of newer code are left out."""
    known = {item.name for item in fields(BreakerPolicy)}
    members = {name: value for name, value in (override or {}).items() if name in known}
    if "children" in members:
        members["children"] = min(MOST_CHILDREN, max(LEAST_CHILDREN, members["children"]))
    first, longest = (members.get(name, getattr(breaker, name)) for name in ("first_open", "longest_open"))
    return members | ({"longest_open": first} if first > longest else {})


def _declared(pattern: str, found: Any) -> tuple[Limit, ...]:
    limits = tuple(found) if isinstance(found, Iterable) else ()
    if not isinstance(found, Iterable) or not all(isinstance(one, Limit) for one in limits):
        raise InvalidInput(f"the limits of {pattern!r} are {found!r}: write [Limit(5000, per='1h')]")
    return limits


def _sorted(by_pattern: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Most specific first; of equals the one declared last."""
    checked = [(check_pattern(pattern), value) for pattern, value in by_pattern.items()]
    return sorted(checked, key=lambda item: _specificity(item[0]))[::-1]


def _specificity(pattern: str) -> tuple[int, ...]:
    """A literal segment before ``acct-*`` before ``*`` before ``**``, from the left."""
    return tuple(-1 if s == "**" else 0 if s == "*" else 1 if "*" in s or "?" in s else 2 for s in pattern.split("/"))


def _best(key: str, by_pattern: Sequence[tuple[str, Any]]) -> Any:
    return next((value for pattern, value in by_pattern if matches(key, pattern)), None)
