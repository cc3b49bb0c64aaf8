"""A pytest plugin (``-p tests.simulation.breaking``) that breaks the engine with the mutant in ``RESILIENT_MUTANT``."""

import os


def pytest_configure():
    from tests.simulation.mutants import MUTANTS

    MUTANTS[os.environ["RESILIENT_MUTANT"]]()
