"""docs/security.md promises nothing that no test holds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())


def test_there_are_some():
    assert len([name for _, name in NAMED if name]) > 30


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)))
def test_it_exists(path, name):
    assert (ROOT / path).exists()
    assert not name or re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
