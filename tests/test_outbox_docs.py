"""docs/outbox.md: its programs are programs, and its table names every destination there is."""

import re
from pathlib import Path

import resilient
from resilient import Destination

TEXT = (Path(__file__).parents[1] / "docs/outbox.md").read_text()


def test_the_programs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(compile(block, "docs/outbox.md", "exec"), names)  # noqa: S102 - our own text
    assert list(names["app"].outbox.destinations) == ["orders"]


def test_every_destination_is_named():
    kinds = [
        name for name in resilient.__all__
        if isinstance(getattr(resilient, name), type) and issubclass(getattr(resilient, name), Destination)
    ]  # fmt: skip
    assert len(kinds) == 7
    assert [name for name in kinds if name not in ("Destination", "Callback") and f"`{name}(" not in TEXT] == []
