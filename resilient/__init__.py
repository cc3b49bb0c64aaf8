"""Work that must go through somebody else's API: queued, limited, retried and seen through by your own database.

The public names. Everything else may change without notice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; at run time each name is imported when it is first used (`_HOMES`)
    from resilient.core.alerts import AlertInfo, Alerting, Notice
    from resilient.core.auth import ApiKey, Auth, Basic, Bearer, OAuth2, Rotation
    from resilient.core.backoff import Retry
    from resilient.core.budgets import BudgetFields
    from resilient.core.changed import Cancelled, Changed, Deleted, Discarded, Edited, Retried
    from resilient.core.delays import (
        Decorrelated,
        EqualJitter,
        Exponential,
        Fixed,
        FullJitter,
        Linear,
        PlusMinus,
    )
    from resilient.core.errors import (
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
        InvalidInput,
        JobFailure,
        JobNotFound,
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
        SetupError,
        Snooze,
        Throttled,
        TransactionOpen,
        Transient,
        UnknownKind,
        WorkflowNotFound,
        WorkflowOver,
    )
    from resilient.core.events import EventInfo, Replayed
    from resilient.core.exchange import AnswerFacts, RequestFacts
    from resilient.core.failure import Failure, FailureKind, Scope
    from resilient.core.inbox import Arrival
    from resilient.core.incremental import Incremental
    from resilient.core.instants import Word
    from resilient.core.limit import Limit
    from resilient.core.message import Message
    from resilient.core.page_request import PageRequest, PagingError
    from resilient.core.paginators import (
        GraphQLPages,
        LastKey,
        LinkHeader,
        NextCursor,
        NextUrl,
        Offset,
        OnePage,
        PageNumber,
    )
    from resilient.core.paging import Paginator
    from resilient.core.parts import BatchEndpoint, Part, PartAnswer
    from resilient.core.policy import BreakerPolicy
    from resilient.core.provider import Idempotency, Overrides, Provider
    from resilient.core.reasons import Reason
    from resilient.core.records import AttemptInfo, Count, JobInfo, ResourceInfo, StoppedGroup
    from resilient.core.retention import Pruned, Retention
    from resilient.core.retry_after import WaitDialect
    from resilient.core.rules import Errors, Rule, Wait
    from resilient.core.schedule import ScheduledAccount, ScheduleInfo
    from resilient.core.states import JobState
    from resilient.core.tokens import Credentials, GrantState
    from resilient.core.webhook import Delivery, Signature, Webhook
    from resilient.core.why import Why
    from resilient.core.workflow import StepInfo, WorkflowInfo, WorkflowState
    from resilient.engine.access import Access, CredentialStore, SyncCredentialStore
    from resilient.engine.app import Resilient
    from resilient.engine.batch import Batch, SyncBatch
    from resilient.engine.catalogue import providers_by_name
    from resilient.engine.connections import ConnectionInfo
    from resilient.engine.enqueue import Enqueued, Item
    from resilient.engine.event import Event
    from resilient.engine.fuse import NeedsReauth
    from resilient.engine.handler import Handler, Kind, handler
    from resilient.engine.job import Job, SyncJob
    from resilient.engine.requests import SyncThrough, Through
    from resilient.engine.schedule import Schedule
    from resilient.engine.steps import Step, SyncWorkflow, Workflow
    from resilient.engine.streams import Page, Rejected, Stream
    from resilient.engine.sync import Sweep
    from resilient.engine.webhooks import Inbound, WebhookAnswer, WebhookEvent
    from resilient.engine.worker import Worker
    from resilient.store.absent import insert_if_absent
    from resilient.store.filters import JobFilter
    from resilient.wire.publishers.base import Destination
    from resilient.wire.publishers.callback import Callback
    from resilient.wire.publishers.kafka import Kafka
    from resilient.wire.publishers.nats import Nats
    from resilient.wire.publishers.rabbitmq import RabbitMQ
    from resilient.wire.publishers.redis import RedisStream
    from resilient.wire.publishers.webhook import StandardWebhook

__all__ = [
    "Access",
    "AlertInfo",
    "Alerting",
    "Ambiguous",
    "AnswerFacts",
    "ApiKey",
    "Arrival",
    "AttemptInfo",
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
    "providers_by_name",
]

_HOMES = {
    "core.alerts": "AlertInfo Alerting Notice",
    "core.auth": "ApiKey Auth Basic Bearer OAuth2 Rotation",
    "core.backoff": "Retry",
    "core.budgets": "BudgetFields",
    "core.changed": "Cancelled Changed Deleted Discarded Edited Retried",
    "core.delays": "Decorrelated EqualJitter Exponential Fixed FullJitter Linear PlusMinus",
    "core.errors": (
        "Ambiguous BadCron BadPayload BadResourceKey Cancel ConnectionNotFound ConsentRefused DatabaseBusy "
        "DatabaseUnreachable DuplicateJob InvalidInput JobFailure JobNotFound LostLease MissingExtra NaiveDatetime "
        "NoResult PayloadTooLarge Permanent ResilientError ResourceStopped SchemaOutdated SchemaTooNew SetupError "
        "Snooze Throttled TransactionOpen Transient UnknownKind WorkflowNotFound WorkflowOver"
    ),
    "core.events": "EventInfo Replayed",
    "core.exchange": "AnswerFacts RequestFacts",
    "core.failure": "Failure FailureKind Scope",
    "core.inbox": "Arrival",
    "core.incremental": "Incremental",
    "core.instants": "Word",
    "core.limit": "Limit",
    "core.message": "Message",
    "core.page_request": "PageRequest PagingError",
    "core.paginators": "GraphQLPages LastKey LinkHeader NextCursor NextUrl Offset OnePage PageNumber",
    "core.paging": "Paginator",
    "core.parts": "BatchEndpoint Part PartAnswer",
    "core.policy": "BreakerPolicy",
    "core.provider": "Idempotency Overrides Provider",
    "core.reasons": "Reason",
    "core.records": "AttemptInfo Count JobInfo ResourceInfo StoppedGroup",
    "core.retention": "Pruned Retention",
    "core.retry_after": "WaitDialect",
    "core.rules": "Errors Rule Wait",
    "core.schedule": "ScheduleInfo ScheduledAccount",
    "core.states": "JobState",
    "core.tokens": "Credentials GrantState",
    "core.webhook": "Delivery Signature Webhook",
    "core.why": "Why",
    "core.workflow": "StepInfo WorkflowInfo WorkflowState",
    "engine.access": "Access CredentialStore SyncCredentialStore",
    "engine.app": "Resilient",
    "engine.batch": "Batch SyncBatch",
    "engine.catalogue": "providers_by_name",
    "engine.connections": "ConnectionInfo",
    "engine.enqueue": "Enqueued Item",
    "engine.event": "Event",
    "engine.fuse": "NeedsReauth",
    "engine.handler": "Handler Kind handler",
    "engine.job": "Job SyncJob",
    "engine.requests": "SyncThrough Through",
    "engine.schedule": "Schedule",
    "engine.steps": "Step SyncWorkflow Workflow",
    "engine.streams": "Page Rejected Stream",
    "engine.sync": "Sweep",
    "engine.webhooks": "Inbound WebhookAnswer WebhookEvent",
    "engine.worker": "Worker",
    "store.absent": "insert_if_absent",
    "store.filters": "JobFilter",
    "wire.publishers.base": "Destination",
    "wire.publishers.callback": "Callback",
    "wire.publishers.kafka": "Kafka",
    "wire.publishers.nats": "Nats",
    "wire.publishers.rabbitmq": "RabbitMQ",
    "wire.publishers.redis": "RedisStream",
    "wire.publishers.webhook": "StandardWebhook",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a second of imports that `resilient --help` need not wait for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """What tab completion offers."""
    return sorted({*globals(), *__all__})
