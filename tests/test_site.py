"""The documentation site holds together: every page is in its navigation, every link and anchor leads somewhere.

`make docs` builds it, with warnings as errors; here is what needs no mkdocs. The pages that are made when it is built
are made here too, so that a public name or a provider without its place is noticed at once.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
from functools import cache
from pathlib import Path

import pytest

import resilient
from resilient.core.base import errors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


@cache
def hook():
    spec = importlib.util.spec_from_file_location("pages", DOCS / "hooks" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def made():
    return hook().made()


@cache
def texts():
    """Every page of the site: path below docs/ to text, without blocks of code."""
    pages = {name: (DOCS / name).read_text() for name in PAGES} | made()
    return {name: FENCED.sub("", text) for name, text in pages.items()}


def anchors(text):
    """The ids of its headings, as GitHub and mkdocs both make them of plain words."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one.lower())).strip("-") for one in headings}


def test_the_navigation_has_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == sorted([*PAGES, "errors.md"]), "docs/*.md are named once each under nav: in mkdocs.yml"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page):
    assert dead_links(page) == []


def test_those_of_pages_that_are_made_too():
    assert [(page, link) for page in made() for link in dead_links(page)] == []


def dead_links(page):
    dead = []
    for match in LINK.finditer(texts()[page]):
        link = match[1] or match[2]
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        exists = target in texts() or (DOCS / target).is_file()
        if not exists or (anchor and anchor not in anchors(texts().get(target, ""))):
            dead.append(link)
    return dead


def test_a_dead_link_is_seen():
    texts()["torn.md"] = "[a](limits.md#nowhere) [b](nowhere.md) [c](limits.md#learnt-limits) [d](images/now.png)"
    assert dead_links("torn.md") == ["limits.md#nowhere", "nowhere.md"]
    del texts()["torn.md"]


def test_each_provider_has_its_page():
    names = {path.stem for path in (ROOT / "providers").glob("[a-z]*.py")}
    assert {path for path in made() if path.startswith("apis/")} == {f"apis/{name}.md" for name in (*names, "index")}
    assert "- account: 100 per 10 s, 250,000 per 1 d" in made()["apis/hubspot.md"]
    assert "../providers.md" in made()["apis/index.md"]


def test_each_public_name_is_in_the_reference_once():
    reference = "".join(text for path, text in made().items() if path.startswith("reference/"))
    named = re.findall(r"^::: resilient\.(\w+)$", reference, re.MULTILINE)
    assert sorted(set(named) - {"testing", "web", "metrics", "django", "settings"}) == sorted(resilient.__all__)
    assert len(named) == len(set(named))


def test_each_part_of_the_app_is_in_the_reference():
    app = resilient.Resilient("sqlite://")
    parts = {name for name, one in vars(app).items() if hasattr(type(one), "sync") and not name.startswith("_")}
    app.database.close_sync()
    page = made()["reference/app.md"]
    assert {name for name in parts if f"\n## app.{name}\n" not in page} == set()
    assert len(parts) > 8


def test_messages_stand_beside_their_remedies():
    page = made()["errors.md"]
    tree = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.ResilientError)]
    assert {one.__name__ for one in tree} <= set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    assert "see `resilient connections list`" in page  # an exception, from the engine
    assert "| `no_worker` | No worker is running: start one with `resilient worker`. |" in page
    assert "autovacuum is off: dead rows pile up and claiming gets slower and slower **Remedy:** set" in page
