"""`Event`: what a program publishes, as a pydantic model with a name of its own.

The name is part of the contract with consumers: it is written out and does not follow the class when that is renamed.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from resilient.core.errors import BadPayload, SetupError

_TYPE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,199}")


class Event(BaseModel):
    """Base of a program's events.

        class OrderPlaced(Event, type="order.placed"):
            order_id: int

    ``type`` is what consumers see; ``version`` is raised when the shape changes in a way they must know.
    A class without a type is a base for others and cannot be published. Raises `SetupError` for a bad type.
    """

    event_type: ClassVar[str] = ""
    event_version: ClassVar[int] = 1

    def __init_subclass__(cls, *, type: str = "", version: int = 1, **kwargs: Any) -> None:  # noqa: A002 - CloudEvents' word
        super().__init_subclass__(**kwargs)
        if type and not _TYPE.fullmatch(type):
            raise SetupError(f"{type!r} is not a type of events: use letters, digits and ._:+-, such as 'order.placed'")
        if not isinstance(version, int) or version < 1:
            raise SetupError(f"version of event {type!r} must be a whole number from 1 up, not {version!r}")
        cls.event_type, cls.event_version = type, version


def data_of(event: Event) -> str:
    """An event's data as JSON text; raises `BadPayload` if a value is not of its field's type."""
    try:
        return event.model_dump_json(by_alias=True, warnings="error")
    except (PydanticSerializationError, ValueError) as error:
        raise BadPayload(f"event {type(event).event_type!r} is not what its fields say: {error}") from None
