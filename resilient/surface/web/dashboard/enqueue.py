"""Writing jobs: a new one, or other values for one that waits, by a form from the payload's model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from pydantic import PydanticUserError, ValidationError

from resilient.core.base.errors import BadPayload, BadResourceKey, InvalidInput, SetupError, UnknownKind
from resilient.core.base.instants import add
from resilient.core.base.numbers import json_value
from resilient.core.base.phrases import in_json, plain
from resilient.core.jobs.records import plain as as_json
from resilient.core.jobs.states import TERMINAL, JobState
from resilient.engine.events.outbox import PREFIX as EVENTS
from resilient.engine.ground.kinds import Kind, adapter_of
from resilient.surface.cli.jobs import moment
from resilient.surface.web.dashboard.guard import RefusedChangeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pydantic import TypeAdapter
    from starlette.responses import Response

    from resilient.core.jobs.records import JobInfo
    from resilient.surface.web.dashboard.visit import Visit

    Page = Callable[[Visit], Awaitable[Response]]


# -- the payload as a form --------------------------------------------------------------------------------------------
#
# A payload as a form: fields from the JSON Schema of its model, and what was typed back as JSON.
#
# Plain values have a field each; what is nested (lists, objects, unions) is written as JSON in a field of its own. A
# model that is no object, a kind without a model and one that this dashboard does not know take JSON as a whole. The
# model judges what was typed, and each of its complaints goes to its field.

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


_REFUSED: Final = 422
_CHANGEABLE: Final = (JobState.BLOCKED, JobState.SCHEDULED, JobState.READY, JobState.DEAD)


def _options(*, is_new: bool) -> PayloadForm:
    """The fields beside the payload."""
    fields = [
        Field("priority", "Priority", "number", hint="0; the highest first, -100 to 100" if is_new else ""),
        Field("run_at", "Run at", "text", hint="+10m or 2030-01-31T12:00Z"),
        Field("max_attempts", "Attempts at most", "text", hint="none: without end"),
    ]
    if is_new:
        fields += [
            Field("unique_key", "Unique key", "text", hint="no second job with it, until it starts"),
            Field("ordering_key", "Ordering key", "text", hint="one after the other"),
            Field("tags", "Tags", "text", hint="user=42, team=a"),
        ]
    return PayloadForm(fields, is_raw=False)


# -- a new job -------------------------------------------------------------------------------------------------------


async def enqueue(visit: Visit) -> Response:
    """The form for a new job; without a kind the kinds to choose from. ``from``: a job to begin with."""
    query = visit.query
    name, key, payload = query.get("kind", ""), query.get("resource", ""), None
    if query.get("from"):
        info = await visit.app.jobs.get(query["from"])
        name, key = info.kind, info.resource_key
        payload = info.payload if _may_see(visit, info) else None
    form, options = _form(visit, name, raw=query.get("raw") == "1"), _options(is_new=True)
    if payload is not None:
        form = form if form.fits(payload) else _form(visit, name, raw=True)
        form.fill_payload(payload)
    return _page(visit, name, key, form, options, stored=payload is None)


def _kinds(visit: Visit) -> dict[str, Kind[Any]]:
    """The kinds that can be enqueued by hand: an event is published by the program only."""
    return {name: one for name, one in sorted(visit.app.declared.items()) if not name.startswith(EVENTS)}


def _form(visit: Visit, name: str, *, raw: bool) -> PayloadForm:
    return form_for(_kinds(visit).get(name), raw=raw)


def _page(
    visit: Visit, name: str, key: str, form: PayloadForm, options: PayloadForm, *, stored: bool = True,
    key_error: str = "",
) -> Response:  # fmt: skip
    refused = form.is_refused or options.is_refused or bool(key_error)
    return visit.render(
        "enqueue.html", _REFUSED if refused else 200, kinds=list(_kinds(visit)), kind=name, key=key, form=form,
        options=options, key_error=key_error, refused=refused, knows=name in _kinds(visit), stored=stored,
        has_fields=name in _kinds(visit) and not form_for(_kinds(visit)[name]).is_raw,
        may_write=visit.operator.may("payloads"),
    )  # fmt: skip


async def change_enqueue(visit: Visit) -> Response:
    """Enqueue the job that the form describes; a form with errors comes back with each beside its field."""
    values = visit.form
    name, key = values.get("kind", "").strip(), values.get("resource", "").strip()
    form, options = _form(visit, name, raw=RAW in values), _options(is_new=True)
    form.fill(values)
    options.fill(values)
    _check_right(visit, values)
    payload = form.payload()
    chosen = _values(visit, options)
    if tags := values.get("tags", "").strip():
        chosen["tags"] = _tags(tags, options)
    if form.is_refused or options.is_refused:
        return _page(visit, name, key, form, options, stored=False)
    kind = _kinds(visit).get(name)
    try:
        what = Kind(name) if kind is None and not _kinds(visit) else visit.app.ground.encoder.kind_of(name)
        async with visit.audited("jobs enqueue", f"{name} on {key}") as outcome:
            job = await visit.app.enqueue(what, payload, resource_key=key, **chosen)
            outcome["job"] = str(job.id)
    except BadResourceKey as error:
        return _page(visit, name, key, form, options, stored=False, key_error=str(error))
    except (UnknownKind, BadPayload, SetupError) as error:
        form.refuse(RAW, str(error))
        return _page(visit, name, key, form, options, stored=False)
    except InvalidInput as error:
        options.refuse(str(error).partition(" ")[0], str(error))
        return _page(visit, name, key, form, options, stored=False)
    text = "Enqueued." if job.created is not False else "Nothing new: this job has the same unique key."
    return visit.back(visit.url(f"/jobs/{job.id}"), text, bad=job.created is False)


def _check_right(visit: Visit, values: Mapping[str, str]) -> None:
    is_written = any(value.strip() for name, value in values.items() if name == RAW or name.startswith(PREFIX))
    if is_written and not visit.operator.may("payloads"):
        raise RefusedChangeError(f"{visit.operator.name} lacks the right “payloads”: who may not read them writes none")


def _values(visit: Visit, options: PayloadForm) -> dict[str, Any]:
    """The options that were filled in; what cannot be read is refused beside its field."""
    values: dict[str, Any] = {}
    texts = {one.name: one.value.strip() for one in options.fields if one.value.strip()}
    for name in ("unique_key", "ordering_key"):
        if name in texts:
            values[name] = texts[name]
    for name in ("priority", "max_attempts"):
        if name in texts:
            values[name] = _whole(name, texts[name], options)
    if "run_at" in texts:
        try:
            at = moment("run at", texts["run_at"])
        except InvalidInput as error:
            options.refuse("run_at", str(error))
        else:
            values["run_at"] = add(visit.now, -at) if isinstance(at, timedelta) else at
    return values


def _whole(name: str, text: str, options: PayloadForm) -> int | None:
    if name == "max_attempts" and text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        options.refuse(name, f"{text[:40]!r} is not a whole number")
        return None


def _tags(text: str, options: PayloadForm) -> dict[str, str]:
    tags = {}
    for one in text.split(","):
        name, equals, value = one.partition("=")
        if not equals or not name.strip():
            options.refuse("tags", f"{one.strip()[:40]!r}: write name=value, with commas between")
        tags[name.strip()] = value.strip()
    return tags


def _may_see(visit: Visit, info: JobInfo) -> bool:
    """Whether a form begins with the stored payload: one that is partly hidden would be written back with gaps."""
    return visit.operator.may("payloads") and not visit.app.ground.encoder.is_hidden(info.kind, info.payload)


# -- other values ----------------------------------------------------------------------------------------------------


async def edit(visit: Visit) -> Response:
    """The form for other values of a job that waits or is dead."""
    info = await visit.app.jobs.get(visit.request.path_params["id"])
    if info.state not in _CHANGEABLE:
        reason = "it is over" if info.state in TERMINAL else "it runs"
        return visit.back(visit.url(f"/jobs/{info.id}"), f"It cannot be edited: {reason}.", bad=True)
    form, options = _form(visit, info.kind, raw=visit.query.get("raw") == "1"), _options(is_new=False)
    if _may_see(visit, info):
        form = form if info.payload is None or form.fits(info.payload) else _form(visit, info.kind, raw=True)
        form.fill_payload(info.payload)
    return _edit_page(visit, info, form, options, _marks_of(visit, info, form))


def _marks_of(visit: Visit, info: JobInfo, form: PayloadForm) -> str:
    """The payload that a form begins with and how the form shows it, as signatures; empty if it shows none."""
    if not _may_see(visit, info):
        return ""
    texts = {one.name: one.value.replace("\r\n", "\n").strip() for one in form.fields}
    parts = (as_json(info.payload), texts)
    return " ".join(visit.guard.sign(f"seen\n{info.id}\n{json.dumps(one, sort_keys=True)}") for one in parts)


def _edit_page(visit: Visit, info: JobInfo, form: PayloadForm, options: PayloadForm, marks: str) -> Response:
    refused = form.is_refused or options.is_refused
    return visit.render(
        "edit.html", _REFUSED if refused else 200, job=info, form=form, options=options, refused=refused, stored=False,
        marks=marks,
        may_write=visit.operator.may("payloads"), new_operation=visit.form.get("new_operation") == "yes",
    )  # fmt: skip


async def change_edit(visit: Visit) -> Response:
    """Give a job the values that were filled in; a form with errors comes back with each beside its field."""
    values, job_id = visit.form, visit.form.get("id", "")
    info = await visit.app.jobs.get(job_id)
    form, options = _form(visit, info.kind, raw=RAW in values), _options(is_new=False)
    form.fill(values)
    options.fill(values)
    _check_right(visit, values)
    chosen = _values(visit, options)
    marks = values.get("marks", "")
    if any(one.value.strip() for one in form.fields) and not _is_untouched(visit, info, form, marks):
        payload = form.payload()
        if not form.is_refused and as_json(payload) != as_json(info.payload):  # a form has the old values, too
            chosen["payload"] = payload
            if marks.partition(" ")[0] not in ("", _marks_of(visit, info, form).partition(" ")[0]):
                form.errors.append(_CHANGED)
    if form.is_refused or options.is_refused:
        return _edit_page(visit, info, form, options, marks)
    if not chosen:
        form.errors.append("Nothing to edit: fill at least one field.")
        return _edit_page(visit, info, form, options, marks)
    try:
        async with visit.audited("jobs edit", job_id) as outcome:
            tally = await visit.app.jobs.edit(job_id, **chosen, new_operation=values.get("new_operation") == "yes")
            outcome.update(tally.to_json(), fields=sorted(chosen))
    except InvalidInput as error:
        options.refuse(str(error).partition(" ")[0], str(error))
        return _edit_page(visit, info, form, options, marks)
    text = "Edited." if tally.edited else "Nothing was changed: it runs, or it is over."
    return visit.back(visit.url(f"/jobs/{visit.seg(job_id)}"), text, bad=not tally.edited)


_CHANGED: Final = (
    "Somebody has changed the payload since this form was opened. Nothing was saved: open the job anew, and edit that."
)


def _is_untouched(visit: Visit, info: JobInfo, form: PayloadForm, marks: str) -> bool:
    """Whether the payload's fields are as they were opened: they would write an old payload over a newer one."""
    return bool(marks) and marks.partition(" ")[2] == _marks_of(visit, info, form).partition(" ")[2]


PAGES: dict[str, tuple[str, Page]] = {"/enqueue": ("jobs", enqueue), "/jobs/{id}/edit": ("jobs", edit)}
CHANGES: dict[str, tuple[str, Page]] = {"/do/enqueue": ("jobs", change_enqueue), "/do/edit": ("jobs", change_edit)}
