"""An adapter whose library is not installed says what to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("library", ["requests", "aiohttp"])
def test_without_its_library(library):
    program = (
        f"import sys\nsys.modules[{library!r}] = None\n"
        "import resilient\n"
        f"try:\n    import resilient.adapters.{library}\n"
        "except resilient.MissingExtra as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"pip install 'resilient-engine[{library}]'" in said.stdout, said.stderr
