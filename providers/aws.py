"""Services in the style of AWS: one role session in one account, region and service.

Requests are signed by the vendor's SDK, so they go through ``job.call``, or the SDK's errors are read here. A
throttle is known by its code, whatever the status: 400 as often as 403, 429, 500, 502 or 503. Operations that create
take a ClientToken of the caller's: give the job's idempotency key.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import AnswerFacts, Errors, FailureKind, Incremental, NextCursor, Provider, Rule, WaitDialect, Word

if TYPE_CHECKING:
    from resilient import Overrides

_THROTTLES: Final = (
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "RequestThrottledException",
    "RequestThrottled",
    "TooManyRequestsException",
    "ProvisionedThroughputExceededException",
    "TransactionInProgressException",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
    "LimitExceededException",
    "SlowDown",
    "PriorRequestNotComplete",
    "EC2ThrottledException",
)


def by_sdk(error: BaseException) -> AnswerFacts | None:
    """What botocore's ``ClientError`` wraps."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    meta, details = response.get("ResponseMetadata", {}), response.get("Error", {})
    body = {"__type": details.get("Code", ""), "message": details.get("Message", "")}
    return AnswerFacts(int(meta.get("HTTPStatusCode", 400)), body=body)


AWS: Final = Provider(
    name="aws",
    title="AWS-style services",
    base_url="https://{service}.{region}.amazonaws.com",
    hosts=("*.amazonaws.com",),
    errors=Errors(
        code=("__type", "Error.Code", "code"),
        code_header="x-amzn-errortype",
        code_text=r"<Code>([^<]+)</Code>",
        code_form=r"(?:.*#)?([^:#]+)",
        message=("message", "Message", "Error.Message"),
        rules=(
            Rule(FailureKind.THROTTLED, code=_THROTTLES),
            Rule(FailureKind.AUTH, code=("ExpiredToken", "ExpiredTokenException", "RequestExpired")),
            Rule(FailureKind.TRANSIENT, code=("RequestTimeout", "RequestTimeoutException"), provider_wide=True),
            Rule(FailureKind.RESET_CURSOR, code="ExpiredIteratorException"),
            Rule(FailureKind.CONFLICT, code="ConditionalCheckFailedException"),
        ),
    ),
    waits=WaitDialect(hints=(("x-amz-retry-after", Word.DELTA_MS),)),
    exceptions={"botocore.exceptions.ClientError": by_sdk},
    pagination={"list": NextCursor(items="Items", cursor="NextToken", body="NextToken")},
    incremental={
        "shard": Incremental(style="token", body="ShardIterator", cursor="NextShardIterator", source="every_page")
    },
    verified_on=date(2026, 11, 22),
    sources=(
        "boto/botocore botocore/retries/standard.py, adaptive.py, quota.py",
        "boto/boto3 docs/source/guide/retries.rst, in a stored copy of 2025",
    ),
    unverified=(
        "base_url",
        "auth: signed by the SDK",
        "errors: where the code stands; ExpiredToken, ConditionalCheckFailedException, ExpiredIteratorException",
        "waits: that x-amz-retry-after is in milliseconds",
        "idempotency: ClientToken by operation",
        "limits: per account, region and action, by service",
        "pagination",
        "incremental",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """The style's facts; name each service: ``aws.provider(name="dynamodb")``."""
    return AWS.configured(client_id, client_secret, **overrides)
