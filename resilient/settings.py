"""The settings of ``resilient`` for programs: the same variables and ``.env``, checked and typed.

    from resilient.settings import Settings

    app = Resilient(Settings().database_address, handlers=[...])

An argument comes first, then the environment, then ``.env`` of the working folder, then the default.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from resilient.core.base.errors import SetupError
from resilient.engine.ground.ground import DEFAULT_CONCURRENCY, GRACE, LEASE

__all__ = ["Settings"]


def _named(variable: str, default: Any = None, **bounds: Any) -> Any:
    return Field(default, validation_alias=variable, **bounds)


class Settings(BaseSettings):
    """What ``RESILIENT_...`` says. Raises `SetupError` that names the variable, and never its value."""

    model_config = SettingsConfigDict(env_file=".env", extra="ignore", populate_by_name=True)

    app: str | None = _named("RESILIENT_APP")
    database: SecretStr | None = _named("RESILIENT_DATABASE")
    database_schema: str | None = _named("RESILIENT_SCHEMA")
    shard: str | None = _named("RESILIENT_SHARD")
    person: str | None = _named("RESILIENT_AS")
    secrets: SecretStr | None = _named("RESILIENT_SECRETS")
    concurrency: int = _named("RESILIENT_CONCURRENCY", DEFAULT_CONCURRENCY, ge=1)
    resource: str | None = _named("RESILIENT_RESOURCE")  # patterns, separated by spaces
    lease: float = _named("RESILIENT_LEASE", LEASE, ge=1)
    grace: float = _named("RESILIENT_GRACE", GRACE, ge=0)
    processes: int | None = _named("RESILIENT_PROCESSES", ge=1)
    max_jobs: int | None = _named("RESILIENT_MAX_JOBS", ge=1)
    max_memory: int | None = _named("RESILIENT_MAX_MEMORY", ge=1)
    loop: Literal["auto", "asyncio", "uvloop"] = _named("RESILIENT_LOOP", "auto")
    metrics: str | None = _named("RESILIENT_METRICS")
    health: str | None = _named("RESILIENT_HEALTH")
    log: Literal["text", "json"] = _named("RESILIENT_LOG", "text")
    log_level: str = _named("RESILIENT_LOG_LEVEL", "info")
    dashboard_port: int = _named("RESILIENT_DASHBOARD_PORT", 8765, ge=0, le=65535)
    connect_port: int = _named("RESILIENT_CONNECT_PORT", 0, ge=0, le=65535)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False)]
            raise SetupError(f"the settings do not fit: {'; '.join(lines)}") from None

    @property
    def database_address(self) -> str:
        """The database's address with its password, for `Resilient`. Raises `SetupError` if there is none."""
        if self.database is None:
            raise SetupError("which database? Set RESILIENT_DATABASE, in the environment or in .env")
        return self.database.get_secret_value()

    @property
    def keys(self) -> list[str]:
        """The keys of ``RESILIENT_SECRETS``, for ``Resilient(secrets=...)``; the current one first."""
        return [] if self.secrets is None else self.secrets.get_secret_value().replace(",", " ").split()
