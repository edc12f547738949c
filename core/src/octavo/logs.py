"""How the processes of a server write their logs: lines for people, or one JSON object a line for machines.

A line that belongs to a request carries its id. What a caller puts into `extra={"fields": {...}}` becomes fields of
the JSON object; the text of the message says the same to people.
"""

from __future__ import annotations

import json
import logging
import os
from contextvars import ContextVar
from datetime import UTC, datetime

FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

FORMAT_VARIABLE = "OCTAVO_LOG_FORMAT"
"""Environment variable from which further processes learn the format."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the running task serves; "" outside of requests."""


class TextFormatter(logging.Formatter):
    """The usual line, with the request's id at its end."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        current = request_id.get()
        return f"{line} [{current}]" if current else line


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC, ISO 8601), level, logger, message, request_id, exception, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            entry["request_id"] = current
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def set_up(level: int | str, *, form: str | None = None) -> None:
    """One handler on stderr for everything. level: from which level on lines of any logger are shown.

    form: one of FORMATS; None takes what the parent process uses.
    """
    form = form or os.environ.get(FORMAT_VARIABLE, "text")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    os.environ[FORMAT_VARIABLE] = form
