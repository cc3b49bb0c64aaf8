"""Work that must go through somebody else's API: queued, limited, retried and seen through by your own database.

The public names. Everything else may change without notice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; at run time each name is imported when it is first used (`_HOMES`)
    from resilient.core.accounts.tokens import Credentials, GrantState
    from resilient.core.alerts.rules import AlertInfo, Alerting, Notice
    from resilient.core.base.budgets import BudgetFields
    from resilient.core.base.errors import (
        Ambiguous,
        BadCron,
        BadPayload,
        BadResourceKey,
        Cancel,
        ConnectionNotFound,
        ConsentRefused,
        DatabaseBusy,
        DatabaseUnreachable,
        DuplicateJob,
        Failure,
        FailureKind,
        InvalidInput,
        JobFailure,
        JobNotFound,
        JobNotOver,
        LostLease,
        MissingExtra,
        NaiveDatetime,
        NoResult,
        PayloadTooLarge,
        Permanent,
        ResilientError,
        ResourceStopped,
        SchemaOutdated,
        SchemaTooNew,
        Scope,
        SetupError,
        Snooze,
        Throttled,
        TransactionOpen,
        Transient,
        UnknownKind,
        WorkflowNotFound,
        WorkflowOver,
    )
    from resilient.core.base.exchange import AnswerFacts, RequestFacts
    from resilient.core.base.instants import Word
    from resilient.core.base.loggers import log_fields
    from resilient.core.base.tracing import Tracing
    from resilient.core.events.message import Arrival, EventInfo, Message, Replayed
    from resilient.core.events.webhook import Delivery, Signature, Webhook
    from resilient.core.gates.policy import BreakerPolicy
    from resilient.core.gates.rate_limit import Limit
    from resilient.core.gates.retry_after import WaitDialect
    from resilient.core.inspect.retention import Pruned, Retention
    from resilient.core.inspect.why import Reason, Why
    from resilient.core.jobs.backoff import (
        Decorrelated,
        EqualJitter,
        Exponential,
        Fixed,
        FullJitter,
        Linear,
        PlusMinus,
        Retry,
    )
    from resilient.core.jobs.records import (
        AttemptInfo,
        AuditInfo,
        Cancelled,
        Changed,
        Count,
        Deleted,
        Discarded,
        Edited,
        JobInfo,
        ResourceInfo,
        Retried,
        StoppedGroup,
    )
    from resilient.core.jobs.states import JobState
    from resilient.core.jobs.workflow import StepInfo, WorkflowInfo, WorkflowState
    from resilient.core.provider.auth import ApiKey, Auth, Basic, Bearer, OAuth2, Rotation
    from resilient.core.provider.facts import BatchEndpoint, Idempotency, Overrides, Part, PartAnswer, Provider
    from resilient.core.provider.rules import Errors, Rule, Wait
    from resilient.core.schedules.schedule import ScheduledAccount, ScheduleInfo
    from resilient.core.sync.incremental import Incremental
    from resilient.core.sync.paginators import (
        GraphQLPages,
        LastKey,
        LinkHeader,
        NextCursor,
        NextUrl,
        Offset,
        OnePage,
        PageNumber,
    )
    from resilient.core.sync.paging import PageRequest, Paginator, PagingError
    from resilient.engine.accounts.access import Access, CredentialStore, SyncCredentialStore
    from resilient.engine.accounts.connections import ConnectionInfo
    from resilient.engine.accounts.fuse import NeedsReauth
    from resilient.engine.app.app import Resilient
    from resilient.engine.app.handler import handler
    from resilient.engine.events.outbox import Event
    from resilient.engine.events.webhooks import Inbound, WebhookAnswer, WebhookEvent
    from resilient.engine.ground.encoder import Enqueued, Item
    from resilient.engine.ground.kinds import Handler, Kind
    from resilient.engine.ground.providers import providers_by_name
    from resilient.engine.jobs.workflows import Step, SyncWorkflow, Workflow
    from resilient.engine.run.job import Batch, Job, SyncBatch, SyncJob, SyncThrough, Through
    from resilient.engine.run.stream_reader import Sweep
    from resilient.engine.run.worker import Worker
    from resilient.engine.schedules.declaration import Schedule
    from resilient.engine.sync import Page, Rejected, Stream
    from resilient.store.jobs.filters import JobFilter
    from resilient.store.jobs.insert import insert_if_absent
    from resilient.surface.shards import Shard, Shards
    from resilient.wire.publishers.base import Callback, Destination
    from resilient.wire.publishers.kafka import Kafka
    from resilient.wire.publishers.nats import Nats
    from resilient.wire.publishers.rabbitmq import RabbitMQ
    from resilient.wire.publishers.redis import RedisStream
    from resilient.wire.publishers.webhook import StandardWebhook
    from resilient.wire.requests.pool import PoolSettings

__all__ = [
    "Access",
    "AlertInfo",
    "Alerting",
    "Ambiguous",
    "AnswerFacts",
    "ApiKey",
    "Arrival",
    "AttemptInfo",
    "AuditInfo",
    "Auth",
    "BadCron",
    "BadPayload",
    "BadResourceKey",
    "Basic",
    "Batch",
    "BatchEndpoint",
    "Bearer",
    "BreakerPolicy",
    "BudgetFields",
    "Callback",
    "Cancel",
    "Cancelled",
    "Changed",
    "ConnectionInfo",
    "ConnectionNotFound",
    "ConsentRefused",
    "Count",
    "CredentialStore",
    "Credentials",
    "DatabaseBusy",
    "DatabaseUnreachable",
    "Decorrelated",
    "Deleted",
    "Delivery",
    "Destination",
    "Discarded",
    "DuplicateJob",
    "Edited",
    "Enqueued",
    "EqualJitter",
    "Errors",
    "Event",
    "EventInfo",
    "Exponential",
    "Failure",
    "FailureKind",
    "Fixed",
    "FullJitter",
    "GrantState",
    "GraphQLPages",
    "Handler",
    "Idempotency",
    "Inbound",
    "Incremental",
    "InvalidInput",
    "Item",
    "Job",
    "JobFailure",
    "JobFilter",
    "JobInfo",
    "JobNotFound",
    "JobNotOver",
    "JobState",
    "Kafka",
    "Kind",
    "LastKey",
    "Limit",
    "Linear",
    "LinkHeader",
    "LostLease",
    "Message",
    "MissingExtra",
    "NaiveDatetime",
    "Nats",
    "NeedsReauth",
    "NextCursor",
    "NextUrl",
    "NoResult",
    "Notice",
    "OAuth2",
    "Offset",
    "OnePage",
    "Overrides",
    "Page",
    "PageNumber",
    "PageRequest",
    "Paginator",
    "PagingError",
    "Part",
    "PartAnswer",
    "PayloadTooLarge",
    "Permanent",
    "PlusMinus",
    "PoolSettings",
    "Provider",
    "Pruned",
    "RabbitMQ",
    "Reason",
    "RedisStream",
    "Rejected",
    "Replayed",
    "RequestFacts",
    "Resilient",
    "ResilientError",
    "ResourceInfo",
    "ResourceStopped",
    "Retention",
    "Retried",
    "Retry",
    "Rotation",
    "Rule",
    "Schedule",
    "ScheduleInfo",
    "ScheduledAccount",
    "SchemaOutdated",
    "SchemaTooNew",
    "Scope",
    "SetupError",
    "Shard",
    "Shards",
    "Signature",
    "Snooze",
    "StandardWebhook",
    "Step",
    "StepInfo",
    "StoppedGroup",
    "Stream",
    "Sweep",
    "SyncBatch",
    "SyncCredentialStore",
    "SyncJob",
    "SyncThrough",
    "SyncWorkflow",
    "Throttled",
    "Through",
    "Tracing",
    "TransactionOpen",
    "Transient",
    "UnknownKind",
    "Wait",
    "WaitDialect",
    "Webhook",
    "WebhookAnswer",
    "WebhookEvent",
    "Why",
    "Word",
    "Worker",
    "Workflow",
    "WorkflowInfo",
    "WorkflowNotFound",
    "WorkflowOver",
    "WorkflowState",
    "handler",
    "insert_if_absent",
    "log_fields",
    "providers_by_name",
]

_HOMES = {
    "core.alerts.rules": "AlertInfo Alerting Notice",
    "core.provider.auth": "ApiKey Auth Basic Bearer OAuth2 Rotation",
    "core.jobs.backoff": "Decorrelated EqualJitter Exponential Fixed FullJitter Linear PlusMinus Retry",
    "core.base.budgets": "BudgetFields",
    "core.jobs.records": (
        "AttemptInfo AuditInfo Cancelled Changed Count Deleted Discarded Edited JobInfo ResourceInfo Retried "
        "StoppedGroup"
    ),
    "core.base.errors": (
        "Ambiguous BadCron BadPayload BadResourceKey Cancel ConnectionNotFound ConsentRefused DatabaseBusy "
        "DatabaseUnreachable DuplicateJob Failure FailureKind InvalidInput JobFailure JobNotFound JobNotOver "
        "LostLease MissingExtra NaiveDatetime NoResult PayloadTooLarge Permanent ResilientError ResourceStopped "
        "SchemaOutdated SchemaTooNew Scope SetupError Snooze Throttled TransactionOpen Transient UnknownKind "
        "WorkflowNotFound WorkflowOver"
    ),
    "core.base.exchange": "AnswerFacts RequestFacts",
    "core.events.message": "Arrival EventInfo Message Replayed",
    "core.sync.incremental": "Incremental",
    "core.base.instants": "Word",
    "core.base.loggers": "log_fields",
    "core.base.tracing": "Tracing",
    "core.gates.rate_limit": "Limit",
    "core.sync.paging": "PageRequest Paginator PagingError",
    "core.sync.paginators": "GraphQLPages LastKey LinkHeader NextCursor NextUrl Offset OnePage PageNumber",
    "core.gates.policy": "BreakerPolicy",
    "core.provider.facts": "BatchEndpoint Idempotency Overrides Part PartAnswer Provider",
    "core.inspect.retention": "Pruned Retention",
    "core.gates.retry_after": "WaitDialect",
    "core.provider.rules": "Errors Rule Wait",
    "core.schedules.schedule": "ScheduleInfo ScheduledAccount",
    "core.jobs.states": "JobState",
    "core.accounts.tokens": "Credentials GrantState",
    "core.events.webhook": "Delivery Signature Webhook",
    "core.inspect.why": "Reason Why",
    "core.jobs.workflow": "StepInfo WorkflowInfo WorkflowState",
    "engine.accounts.access": "Access CredentialStore SyncCredentialStore",
    "engine.app.app": "Resilient",
    "engine.ground.providers": "providers_by_name",
    "engine.accounts.connections": "ConnectionInfo",
    "engine.ground.encoder": "Enqueued Item",
    "engine.events.outbox": "Event",
    "engine.accounts.fuse": "NeedsReauth",
    "engine.app.handler": "handler",
    "surface.shards": "Shard Shards",
    "engine.run.job": "Batch Job SyncBatch SyncJob SyncThrough Through",
    "engine.ground.kinds": "Handler Kind",
    "engine.schedules.declaration": "Schedule",
    "engine.sync": "Page Rejected Stream",
    "engine.jobs.workflows": "Step SyncWorkflow Workflow",
    "engine.run.stream_reader": "Sweep",
    "engine.events.webhooks": "Inbound WebhookAnswer WebhookEvent",
    "engine.run.worker": "Worker",
    "store.jobs.filters": "JobFilter",
    "store.jobs.insert": "insert_if_absent",
    "wire.publishers.base": "Callback Destination",
    "wire.publishers.kafka": "Kafka",
    "wire.publishers.nats": "Nats",
    "wire.publishers.rabbitmq": "RabbitMQ",
    "wire.publishers.redis": "RedisStream",
    "wire.publishers.webhook": "StandardWebhook",
    "wire.requests.pool": "PoolSettings",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a second of imports that `resilient --help` need not wait for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from resilient.engine.ground.garbage import no_collections  # noqa: PLC0415 - needs nothing but Python

    with no_collections():  # what is imported stays: the collector looked for garbage among it for a sixth of the time
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What tab completion offers."""
    return sorted({*globals(), *__all__})
