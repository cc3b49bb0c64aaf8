"""Secrets in columns: AES-256-GCM, bound to the table, row and column they belong to, under a ring of keys.

The first key of the ring encrypts, all of them decrypt, so that keys are changed while everything runs: give the new
one to every process as the last, then put it in front everywhere, re-encrypt (``resilient secrets rotate``), take the
old one away. A process that lacks a key of another's stops what that one has written. A ciphertext that was moved
to another row or column cannot be read there. Below: the payloads that are sealed with the ring, in their rows.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from resilient.core.base.errors import SecretsUnreadable, SetupError
from resilient.core.base.frames import frameless
from resilient.core.jobs.records import SEALED, START
from resilient.store.db.dialect import ID

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect


VARIABLE: Final = "RESILIENT_SECRETS"
PREFIX: Final = "rsk1_"
_NONCE: Final = 12  # bytes; random, which is safe for 2**32 values under one key (NIST SP 800-38D, 8.3)
_BYTES: Final = 32
_MARK: Final = "1"  # the version of marks
HOW: Final = (
    f"make one with `resilient secrets new` and give it as {VARIABLE} or Resilient(secrets=[...]), the same in every"
    " process"
)

_ROLLOUT: Final = (
    "; a new key comes in three steps, each in every process before the next: it is given as the last, then in front,"
    " then `resilient secrets rotate`"
)


class KeyRing:
    """Encrypts with its first key, decrypts with any."""

    @frameless
    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Raises `SetupError` for a text that is no key, without quoting it."""
        self._keys: dict[str, AESGCM] = {}
        self._signing: dict[str, bytes] = {}
        for number, text in enumerate(keys, 1):
            raw = _decoded(text, number)
            key_id = hashlib.sha256(b"resilient key id" + raw).hexdigest()[:12]
            self._keys[key_id] = _cipher(raw)
            self._signing[key_id] = hmac.digest(raw, b"resilient signing", "sha256")

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._keys)} keys>"

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def key_ids(self) -> frozenset[str]:
        """The ids of its keys."""
        return frozenset(self._keys)

    @property
    def current(self) -> str:
        """The id of the key that encrypts. Raises `SetupError` without any."""
        for key_id in self._keys:
            return key_id
        raise SetupError(f"credentials and sealed payloads are stored encrypted, and there is no key: {HOW}")

    @frameless
    def seal(self, text: str, *place: str) -> str:
        """``text`` encrypted for one place: table, row, column."""
        key_id, nonce = self.current, os.urandom(_NONCE)
        sealed = self._keys[key_id].encrypt(nonce, text.encode(), _place(place))
        return f"{key_id}:{base64.b64encode(nonce + sealed).decode('ascii')}"

    def signed(self, text: str) -> str:
        """``text`` with a signature of the first key behind it."""
        key_id = self.current
        return f"{text}.{key_id}.{self._signature(key_id, text)}"

    def is_signed(self, text: str) -> bool:
        """Whether one of the keys signed it."""
        body, _, rest = text.partition(".")
        key_id, _, signature = rest.partition(".")
        return key_id in self._signing and _is_same(self._signature(key_id, body), signature)

    def mark(self, purpose: str, text: str) -> str:
        """What proves that this ring wrote ``text``, kept beside it: ``1.<key id>.<signature>``."""
        key_id = self.current
        return f"{_MARK}.{key_id}.{self._signature(key_id, _marked(purpose, text))}"

    def is_mark(self, mark: str, purpose: str, text: str) -> bool:
        """Whether one of the keys made it for that purpose and text."""
        version, _, rest = mark.partition(".")
        key_id, _, signature = rest.partition(".")
        if version != _MARK or key_id not in self._signing:
            return False
        return _is_same(self._signature(key_id, _marked(purpose, text)), signature)

    def is_current(self, mark: str) -> bool:
        """Whether a mark names the key that signs now."""
        return key_id_of_mark(mark) == self.current

    def _signature(self, key_id: str, text: str) -> str:
        digest = hmac.digest(self._signing[key_id], _bytes(text), "sha256")
        return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")

    @frameless
    def open(self, sealed: str, *place: str) -> str:
        """The text sealed for that place. Raises `SecretsUnreadable` if no key of the ring opens it."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - see `_cipher`

        key_id, _, data = sealed.partition(":")
        key = self._keys.get(key_id)
        where = f"the secrets of {place[0]} {place[1]}"
        if key is None:
            raise SecretsUnreadable(
                f"{where} are encrypted with key {key_id}, which is not among the {len(self._keys)} given: add the"
                f" missing key to {VARIABLE} or Resilient(secrets=[...])" + (_ROLLOUT if self._keys else f"; or {HOW}")
            )
        try:
            raw = base64.b64decode(data)
            return key.decrypt(raw[:_NONCE], raw[_NONCE:], _place(place)).decode()
        except (InvalidTag, ValueError):  # ValueError: cut off, or never written by us
            raise SecretsUnreadable(
                f"{where} were changed or belong to another row: authorise that account again"
            ) from None


def _cipher(raw: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - only where there are keys

    return AESGCM(raw)


def key_id_of(sealed: str) -> str:
    """The id of the key that sealed a text."""
    return sealed.partition(":")[0]


def key_id_of_mark(mark: str) -> str:
    """The id of the key that made a mark; "" for what is none."""
    return "".join(mark.split(".")[1:2])


def new_key() -> str:
    """A fresh key, as text."""
    return PREFIX + base64.urlsafe_b64encode(os.urandom(_BYTES)).decode("ascii").rstrip("=")


def from_environment() -> list[str]:
    """The keys of ``RESILIENT_SECRETS``: separated by commas or spaces, the current one first."""
    return os.environ.get(VARIABLE, "").replace(",", " ").split()


def _marked(purpose: str, text: str) -> str:
    """The bytes to sign; no state parameter looks like them."""
    return f"mark {_MARK}|{purpose}|{text}"


def _place(parts: tuple[str, ...]) -> bytes:
    return "|".join(parts).encode()


def _is_same(expected: str, signature: str) -> bool:
    return hmac.compare_digest(_bytes(expected), _bytes(signature))


def _bytes(text: str) -> bytes:
    """A stranger's text may hold half a character."""
    return text.encode("utf-8", "surrogatepass")


def _decoded(text: str, number: int) -> bytes:
    body = text.strip().removeprefix(PREFIX)
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    if len(raw) != _BYTES or not text.strip().startswith(PREFIX):
        raise SetupError(f"key {number} of the secrets is no key: {HOW}")
    return raw


# -- sealed payloads --------------------------------------------------------------------------------------------------
#
# Sealed payloads in the rows: found by their first characters, and written anew under another key.

WINDOW: Final = 2_000  # rows looked at in one transaction
_FIRST_ID: Final = UUID(int=0)
# Every column that is encrypted or signed: what `resilient secrets rotate` writes anew, and the others.
ROTATED: Final = frozenset(
    {("grant", "secrets"), ("connection", "seal"), ("job", "payload"), ("job", "wish"), ("step", "undo_payload")}
)
NOT_ROTATED: Final = {
    ("authorization", "secrets"): "over after half an hour",
    ("schedule", "spec"): "workers write it with their own first key when they start",
}


class SealedRow(NamedTuple):
    """What holds a sealed payload: a column of a job, or that of a step's undo (``step``: its name)."""

    id: UUID
    step: str | None
    kind: str
    text: str
    column: str = "payload"


class Mark(NamedTuple):
    """The last step of a window."""

    workflow_id: UUID
    name: str


def sealed_under_other_keys(
    c: Connection, d: Dialect, key_id: str, after: UUID | None
) -> tuple[list[SealedRow], UUID | None]:
    """The sealed payloads of the next window of jobs under other keys than this; None: it was the last window."""
    edge = d.run(
        c,
        "SELECT id FROM {job} WHERE id > :after_id ORDER BY id LIMIT 1 OFFSET :size",
        {"after_id": d.id(after or _FIRST_ID), "size": WINDOW - 1},
        id=ID,
    ).first()
    last = None if edge is None else edge[0]
    upto = "" if last is None else " AND id <= :last_id"
    window = {"after_id": d.id(after or _FIRST_ID), **({} if last is None else {"last_id": d.id(last)})}
    sealed: list[SealedRow] = []
    for column in ("payload", "wish"):
        text = _text(d, column)
        is_other, likes = (_other(text), _likes(key_id)) if column == "payload" else _within(text, key_id)
        rows = d.run(
            c,
            f"SELECT id, kind, {text} AS text FROM {{job}} WHERE id > :after_id{upto} AND {is_other} ORDER BY id",
            window | likes,
            id=ID,
        )
        sealed += [SealedRow(row.id, None, row.kind, row.text, column) for row in rows]
    return sealed, last


def undos_under_other_keys(
    c: Connection, d: Dialect, key_id: str, after: Mark | None
) -> tuple[list[SealedRow], Mark | None]:
    """The same for the undos of the next window of steps."""
    behind, params = "true", dict[str, Any]()
    if after is not None:
        behind = "(workflow_id, name) > (:after_id, :after_name)"
        params = {"after_id": d.id(after.workflow_id), "after_name": after.name}
    edge = d.run(
        c,
        f"SELECT workflow_id, name FROM {{step}} WHERE {behind} ORDER BY workflow_id, name LIMIT 1 OFFSET :size",
        params | {"size": WINDOW - 1},
        workflow_id=ID,
    ).first()
    last = None if edge is None else Mark(*edge)
    upto = "" if last is None else " AND (workflow_id, name) <= (:last_id, :last_name)"
    text = _text(d, "undo_payload")
    rows = d.run(
        c,
        f"SELECT workflow_id, name, undo_kind, {text} AS text FROM {{step}} WHERE {behind}{upto} AND {_other(text)}"
        " ORDER BY workflow_id, name",
        {**params, **({} if last is None else {"last_id": d.id(last[0]), "last_name": last[1]}), **_likes(key_id)},
        workflow_id=ID,
    )
    return [SealedRow(r.workflow_id, r.name, r.undo_kind, r.text, "undo_payload") for r in rows], last


def schedules_under_other_keys(c: Connection, d: Dialect, key_id: str) -> list[str]:
    """The schedules whose sealed payload is under another key than this."""
    is_other, likes = _within(_text(d, "spec"), key_id)
    rows = d.run(c, f"SELECT name FROM {{schedule}} WHERE NOT removed AND {is_other} ORDER BY name LIMIT 100", likes)
    return [row.name for row in rows]


def write_sealed(c: Connection, d: Dialect, row: SealedRow, text: str) -> bool:
    """Put the same payload under another key; False if the row has another one meanwhile."""
    table, where = ("job", "id = :id")
    params = {"id": d.id(row.id), "old": row.text, "new": text}
    if row.step is not None:
        table, where = "step", "workflow_id = :id AND name = :step"
        params["step"] = row.step
    new = "CAST(:new AS json)" if d.is_postgresql else ":new"
    sql = f"UPDATE {{{table}}} SET {row.column} = {new} WHERE {where} AND {_text(d, row.column)} = :old"
    return bool(d.run(c, sql, params).rowcount)


def _text(d: Dialect, column: str) -> str:
    return f"CAST({column} AS text)" if d.is_postgresql else column


def _other(text: str) -> str:
    return f"{text} LIKE :sealed AND {text} NOT LIKE :current AND {text} NOT LIKE :edited"


def _likes(key_id: str) -> dict[str, str]:
    """As the engine wrote it, and as an edit does: with a space."""
    return {"sealed": f"{START}:%", "current": f'{START}:"{key_id}:%', "edited": f'{START}: "{key_id}:%'}


def _within(text: str, key_id: str) -> tuple[str, dict[str, str]]:
    """The same where the payload stands within another document; one that merely has these words is looked at, too."""
    likes = {"sealed": f"%{SEALED}%", "current": f"%{key_id}:%"}
    return f"{text} LIKE :sealed AND {text} NOT LIKE :current", likes
