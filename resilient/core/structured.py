"""Structured header fields (RFC 9651): the part that rate-limit fields need.

Lists and Dictionaries of Items with parameters; inner lists count as malformed. A field that breaks the
grammar is None as a whole, as the RFC demands: half of a field is worse than none.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from resilient.core.bounds import STRUCTURED_FIELD


class Date(NamedTuple):
    """A Date (RFC 9651, 3.3.7): seconds since 1970."""

    seconds: int


Bare = str | int | float | bool | bytes | Date

_SPACE: Final = re.compile(r" *")  # before a parameter
_BLANKS: Final = re.compile(r"[ \t]*")  # around a comma
_KEY: Final = re.compile(r"[a-z*][a-z0-9_\-.*]*")
_STRING: Final = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_NUMBER: Final = re.compile(r"-?(?:[0-9]{1,12}\.[0-9]{1,3}|[0-9]{1,15})")
_DATE: Final = re.compile(r"@(-?[0-9]{1,15})")
_DISPLAY: Final = re.compile(r'%"((?:[\x20-\x21\x23-\x24\x26-\x7e]|%[0-9a-f]{2})*)"')
_TOKEN: Final = re.compile(r"[A-Za-z*][A-Za-z0-9!#$%&'*+\-.^_`|~:/]*")
_BYTES: Final = re.compile(r":[A-Za-z0-9+/]*={0,2}:")
_BOOLEAN: Final = re.compile(r"\?[01]")


class Item(NamedTuple):
    """A bare value with its parameters. Tokens are text like strings; byte sequences keep their base64."""

    value: Bare
    params: dict[str, Bare]


class _Malformed(Exception):
    """Never leaves this module: the field becomes None."""


class _Reader:
    """Walks over a field from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, pattern: re.Pattern[str]) -> str | None:
        if (m := pattern.match(self.text, self.at)) is None:
            return None
        self.at = m.end()
        return m.group()

    def eat(self, char: str) -> bool:
        if not self.text.startswith(char, self.at):
            return False
        self.at += 1
        return True

    def key(self) -> str:
        if (key := self.take(_KEY)) is None:
            raise _Malformed
        return key

    def bare(self) -> Bare:  # noqa: PLR0911 - one for each type
        if (text := self.take(_STRING)) is not None:
            return re.sub(r'\\(["\\])', r"\1", text[1:-1])
        if (text := self.take(_NUMBER)) is not None:
            return float(text) if "." in text else int(text)
        if (text := self.take(_BOOLEAN)) is not None:
            return text == "?1"
        if (text := self.take(_BYTES)) is not None:
            return text[1:-1].encode()
        if (text := self.take(_TOKEN)) is not None:
            return text
        if (text := self.take(_DATE)) is not None:
            return Date(int(text[1:]))
        if (text := self.take(_DISPLAY)) is not None:
            return self.display(text[2:-1])
        raise _Malformed

    def display(self, text: str) -> str:
        try:
            return unquote_to_bytes(text).decode()
        except UnicodeDecodeError:
            raise _Malformed from None

    def params(self) -> dict[str, Bare]:
        found: dict[str, Bare] = {}
        while self.eat(";"):
            self.take(_SPACE)
            key = self.key()
            found[key] = self.bare() if self.eat("=") else True
        return found

    def item(self) -> Item:
        return Item(self.bare(), self.params())

    def member(self) -> tuple[str, Item]:
        key = self.key()
        return key, self.item() if self.eat("=") else Item(value=True, params=self.params())

    def another(self) -> bool:
        """Whether a comma leads on to another member; a trailing comma is malformed."""
        self.take(_BLANKS)
        if self.at == len(self.text):
            return False
        if not self.eat(","):
            raise _Malformed
        self.take(_BLANKS)
        if self.at == len(self.text):
            raise _Malformed
        return True


def parse_list(text: str) -> list[Item] | None:
    """The Items of a List field, or None if it is malformed or empty."""
    if not (text := text.strip(" ")) or len(text) > STRUCTURED_FIELD.value:
        return None
    reader = _Reader(text)
    try:
        items = [reader.item()]
        while reader.another():
            items.append(reader.item())
    except _Malformed:
        return None
    return items


def parse_dictionary(text: str) -> dict[str, Item] | None:
    """The members of a Dictionary field (the last of a name wins), or None if it is malformed or empty."""
    if not (text := text.strip(" ")) or len(text) > STRUCTURED_FIELD.value:
        return None
    reader = _Reader(text)
    try:
        members = dict([reader.member()])
        while reader.another():
            members.update([reader.member()])
    except _Malformed:
        return None
    return members
