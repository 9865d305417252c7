"""`twinfer demo`: the bundled model completes the same prompts on several workers, and the tokens
are compared with those of the first.

Each worker runs in a process of its own, so that neither framework is ever loaded beside the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..shared.config import BACKENDS
from ..shared.errors import ConfigError, TwinferError
from ..shared.interpreter import module_command
from ..shared.sampling_params import SamplingParams
from ..shared.worker import check_installed

PROMPTS = (
    "def read_file(path):\n",
    "class Node:\n    def __init__(self",
    "import json\n\ndef load_config(filename",
    "for i in range(",
    "    with open(filename, ",
    "    if not isinstance(",
    "def __repr__(self):\n    return ",
    "# This module ",
)
BOTH = "jax,torch"
"""The workers that run unless others are asked for."""
TIE_FACTOR = 4.0
"""Two tokens are a tie if both sides see a margin below this many times the difference between
the sides.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One completion of one worker. `logprobs[i]` maps the best two tokens at position i to
    log-probabilities.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """All completions of one worker, in the order of the prompts; seconds to start and to
    generate.
    """

    backend: str
    device: str
    start_seconds: float
    seconds: float
    results: list[Result]

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return sum(len(result.token_ids) for result in self.results) / self.seconds


def parse_backends(text: str) -> list[str]:
    """The backends of a list with commas, two or more. Raises ConfigError."""
    names = text.split(",")
    if len(names) < 2 or len(set(names)) < len(names) or not set(names) <= set(BACKENDS):
        raise ConfigError(
            f"backends: got {text!r}, allowed are two or more of {', '.join(BACKENDS)}, each once, "
            f"such as {BOTH}"
        )
    return names


def run(dtype: str, max_tokens: int, backends: str = BOTH) -> int:
    """Run the demo and print it. 0 if all tokens are equal (or differ at proven ties only), else
    1.
    """
    SamplingParams(max_tokens=max_tokens)  # raises before any worker starts
    names = parse_backends(backends)
    for backend in names:
        check_installed(backend)
    console = Console()
    runs = [_start(backend, dtype, max_tokens) for backend in names]
    table = Table(title=f"demo model, {dtype}, greedy", show_lines=True)
    table.add_column("prompt", overflow="fold")
    for side in runs:
        table.add_column(f"{side.backend} on {side.device}", overflow="fold")
    for index, prompt in enumerate(PROMPTS):
        table.add_row(
            *(_literal(text) for text in (prompt, *(side.results[index].text for side in runs)))
        )
    console.print(table)
    width = max(5, *(len(side.backend) for side in runs))
    for side in runs:
        console.print(
            f"{side.backend:>{width}} on {side.device}: ready in {side.start_seconds:.1f} s, "
            f"{side.rate:.0f} tokens/s",
            highlight=False,
        )
    first, *others = runs
    verdicts = [compare(first.results, other.results) for other in others]
    for other, verdict in zip(others, verdicts, strict=True):
        # Of two workers nobody has to be told which.
        which = f"{first.backend} and {other.backend}, " if len(others) > 1 else ""
        for line in verdict.notes:
            console.print(f"{which}{line}", highlight=False)
        console.print(f"{which}tokens equal: {verdict.equal}/{verdict.total}", highlight=False)
    return 1 if any(verdict.real for verdict in verdicts) else 0


@dataclass(slots=True)
class Verdict:
    """Tokens compared, tokens equal, and how many prompts differ for real (not at a proven tie)."""

    total: int = 0
    equal: int = 0
    real: int = 0
    notes: list[str] = field(default_factory=list)


def compare(left: list[Result], right: list[Result]) -> Any:
    """Compare completions prompt by prompt.

    After the first difference of a prompt the two sides continue different texts, so the rest
    counts as not equal. The difference is a proven tie if each side holds the same two tokens for
    the best, by a margin that is smaller than `TIE_FACTOR` times the largest difference of
    log-probabilities between the sides before it.
    """
    verdict = Verdict()
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        length = max(len(a.token_ids), len(b.token_ids))
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        first = next(
            (i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids))
        )
        verdict.total += length
        verdict.equal += first
        if first == length:
            continue
        noise = max(
            (abs(x[t] - y[t]) for x, y in _before(a, b, first) for t in x.keys() & y.keys()),
            default=0.0,
        )
        margins = [_margin(side, first) for side in (a, b)]
        tie = None not in margins and margins[0][0] == margins[1][0]
        tie = tie and max(margin for _, margin in margins) < TIE_FACTOR * noise
        verdict.real += not tie
        kind = "a tie" if tie else "a real difference"
        verdict.notes.append(
            f"prompt {index}: {kind} at token {first} (margins {margins}, noise {noise:.2e})"
        )
    return verdict


def _before(a: Result, b: Result, first: int) -> Any:
    return zip(a.logprobs[: first + 1], b.logprobs[: first + 1], strict=False)


def _margin(result: Result, position: int) -> Any:
    """The two best tokens at a position, and how far apart they are; None past the end."""
    if position >= len(result.logprobs):
        return None
    best = sorted(result.logprobs[position].items(), key=lambda item: -item[1])[:2]
    return sorted(token for token, _ in best), best[0][1] - best[-1][1]


def _literal(text: str) -> str:
    """The text as rich should print it: its brackets are no markup."""
    return text.replace("[", "\\[")


def _start(backend: str, dtype: str, max_tokens: int) -> WorkerRun:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        options = ["--backend", backend, "--dtype", dtype, "--max-tokens", str(max_tokens)]
        command = [*module_command(__spec__.name), *options, "--out", str(out)]
        done = subprocess.run(command, check=False)
        if done.returncode:
            raise TwinferError(f"demo: the {backend} worker ended with exit code {done.returncode}")
        record = json.loads(out.read_text())
    return WorkerRun(**(record | {"results": [Result(**result) for result in record["results"]]}))


def work(backend: str, dtype: str, max_tokens: int) -> WorkerRun:
    """Complete all prompts on one worker, in this process."""
    from ..shared.demand import Demand
    from ..shared.models.locate import model_folder
    from ..shared.tokenizer import Tokenizer
    from .batch import need_tokenizer
    from .llm import LLM

    start = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    tokenizer = need_tokenizer(Tokenizer.load(model_folder("demo")))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    demand = Demand.of((len(prompt), params) for prompt in prompts)
    options: dict[str, Any] = dict(
        dtype=dtype, max_model_len=256, tokenizer=tokenizer, demand=demand
    )
    with LLM("demo", backend=backend, device="auto", **options) as llm:
        ready = time.perf_counter()
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        done = time.perf_counter()
        device = llm.engine.device.platform
    results = []
    for output in outputs:
        best = [
            {str(token): entry.logprob for token, entry in row.items()}
            for row in output.logprobs or []
        ]
        results.append(Result(output.text, output.token_ids, best))
    return WorkerRun(backend, device, ready - start, done - ready, results)


def main() -> int:
    """The process of one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    try:
        record = asdict(work(arguments.backend, arguments.dtype, arguments.max_tokens))
    except TwinferError as error:
        print(f"twinfer: error: {error}", file=sys.stderr)
        return error.exit_code
    Path(arguments.out).write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
