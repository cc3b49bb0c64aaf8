"""Contacts: read from a CSV file, or made up (the same ones every time).

A file needs the columns ``name`` and ``email``; ``id`` (default: the line), ``account`` (default: the
demo's accounts in turn) and ``endpoint`` (default: contacts) may be there too, others are left alone. A
line that cannot be a contact is reported with its number and left out; whether an e-mail address is good is
the provider's business.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from resilient.core.errors import BadResourceKey, SetupError
from resilient.core.resource_key import check
from resilient.surface.demo import accounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

COLUMNS: Final = ("id", "account", "endpoint", "name", "email")
_REQUIRED: Final = {"name", "email"}
_IN_TURN: Final = tuple(accounts.STORIES)
_CHECKOUT: Final = Path(__file__).parents[3] / "examples" / "data" / "contacts.csv"
# Made-up contacts: how many per account and endpoint, and how many have an impossible address.
_SHARES: Final = (
    (accounts.HEALTHY, accounts.ENDPOINT, 300),
    (accounts.THROTTLED, accounts.ENDPOINT, 180),
    (accounts.DOWN, accounts.ENDPOINT, 200),
    (accounts.LIMITED, accounts.ENDPOINT, 160),
    (accounts.REVOKED, accounts.ENDPOINT, 60),
    (accounts.LIMITED, accounts.LIMITED_ENDPOINT, 100),
)
_INVALID: Final = 12
_SEED: Final = 20
_FIRST: Final = (
    *("Ada", "Alan", "Barbara", "Claude", "Donald", "Edsger", "Frances", "Grace", "Hedy"),
    *("Joan", "Katherine", "Ken", "Leslie", "Radia", "Tony"),
)
_LAST: Final = (
    *("Abbe", "Bosch", "Curie", "Dirac", "Euler", "Fermi", "Gauss", "Hertz", "Joule"),
    *("Kepler", "Laplace", "Meitner", "Noether", "Planck", "Tesla"),
)
_BROKEN: Final = ("{0}.example.com", "{0}@", "@example.com", "{0}@example", "{0} at example.com", "n/a")


class Contact(BaseModel):
    """What one job carries."""

    id: str
    account: str
    endpoint: str = accounts.ENDPOINT
    name: str
    email: str

    @property
    def resource_key(self) -> str:
        """What the job goes through."""
        return accounts.resource_key(self.account, self.endpoint)


@dataclass(frozen=True, slots=True)
class Contacts:
    """What a file held: good contacts, and what is wrong with which line."""

    source: Path
    good: list[Contact]
    bad: list[str]

    @property
    def accounts(self) -> list[str]:
        """Whose contacts they are."""
        return sorted({c.account for c in self.good})


def find(given: Path | None, scratch: Path) -> Path:
    """The file to read: the given one, a checkout's example, or the same contacts written to ``scratch``."""
    if given is not None:
        return given
    return _CHECKOUT if _CHECKOUT.exists() else write(scratch / "contacts.csv")


def read(path: Path) -> Contacts:
    """Read ``path``; raises `SetupError` if it is no such file or holds no contact at all."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            columns = {name.strip().lower() for name in rows.fieldnames or ()}
            if missing := _REQUIRED - columns:
                raise SetupError(
                    f"{path}, line 1: no column {' and no column '.join(sorted(missing))}; begin the file"
                    f" with a line such as {','.join(COLUMNS)}; name and email are needed"
                )
            good, bad = _sorted_out(rows)
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SetupError(f"{path} is not a CSV file in UTF-8: {error}") from None
    if not good:
        raise SetupError(f"{path} holds no contact" + (f"; the first problem: {bad[0]}" if bad else ""))
    return Contacts(path, good, bad)


def _sorted_out(rows: csv.DictReader[str]) -> tuple[list[Contact], list[str]]:
    good: list[Contact] = []
    bad: list[str] = []
    lines: dict[str, int] = {}
    for row in rows:
        cells = {(name or "").strip().lower(): value for name, value in row.items()}
        try:
            contact = _contact(cells, rows.line_num)
        except ValueError as error:  # BadResourceKey is one
            bad.append(f"line {rows.line_num}: {error}")
            continue
        if (first := lines.setdefault(contact.id, rows.line_num)) != rows.line_num:
            bad.append(f"line {rows.line_num}: id {contact.id!r} was already used in line {first}")
            continue
        good.append(contact)
    return good, bad


def _contact(cells: Mapping[str, Any], line: int) -> Contact:
    if any(value is None for value in cells.values()):
        raise ValueError("fewer fields than columns")
    if "" in cells:
        raise ValueError("more fields than columns")
    text = {name: str(value).strip() for name, value in cells.items()}
    if empty := [name for name in sorted(_REQUIRED) if not text[name]]:
        raise ValueError(f"no {' and no '.join(empty)}")
    account = text.get("account") or _IN_TURN[line % len(_IN_TURN)]
    contact = Contact(
        id=text.get("id") or f"line-{line}",
        account=account,
        endpoint=text.get("endpoint") or accounts.ENDPOINT,
        name=text["name"],
        email=text["email"],
    )
    try:
        check(contact.resource_key)
    except BadResourceKey:
        raise ValueError(
            f"account {account!r} or endpoint {contact.endpoint!r} has characters no key can have"
        ) from None
    return contact


def made_up() -> Iterator[Contact]:
    """A thousand synthetic contacts, a few of them with impossible addresses."""
    rng = random.Random(_SEED)  # noqa: S311 - the same contacts every time
    places = [(account, endpoint) for account, endpoint, n in _SHARES for _ in range(n)]
    rng.shuffle(places)
    invalid = set(rng.sample(range(len(places)), _INVALID))
    for n, (account, endpoint) in enumerate(places):
        name = f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"
        local = f"{name.lower().replace(' ', '.')}{n}"
        email = _BROKEN[n % len(_BROKEN)].format(local) if n in invalid else f"{local}@example.com"
        yield Contact(id=f"c{n + 1:04}", account=account, endpoint=endpoint, name=name, email=email)


def write(path: Path, contacts: Iterable[Contact] | None = None) -> Path:
    """Write contacts (default: the made-up ones) as CSV; returns ``path``."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows([getattr(c, name) for name in COLUMNS] for c in contacts or made_up())
    return path
