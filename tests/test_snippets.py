"""Every Python block of the README and the guides stands the type checker, as it stands there.

What a block takes from the reader's own program (`Order`, `session`, `settings`) is a name without a type.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import resilient

ROOT = Path(__file__).parent.parent
KNOWN = ROOT / ".mypy_cache"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FREEDOMS = (  # of a reader's own style
    "name-defined", "no-redef", "type-arg", "no-untyped-def", "no-any-return", "untyped-decorator", "empty-body",
    "return-value",
)  # fmt: skip


def as_module(page):
    """The blocks of a page in one module; one that awaits at its top level stands in a coroutine."""
    text = re.sub(r"^from app import .*\n", "", page.read_text(), flags=re.MULTILINE)  # a block above it on the page
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    taken = set(re.findall(r"^(?:from|import) .*", "\n".join(blocks), re.MULTILINE))
    own = {word for line in taken for word in re.findall(r"\w+", line)}
    ours = set(re.findall(r"\w+", "\n".join(blocks))).intersection(resilient.__all__) - own
    parts = [f"from resilient import {name}" for name in sorted(ours)]
    for number, block in enumerate(blocks):
        try:
            ast.parse(block)
            compile(block, page.name, "exec", dont_inherit=True)
            parts.append(block)
        except SyntaxError:
            parts.append(f"async def block_{number}() -> None:\n{textwrap.indent(block, '    ')}")
    return "\n\n".join(parts)


@pytest.mark.slow
def test_they_are_typed(tmp_path):
    freedoms = f'# mypy: disable-error-code="{", ".join(FREEDOMS)}"\n'
    pages = tmp_path / "pages"
    pages.mkdir()
    for page in PAGES:
        (pages / f"page_{page.stem.lower()}.py").write_text(freedoms + as_module(page))
    # What `make mypy` knows of the package holds here, too: the options of the command are the same.
    if KNOWN.is_dir():
        shutil.copytree(KNOWN, tmp_path / "cache")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", f"--cache-dir={tmp_path / 'cache'}", pages]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.stdout.replace(f"{pages}/", "") == ""
    assert checked.returncode == 0, checked.stderr
