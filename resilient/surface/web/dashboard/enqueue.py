"""Writing jobs: a new one, or other values for one that waits, by a form from the payload's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import BadPayload, BadResourceKey, InvalidInput, SetupError, UnknownKind
from resilient.core.jobs.records import plain as as_json
from resilient.core.jobs.states import TERMINAL, JobState
from resilient.engine.events.outbox import PREFIX as EVENTS
from resilient.engine.ground.kinds import Kind
from resilient.surface.cli.jobs import moment
from resilient.surface.web.dashboard.forms import PREFIX, RAW, Field, PayloadForm, form_for
from resilient.surface.web.dashboard.guard import RefusedChangeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.responses import Response

    from resilient.core.jobs.records import JobInfo
    from resilient.surface.web.dashboard.visit import Visit

    Page = Callable[[Visit], Awaitable[Response]]
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
            values["run_at"] = visit.now - at if not hasattr(at, "tzinfo") else at
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
    return _edit_page(visit, info, form, options)


def _edit_page(visit: Visit, info: JobInfo, form: PayloadForm, options: PayloadForm) -> Response:
    refused = form.is_refused or options.is_refused
    return visit.render(
        "edit.html", _REFUSED if refused else 200, job=info, form=form, options=options, refused=refused, stored=False,
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
    if any(one.value.strip() for one in form.fields):
        payload = form.payload()
        if not form.is_refused and as_json(payload) != as_json(info.payload):  # a form has the old values, too
            chosen["payload"] = payload
    if form.is_refused or options.is_refused:
        return _edit_page(visit, info, form, options)
    if not chosen:
        form.errors.append("Nothing to edit: fill at least one field.")
        return _edit_page(visit, info, form, options)
    try:
        async with visit.audited("jobs edit", job_id) as outcome:
            tally = await visit.app.jobs.edit(job_id, **chosen, new_operation=values.get("new_operation") == "yes")
            outcome.update(tally.to_json(), fields=sorted(chosen))
    except InvalidInput as error:
        options.refuse(str(error).partition(" ")[0], str(error))
        return _edit_page(visit, info, form, options)
    text = "Edited." if tally.edited else "Nothing was changed: it runs, or it is over."
    return visit.back(visit.url(f"/jobs/{visit.seg(job_id)}"), text, bad=not tally.edited)


PAGES: dict[str, tuple[str, Page]] = {"/enqueue": ("jobs", enqueue), "/jobs/{id}/edit": ("jobs", edit)}
CHANGES: dict[str, tuple[str, Page]] = {"/do/enqueue": ("jobs", change_enqueue), "/do/edit": ("jobs", change_edit)}
