"""docs/workflows.md: its programs are programs, and its tables name everything there is."""

import re
from pathlib import Path
from typing import get_args

import resilient
from resilient import Job, WorkflowState, handler
from resilient.engine.ground.encoder import OnDead, OrderingPolicy

TEXT = (Path(__file__).parents[1] / "docs/workflows.md").read_text()


def test_its_programs_are_programs():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names = {**vars(resilient), "Order": dict, "Receipt": str, "handler": handler, "Job": Job}
    for block in blocks:
        compile(block, "docs/workflows.md", "exec", flags=0x2000)  # await at the top level
    handlers = "".join(blocks[2].partition("\nasync with")[:1])
    exec(compile(handlers, "docs/workflows.md", "exec"), names)  # noqa: S102 - our own text
    assert names["charge"].kind == "order.charge"


def test_every_state_and_policy_is_told():
    for word in WorkflowState:
        assert f"| `{word}` |" in TEXT
    for word in (*get_args(OnDead), *get_args(OrderingPolicy)):
        assert f'"{word}"' in TEXT
