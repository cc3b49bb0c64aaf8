"""The types of ordering, dependencies and workflows, as a specification: mypy and pyright read this file."""

from __future__ import annotations

from typing import Any, assert_type
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from resilient import (
    Job,
    JobState,
    Resilient,
    Step,
    StepInfo,
    SyncJob,
    SyncWorkflow,
    Workflow,
    WorkflowInfo,
    WorkflowState,
    handler,
)


class Order(BaseModel):
    """A payload."""

    id: int


class Receipt(BaseModel):
    """A result."""

    charge: str


@handler("charge")
async def charge(job: Job[Order]) -> Receipt:
    """An async step."""
    return Receipt(charge=str(job.payload.id))


@handler("refund")
async def refund(job: Job[Order]) -> None:
    """Its undo."""
    assert_type(await job.result_of(charge), Receipt)


@handler("wrong")
async def wrong(job: Job[str]) -> None:
    """An undo of another payload."""


@handler("pack")
def pack(job: SyncJob[Order]) -> int:
    """A plain step."""
    assert_type(job.result_of(charge), Receipt)
    assert_type(job.results_of(charge), list[Receipt])
    with job.workflow() as wf:
        assert_type(wf, SyncWorkflow)
    return 1


@handler("ship")
async def ship(job: Job[Order]) -> None:
    """Looks back."""
    assert_type(await job.results_of(pack), list[int])
    async with job.workflow("more") as wf:
        assert_type(wf, Workflow)
    assert_type(job.ordering_key, str | None)
    assert_type(job.order_no, int | None)


async def build(app: Resilient, session: AsyncSession, sync_session: Session) -> None:
    """What a program writes."""
    async with app.workflow("order", session=session, resource_key="shop/1") as wf:
        paid = wf.step(charge, Order(id=1), undo=refund)
        packed = wf.step(pack, Order(id=1), name="pack it", delay=5)
        wf.step(ship, Order(id=1), after=[paid, packed], resource_key="ups/1")
        wf.step("other", 1, after=paid)
        wf.step(charge, Order(id=1), undo=wrong)  # type: ignore[misc]
        wf.step(charge, 1)  # type: ignore[misc]
    assert_type(paid, Step[Receipt])
    assert_type(packed, Step[int])
    assert_type(wf.id, UUID)
    with app.sync.workflow("order", session=sync_session) as sync_wf:
        assert_type(sync_wf.step(charge, Order(id=1), resource_key="a"), Step[Receipt])


async def look(app: Resilient, job: Job[Any], paid: Step[Receipt]) -> None:
    """Workflows from outside, and what a job may be told to wait for."""
    info = await app.workflows.get("id")
    assert_type(info, WorkflowInfo)
    assert_type(info.state, WorkflowState)
    assert_type(info.step("charge"), StepInfo)
    assert_type(info.steps[0].state, JobState | None)
    assert_type(await app.workflows.list(state="stuck", limit=5), list[WorkflowInfo])
    assert_type(app.sync.workflows.cancel(info.id), WorkflowInfo)
    assert_type(await job.result_of(paid), Receipt)
    first = await app.enqueue(ship, Order(id=1), resource_key="a", ordering_key="k", ordering_policy="skip")
    await app.enqueue(ship, Order(id=1), resource_key="a", after=[first, paid, "id"], on_dead="wait")
