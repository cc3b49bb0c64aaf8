"""Work that must go through somebody else's API: queued, limited, retried and seen through by your own database.

The public names. Everything else may change without notice.
"""

from __future__ import annotations

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
from resilient.core.parts import BatchEndpoint
from resilient.core.policy import BreakerPolicy
from resilient.core.provider import Errors, Idempotency, Overrides, Provider, Rule, Wait
from resilient.core.reasons import Reason
from resilient.core.records import AttemptInfo, Count, JobInfo, ResourceInfo, StoppedGroup
from resilient.core.retention import Pruned, Retention
from resilient.core.retry_after import WaitDialect
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
