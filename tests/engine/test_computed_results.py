"""Results whose models have computed fields and forbid extras: they are stored with them, and can be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError, computed_field

from resilient import Job, Resilient, handler
from resilient.engine.ground.kinds import result_of
from tests.helpers import settle


class Line(BaseModel, extra="forbid"):
    net: int

    @computed_field
    @property
    def gross(self) -> int:
        return self.net * 2


class Bill(Line):
    lines: list[Line | None]


class Order(BaseModel):
    id: int


@handler("line")
async def line(job: Job[None]) -> Line:
    return Line(net=1)


@pytest.mark.parametrize("model", [Bill, Bill | None, Bill | Order])
def test_what_is_stored_is_read(model):
    bill = Bill(net=1, lines=[Line(net=2), None, Line(net=3)])
    document = json.loads(TypeAdapter(Any).dump_json(bill))
    assert document["gross"] == 2
    assert result_of(TypeAdapter(model), document) == bill


@pytest.mark.parametrize("other", [{"gross": 3}, {"other": 1}, {"net": "x"}, {"lines": [{"net": 1, "gross": 3}]}])
def test_what_no_such_model_stores_is_refused(other):
    document = json.loads(TypeAdapter(Any).dump_json(Bill(net=1, lines=[])))
    with pytest.raises(ValidationError):
        result_of(TypeAdapter(Bill), document | other)


async def test_a_step_reads_the_result_of_another_one(database):
    seen = []

    @handler("read")
    async def read(job: Job[None]) -> None:
        seen.append(await job.result_of(line))

    own = Resilient(database, handlers=[line, read], upgrade=False)
    async with own.workflow("w", resource_key="shop/1") as wf:
        wf.step(read, after=wf.step(line))
    await settle(own)
    assert seen == [Line(net=1)]
    assert (await own.workflows.get(wf.id)).step("line").result == {"net": 1, "gross": 2}
    await own.close()
