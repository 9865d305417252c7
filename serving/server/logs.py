"""What the server's processes log, as text or as a JSON object a line; and the line at a request's
end, which never holds a prompt or an output.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from .live import Live

FORMATS = ("text", "json")
REQUESTS = logging.getLogger("twinfer.requests")
_TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: `time` (UTC, ISO 8601), `level`, `logger`, `message`, what
    `extra={"fields": {...}}` adds, and `exception` where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """As logging has it."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told).decode()


def configure_logging(form: str, *, verbose: bool) -> None:
    """Log to standard error. `form` is one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)


def log_request(
    name: str, path: str, status: int, lives: Sequence[Live], start: float, *, level: int
) -> None:
    """A line for a request that has ended. `start` is of the monotonic clock, in seconds; `lives`
    is empty where the engine never had the request.
    """
    if not REQUESTS.isEnabledFor(level):
        return
    firsts = [live.first_token for live in lives if live.first_token is not None]
    outputs = [output for live in lives for output in live.outputs]
    fields = {
        "request_id": name,
        "path": path,
        "status": status,
        "prompt_tokens": sum(len(live.prompt_ids) for live in lives),
        "output_tokens": sum(len(output.token_ids) for output in outputs),
        "reason": _reason(lives),
        "first_token_ms": round(1000 * (min(firsts) - start), 1) if firsts else None,
        "total_ms": round(1000 * (time.monotonic() - start), 1),
    }
    # As Python writes texts: a client chooses its id and its path, and may not write lines of ours.
    words = " ".join(f"{key}={value!r}" for key, value in fields.items())
    REQUESTS.log(level, "request %s", words, extra={"fields": fields})


def _reason(lives: Sequence[Live]) -> str | None:
    """Why the completions ended, each reason once; `error` and `abort` where they did not end by
    themselves. None where there are none.
    """
    reasons = {
        "error" if live.error is not None else output.finish_reason or "abort"
        for live in lives
        for output in live.outputs
    }
    return ",".join(sorted(reasons)) or None
