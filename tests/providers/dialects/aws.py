"""Answers of services in the style of AWS."""

from resilient import FailureKind as K
from resilient import PageRequest
from resilient.testing.contract import Dialect, Page, Pages, Sample

XML = "<ErrorResponse><Error><Code>{}</Code><Message>...</Message></Error></ErrorResponse>"
DIALECT = Dialect(
    throttled=[
        Sample(
            "JSON",
            400,
            K.THROTTLED,
            {"__type": "com.amazonaws.dynamodb.v20120810#ProvisionedThroughputExceededException"},
        ),
        Sample("XML", 503, K.THROTTLED, XML.format("SlowDown")),
        Sample("as 403", 403, K.THROTTLED, XML.format("RequestThrottled")),
        Sample("as 502", 502, K.THROTTLED, {"__type": "ThrottlingException"}, on="POST /"),
        Sample("as 500", 500, K.THROTTLED, {"__type": "RequestLimitExceeded"}),
        Sample("by header", 429, K.THROTTLED, {}, {"x-amzn-ErrorType": "TooManyRequestsException:http://internal/"}),
        Sample("told", 400, K.THROTTLED, {"__type": "ThrottlingException"}, {"x-amz-retry-after": "1500"}, wait=1.5),
    ],
    refused=[
        Sample("denied", 403, K.PERMANENT, {"__type": "AccessDeniedException"}),
        Sample("denied, XML", 403, K.PERMANENT, XML.format("AccessDenied")),
        Sample("wrong", 400, K.PERMANENT, {"__type": "ValidationException"}),
    ],
    expired=[
        Sample("expired", 400, K.AUTH, {"__type": "ExpiredTokenException"}),
        Sample("expired, XML", 403, K.AUTH, XML.format("RequestExpired")),
    ],
    reset=[Sample("iterator", 400, K.RESET_CURSOR, {"__type": "ExpiredIteratorException"})],
    others=[
        Sample("time-out", 400, K.TRANSIENT, XML.format("RequestTimeout")),
        Sample("condition", 400, K.CONFLICT, {"__type": "ConditionalCheckFailedException"}, on="POST /"),
        Sample("fault", 500, K.TRANSIENT, {"__type": "InternalServerError"}),
    ],
    pages=[
        Pages(
            "list",
            PageRequest("https://logs.eu-west-1.amazonaws.com/", "POST", {}),
            [
                Page("https", {"Items": [1], "NextToken": "n"}),
                Page("NextToken=n", {"Items": [2]}),
            ],
            items=2,
        ),
    ],
)
