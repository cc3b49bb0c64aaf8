"""docs/providers.md: its programs run, and its provider keeps the contract."""

import re
from pathlib import Path

import resilient
from resilient import Paginator, Rotation, Word

TEXT = (Path(__file__).parents[2] / "docs" / "providers.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_programs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = {}
    for block in BLOCKS:
        exec(compile(block, "docs/providers.md", "exec"), program)  # noqa: S102 - our own text
    program["test_contract"]()
    assert program["SEARCHING"].limit_patterns()["acme/*/search"]


def test_everything_there_is_is_named():
    for name in (*(f"`{r.name}`" for r in Rotation), *(f"`{w.name}`" for w in Word if w is not Word.NONE)):
        assert name in TEXT
    for name in resilient.__all__:
        found = getattr(resilient, name)
        if isinstance(found, type) and issubclass(found, Paginator) and found is not Paginator:
            assert f"`{name}(" in TEXT
