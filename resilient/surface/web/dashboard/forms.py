"""A payload as a form: fields from the JSON Schema of its model, and what was typed back as JSON.

Plain values have a field each; what is nested (lists, objects, unions) is written as JSON in a field of its own. A
model that is no object, a kind without a model and one that this dashboard does not know take JSON as a whole. The
model judges what was typed, and each of its complaints goes to its field.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from pydantic import PydanticUserError, ValidationError

from resilient.core.base.numbers import json_value
from resilient.core.base.phrases import in_json, plain
from resilient.engine.ground.kinds import adapter_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import TypeAdapter

    from resilient.engine.ground.kinds import Kind

PREFIX: Final = "p."  # of the names of the payload's fields
RAW: Final = "payload"  # the field of a payload that is written as JSON
MOST: Final = 60  # fields; a larger model is written as JSON
_NUMBERS: Final = frozenset({"integer", "number"})
_HINTS: Final = {
    "date-time": "2030-01-31T12:00Z", "date": "2030-01-31", "time": "12:00", "duration": "PT15M", "uuid": "a UUID",
    "email": "a@example.com", "uri": "https://example.com",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """One field: ``way`` is "text", "number", "choice", "json" or "secret"; ``value`` is what stands in it."""

    name: str
    label: str
    way: str
    is_required: bool = False
    value: str = ""
    hint: str = ""
    help: str = ""
    choices: tuple[tuple[str, str], ...] = ()  # JSON text, word
    error: str = ""

    @property
    def id(self) -> str:
        """The id of its element, which the summary of the errors leads to."""
        return "f-" + "".join(c if c.isalnum() or c in "_-" else f"-{ord(c):x}-" for c in self.name)


@dataclass(slots=True)
class PayloadForm:
    """The fields of a kind's payload: of its properties, or of JSON as a whole."""

    fields: list[Field]
    is_raw: bool
    adapter: TypeAdapter[Any] | None = None
    errors: list[str] = field(default_factory=list)  # of no field

    def fill(self, values: Mapping[str, str]) -> None:
        """Put what was typed into the fields."""
        self.fields = [replace(one, value=values.get(one.name, one.value)) for one in self.fields]

    def fill_payload(self, payload: Any) -> None:
        """Put the values of a payload into the fields."""
        if self.is_raw or not isinstance(payload, dict):
            self.fields = [replace(one, value=_text(payload)) if one.name == RAW else one for one in self.fields]
            return
        self.fields = [replace(one, value=_value_of(one, payload)) for one in self.fields]

    def fits(self, payload: Any) -> bool:
        """Whether the fields give a payload back as it is: a line of text loses line breaks and hidden characters."""
        if self.is_raw:
            return True
        ways = {one.name.removeprefix(PREFIX): one.way for one in self.fields}
        return isinstance(payload, dict) and all(
            name in ways and (ways[name] not in ("text", "secret") or _is_line(value))
            for name, value in payload.items()
        )

    def refuse(self, name: str, message: str) -> None:
        """Write an error beside its field; one without a field stands above them all."""
        if name not in {one.name for one in self.fields}:
            self.errors.append(message)
        self.fields = [replace(one, error=message) if one.name == name else one for one in self.fields]

    @property
    def is_refused(self) -> bool:
        """Whether something is wrong."""
        return bool(self.errors) or any(one.error for one in self.fields)

    def payload(self) -> Any:
        """What was typed, checked; None with errors beside the fields if it does not fit."""
        if (value := self._typed()) is None and self.is_refused:
            return None
        if self.adapter is None:
            return value
        try:
            return self.adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            for one in error.errors(include_url=False, include_context=False, include_input=False):
                self._complain(one["loc"], one["msg"])
            return None

    def _complain(self, place: tuple[int | str, ...], message: str) -> None:
        name = RAW if self.is_raw else f"{PREFIX}{place[0]}" if place else ""
        inner = ".".join(str(part) for part in (place if self.is_raw else place[1:]))
        self.refuse(name, f"{inner}: {message}" if inner else message)

    def _typed(self) -> Any:
        """The JSON value of what was typed."""
        if self.is_raw:
            text = self.fields[0].value.strip()
            return None if not text else self._parsed(self.fields[0], text)
        values: dict[str, Any] = {}
        for one in self.fields:
            if not one.value.strip():
                continue  # left out: the model says whether it may be, and what it is then
            parsed = one.value if one.way in ("text", "secret") else self._parsed(one, one.value)
            values[one.name.removeprefix(PREFIX)] = parsed
        return None if self.is_refused else values

    def _parsed(self, one: Field, text: str) -> Any:
        try:
            return json_value(text)
        except (ValueError, RecursionError) as error:
            if one.way == "number":
                self.refuse(one.name, f"{text.strip()[:40]!r} is not a number")
            else:
                self.refuse(one.name, f"this is not JSON: {error}")
            return None


def form_for(kind: Kind[Any] | None, *, raw: bool = False) -> PayloadForm:
    """The form of a kind's payload; ``raw``: as JSON even if it has fields."""
    adapter = None if kind is None or kind.model is None else adapter_of(kind.model)
    if adapter is None:
        return PayloadForm([_RAW_FIELD], is_raw=True)
    try:
        document = adapter.json_schema()
    except PydanticUserError:  # a type that has no schema
        return PayloadForm([_RAW_FIELD], is_raw=True, adapter=adapter)
    schema = _resolved(document, document)
    names = schema.get("properties", {})
    if raw or schema.get("type") != "object" or not names or len(names) > MOST:
        return PayloadForm([replace(_RAW_FIELD, help=schema.get("description", ""))], is_raw=True, adapter=adapter)
    needed = frozenset(schema.get("required", ()))
    fields = [_field(name, one, document, is_required=name in needed) for name, one in names.items()]
    return PayloadForm(fields, is_raw=False, adapter=adapter)


_RAW_FIELD: Final = Field(RAW, "Payload", "json", hint='JSON, such as {"id": 1}; empty: none')


def _resolved(schema: Any, document: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that a reference means, with what stands beside the reference."""
    for _ in range(8):
        reference = schema.get("$ref", "") if isinstance(schema, dict) else ""
        if not reference.startswith("#/$defs/"):
            break
        schema = {**document.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {}), **_beside(schema)}
    return dict(schema) if isinstance(schema, dict) else {}


def _beside(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != "$ref"}


def _field(name: str, schema: Any, document: Mapping[str, Any], *, is_required: bool) -> Field:
    outer = _resolved(schema, document)
    parts = [_resolved(one, document) for one in outer.get("anyOf", ())]
    some = [one for one in parts if one.get("type") != "null"]
    inner = {**some[0], **_beside(outer)} if len(some) == 1 else outer
    way, choices = _way(inner)
    default = outer.get("default")
    hint = _HINTS.get(inner.get("format", ""), "JSON" if way == "json" else "")
    if "default" in outer:
        hint = f"empty: {_text(default)}" if default is not None else "empty: none"
    return Field(
        PREFIX + name, str(outer.get("title") or name), way, is_required=is_required, hint=hint, choices=choices,
        help=str(outer.get("description", "")),
    )  # fmt: skip


def _way(schema: Mapping[str, Any]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """How a value is written, and what can be chosen."""
    if (values := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
        return "choice", tuple((json.dumps(one), str(one)) for one in values)
    kind = schema.get("type")
    if kind == "boolean":
        return "choice", (("true", "yes"), ("false", "no"))
    if kind in _NUMBERS:
        return "number", ()
    if kind == "string":
        return ("secret" if schema.get("format") == "password" or schema.get("writeOnly") else "text"), ()
    return "json", ()


def _text(value: Any) -> str:
    """A value as JSON text; nothing for none."""
    indent = 2 if isinstance(value, dict | list) else None
    return "" if value is None else in_json(json.dumps(value, ensure_ascii=False, indent=indent))


def _is_line(value: Any) -> bool:
    return not isinstance(value, str) or (plain(value) == value and "\n" not in value)


def _value_of(one: Field, payload: Mapping[str, Any]) -> str:
    value = payload.get(one.name.removeprefix(PREFIX))
    if one.way in ("text", "secret"):
        return value if isinstance(value, str) else _text(value)
    return "" if value is None else json.dumps(value) if one.way == "choice" else _text(value)
