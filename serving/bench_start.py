"""One start of an engine, timed by phase: `bench.measure_start` runs it as a process of its own.

Reads {"model", "backend", "options", "cache"} as JSON from standard input: `cache` is a folder for
compiled code, or null. Its last line of output is the answer as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

ENTERED = time.monotonic()


def main() -> int:
    """Build the engine, make one token, tell the times. Returns the exit code."""
    from ..shared.errors import TwinferError

    try:
        print(json.dumps(start(**json.load(sys.stdin))))
    except TwinferError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    return 0


def with_cache(
    model: str, backend: str, options: dict[str, Any], cache: str | None
) -> dict[str, Any]:
    """The options, with compiled code kept in the folder `cache` where anything is kept."""
    from ..shared.compilation_config import keeps_code
    from ..shared.config import EngineConfig
    from ..shared.worker import backend_module

    config = EngineConfig.from_options({"model": model, "backend": backend, **options})
    platform = backend_module(backend).find_device(config.device).platform
    if cache is None or not keeps_code(config.compilation(), platform):
        return options
    return options | {
        "compilation_config": {**(options.get("compilation_config") or {}), "cache_dir": cache}
    }


def start(
    model: str, backend: str, options: dict[str, Any], cache: str | None = None
) -> dict[str, Any]:
    """The times of one start, in seconds; `_at` are readings of the machine's monotonic clock."""
    from ..shared.sampling_params import SamplingParams
    from ..shared.worker import backend_module
    from .llm import LLM

    backend_module(backend)
    imported = time.monotonic()
    options = with_cache(model, backend, options, cache)
    with LLM(model, backend=backend, progress=False, **options) as llm:
        ready = time.monotonic()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        llm.generate([[1, 2, 3]], params, progress=False)
        first = time.monotonic()
        return {
            "entered_at": ENTERED,
            "ready_at": ready,
            "import_s": imported - ENTERED,
            "init_s": ready - imported,
            "phases": llm.engine.report.seconds,
            "programs": len(llm.engine.report.programs),
            "first_token_s": first - ready,
        }


if __name__ == "__main__":
    raise SystemExit(main())
