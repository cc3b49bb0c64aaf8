"""Fixtures of the chaos tests. Every process is ended with its test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import harness
import history


@pytest.fixture
def crew(tmp_path):
    crew = harness.Crew(tmp_path)
    yield crew
    crew.close()


@pytest.fixture
def provider(tmp_path):
    provider = harness.Provider(tmp_path)
    yield provider
    provider.close()


@pytest.fixture
def postgres(open_database, postgres_url):
    """A PostgreSQL database with its history written down."""
    database = open_database(postgres_url)
    history.install(database)
    return database
