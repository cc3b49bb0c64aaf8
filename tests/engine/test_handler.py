"""Declarations: what the argument of a handler may say it is."""

from __future__ import annotations

from typing import Annotated, Any, Protocol, TypeVar

import pytest
from pydantic import BaseModel

from resilient import Batch, Job, SetupError, SyncBatch, SyncJob, handler
from resilient.engine.run.job import BaseJob


class Mail(BaseModel):
    to: str


P = TypeVar("P")


class Alias312:
    __value__ = Job[Mail]


ALIAS = Alias312()  # as `type ALIAS = Job[Mail]` of Python 3.12 is


class Mine(Protocol[P]):
    payload: P


async def payload(job: Mail) -> None: ...
def plain_payload(job: Mail) -> None: ...
async def a_list(job: list[Mail]) -> None: ...
async def a_dict(job: dict[str, Any]) -> None: ...
async def text(job: str) -> None: ...
async def optional(job: Mail | None) -> None: ...
async def marked(job: Annotated[Mail, "payload"]) -> None: ...
async def one(job: Job[Mail]) -> None: ...
def several(jobs: SyncBatch[Mail]) -> None: ...


@pytest.mark.parametrize(
    ("fn", "options", "said", "wanted"),
    [
        (payload, {}, "Mail", "Job[Mail]"),
        (plain_payload, {}, "Mail", "SyncJob[Mail]"),
        (payload, {"model": Mail}, "Mail", "Job[Mail]"),
        (plain_payload, {"model": Mail}, "Mail", "SyncJob[Mail]"),
        (optional, {}, "Mail", "Job[Mail]"),
        (marked, {}, "Mail", "Job[Mail]"),
        (payload, {"batch": 3}, "Mail", "Batch[Mail]"),
        (plain_payload, {"batch": 3}, "Mail", "SyncBatch[Mail]"),
        (text, {}, "str", "Job[str]"),
        (a_dict, {}, "dict[str, typing.Any]", "Job[dict[str, typing.Any]]"),
        (a_list, {}, "list[tests.engine.test_handler.Mail]", "Job[list[tests.engine.test_handler.Mail]]"),
        (one, {"batch": 3}, "resilient.engine.run.job.Job[tests.engine.test_handler.Mail]", "Batch[...]"),
        (several, {}, "resilient.engine.run.job.SyncBatch[tests.engine.test_handler.Mail]", "SyncJob[...]"),
    ],
)
def test_the_payloads_type_in_the_jobs_place_is_an_error_that_says_what_to_write(fn, options, said, wanted):
    with pytest.raises(SetupError) as caught:
        handler("mail.send", **options)(fn)
    called = wanted.partition("[")[0]
    assert str(caught.value) == (
        f"handler 'mail.send' is called with a {called}, and its argument is annotated as {said}: write `{wanted}`;"
        " the payload of a job is job.payload"
    )


async def bare(job: Job) -> None: ...
async def nothing(job) -> None: ...
async def anything(job: Any) -> None: ...
async def base(job: BaseJob[Mail]) -> None: ...
async def own(job: Mine[Mail]) -> None: ...
async def variable(job: P) -> None: ...
def plain(job: SyncJob[Mail]) -> None: ...
async def batch(jobs: Batch[Mail]) -> None: ...
async def either(job: Job[Mail] | SyncJob[Mail]) -> None: ...
async def either_bare(job: Job | SyncJob) -> None: ...
async def noted(job: Annotated[Job[Mail], "note"]) -> None: ...
async def alias(job: ALIAS) -> None: ...
async def unreadable(job: Job[OnlyForTheTypeChecker]) -> None: ...  # noqa: F821


@pytest.mark.parametrize(
    ("fn", "model", "options"),
    [
        (one, Mail, {}),
        (plain, Mail, {}),
        (base, Mail, {}),
        (own, Mail, {}),
        (batch, Mail, {"batch": 3}),
        (several, Mail, {"batch": 3}),
        (bare, None, {}),
        (nothing, None, {}),
        (anything, None, {}),
        (variable, None, {}),
        (one, dict, {"model": dict}),
        (either, Mail, {}),
        (either_bare, None, {}),
        (noted, Mail, {}),
        (alias, Mail, {}),
        (unreadable, Mail, {"model": Mail}),
    ],
)
def test_the_model_is_read_from_the_annotation(fn, model, options):
    assert handler("mail.send", **options)(fn).model is model
