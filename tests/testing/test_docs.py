"""The guide to testing cannot rot: its code runs."""

import re
from pathlib import Path

pytest_plugins = ["pytester"]

GUIDE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()


def test_the_guides_examples_pass(pytester):
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    pytester.makepyfile("\n".join(blocks))
    ran = pytester.runpytest_subprocess("-W", "error")
    ran.assert_outcomes(passed=2)


def test_what_it_names_is_there():
    from resilient.testing import FakeProvider

    for name in re.findall(r"`(?:with )?fake\.(\w+)", GUIDE):
        assert hasattr(FakeProvider, name) or name in {"log", "provider"}, name
