"""Installed providers: ours, a third party's, and a broken one."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilient import Provider, SetupError, providers_by_name
from resilient.engine.ground import providers
from resilient.engine.ground.providers import also_installed_by, provider_named
from resilient.engine.inspect.doctor import check_names

OURS = sorted(path.stem for path in (Path(__file__).parents[2] / "providers").glob("[a-z]*.py"))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a distribution that announces providers."""

    def install(module, points):
        (tmp_path / "acme_resilient.py").write_text(module)
        info = tmp_path / "acme_resilient-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-resilient\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[resilient.providers]\n{points}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        sys.modules.pop("acme_resilient", None)

    yield install
    sys.modules.pop("acme_resilient", None)


def test_ours():
    found = providers_by_name()
    assert sorted(found) == OURS
    assert len(found) >= 25
    for name, make in found.items():
        made = make()
        assert isinstance(made, Provider)
        assert made.name == name


def test_a_third_partys(installed):
    installed(
        "from resilient import Provider\n"
        "def provider(**overrides): return Provider(name='acme', base_url='https://acme.example.com', **overrides)\n",
        "acme = acme_resilient:provider\ngithub = acme_resilient:provider",
    )
    assert provider_named("acme").base_url == "https://acme.example.com"
    assert provider_named("github").name == "acme"  # a third party's word about a provider wins over ours


@pytest.mark.parametrize("module", ["import nowhere", "x = 1", "x = 1 / 0", "x ="])
def test_one_that_cannot_be_loaded_is_named(installed, module):
    installed(module, "acme = acme_resilient:provider")
    with pytest.raises(SetupError, match=r"'acme' \(acme_resilient:provider\)"):
        providers_by_name()


def test_another_distributions_module_in_the_same_place_is_no_provider(tmp_path, monkeypatch):
    (tmp_path / "somebody_elses.py").write_text("x = 1\n")
    package = importlib.import_module("providers")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    try:
        assert sorted(providers_by_name()) == OURS
    finally:
        sys.modules.pop("providers.somebody_elses", None)


def test_one_that_gives_something_else_is_named(installed):
    installed("def provider(): return 7\n", "acme = acme_resilient:provider")
    with pytest.raises(SetupError, match="gives int"):
        provider_named("acme")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(SetupError, match="github"):
        provider_named("nope")


@pytest.mark.parametrize("shape", ["providers.py", "providers/__init__.py", "providers/github.py"])
def test_a_package_of_the_same_name_is_named(tmp_path, shape):
    """A program's own ``providers`` comes first on the path: nothing of ours can be imported then."""
    (tmp_path / shape).parent.mkdir(exist_ok=True)
    (tmp_path / shape).touch()
    program = (
        "import asyncio, resilient\n"
        "from resilient.engine.inspect import doctor\n"
        "from resilient.store.db.database import Database\n"
        "try:\n    resilient.providers_by_name()\n"
        "except resilient.SetupError as error:\n    print(error)\n"
        "for one in asyncio.run(doctor.examine(Database('sqlite:///app.db'))):\n"
        "    print(one.name, one.level, one.message)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    where = tmp_path / "providers.py" if shape == "providers.py" else tmp_path / "providers"
    if shape == "providers/github.py":  # a folder without __init__.py hides no package that has one
        assert "hides" not in ran.stdout, ran.stderr
        return
    assert f"{where} hides the package 'providers' of resilient-engine" in ran.stdout, ran.stderr
    assert f"providers fail {where} hides" in ran.stdout


def test_another_distribution_of_the_same_name_is_told():
    (finding,) = check_names("", ["acme-tools"])
    assert (finding.name, finding.level) == ("providers", "warn")
    assert "acme-tools installs a package `providers` into the same place" in finding.message
    assert check_names("", []) == []
    assert also_installed_by() == ()


def test_what_is_installed_is_read_once(monkeypatch):
    """It takes a third of a second, in which a dashboard answers nobody."""
    asked = []

    def distributions():
        asked.append(1)
        return {"providers": ["resilient-engine", "b", "a", "b"]}

    also_installed_by.cache_clear()
    monkeypatch.setattr(providers, "packages_distributions", distributions)
    assert [also_installed_by(), also_installed_by()] == [("a", "b")] * 2
    assert len(asked) == 1
    also_installed_by.cache_clear()
