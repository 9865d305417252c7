"""The benchmark workloads: decode, prefill, time to first token, a mixed load, start, and latency
by percentile.

Everything runs through `LLM` on token ids; no text is made. Times are host times around a whole
call.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from ..shared.errors import BackendUnavailable, ConfigError, InternalError
from ..shared.interpreter import module_command
from ..shared.limits import Limits, decode_bytes, prefill_flops
from ..shared.sampling_params import SamplingParams
from .bench_cache import REMEDY, Shortage, find_shortage

if TYPE_CHECKING:
    from ..shared.config import ResolvedConfig
    from .llm import LLM

SAMPLINGS = ("greedy", "model")
USUAL = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
"""Settings of the sampling `model` where the model brings none: those of Qwen3."""
PARTS = ("start", "decode", "prefill", "ttft", "mixed")
LONG_PARTS = ("skewed", "turns")
"""Parts that run only where they are named: their contexts are longer than an engine has by
default.
"""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
MARGIN = 100
"""Random token ids keep away from both ends of the vocabulary, where special tokens lie."""
LEAST_STEPS = 8
"""Steps with the whole batch in them that make a figure."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
"""Where compilers keep what they made. `OPTIONAL_CACHES` are off unless the user names a folder."""
OPTIONAL_CACHES = ("JAX_COMPILATION_CACHE_DIR",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured. The defaults are the workload that figures are compared on; `standard` says
    whether it is that.

    decode: a batch with `input_len` tokens in, (time for `output_len` out - time for 1 out) /
    (`output_len` - 1); where the prompts need several steps, decodes run beside them in that
    difference, and a step in which all decode is measured too; a batch that the KV cache does not
    hold at once is left out. prefill: `prefill_prompts` prompts of `prefill_len`, 1 out. ttft: one
    such prompt. mixed: `mixed_requests` with lengths in and out from `random.Random(1)` within
    [low, high). Medians of `repeats`; ttft of `ttft_repeats`.

    `contexts`: decode with each of these numbers of tokens in, instead of `input_len`. `sampling`:
    greedy, or with what the model's generation_config.json says (`USUAL` where it says nothing).

    skewed: a decode step of one request with `skewed[0]` tokens in among `skewed[2]` with
    `skewed[1]`. turns: a chat whose first message has `turns[0]` tokens, then `turns[1]` turns of
    `turns[2]` new ones, each answered by as many; how long its first token takes.
    """

    only: tuple[str, ...] = PARTS
    batch_sizes: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    input_len: int = 128
    output_len: int = 129
    prefill_prompts: int = 32
    prefill_len: int = 1024
    mixed_requests: int = 512
    mixed_input: tuple[int, ...] = (64, 1024)
    mixed_output: tuple[int, ...] = (32, 256)
    repeats: int = 3
    ttft_repeats: int = 5
    contexts: tuple[int, ...] = ()
    sampling: str = "greedy"
    skewed: tuple[int, ...] = (102_400, 1024, 63)
    turns: tuple[int, ...] = (30_000, 5, 100)

    def __post_init__(self) -> None:
        allowed = PARTS + LONG_PARTS
        unknown = [part for part in self.only if part not in allowed]
        if unknown or not self.only:
            raise ConfigError(
                f"only: got {', '.join(unknown) or 'nothing'}, allowed are {', '.join(allowed)}"
            )
        if not self.batch_sizes or any(size < 1 for size in self.batch_sizes):
            raise ConfigError(f"batch_sizes: got {self.batch_sizes}, must be positive integers")
        if self.sampling not in SAMPLINGS:
            raise ConfigError(
                f"sampling: got {self.sampling!r}, allowed are {', '.join(SAMPLINGS)}"
            )
        if any(length < 1 for length in self.contexts):
            raise ConfigError(f"contexts: got {self.contexts}, must be positive integers")
        for name in (
            "input_len",
            "prefill_prompts",
            "prefill_len",
            "mixed_requests",
            "repeats",
            "ttft_repeats",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, must be a positive integer")
        if self.output_len < 2:
            raise ConfigError(
                f"output_len: got {self.output_len}, must be at least 2: a step is a difference"
            )
        for name in LONG_PARTS:
            three = getattr(self, name)
            if len(three) != 3 or min(three) < 1:
                raise ConfigError(f"{name}: got {three}, must be three positive integers")
        for name in ("mixed_input", "mixed_output"):
            low_high = getattr(self, name)
            if len(low_high) != 2 or not 1 <= low_high[0] < low_high[1]:
                raise ConfigError(f"{name}: got {low_high}, must be low,high with 1 <= low < high")

    @property
    def standard(self) -> bool:
        """Whether sizes and repeats are the defaults (the parts and the batch sizes may be a
        selection).
        """
        default = Workload()
        return all(
            getattr(self, f.name) == getattr(default, f.name)
            for f in fields(self)
            if f.name not in ("only", "batch_sizes")
        )

    @property
    def decode_lengths(self) -> tuple[int, ...]:
        """Tokens in of the batches that decode."""
        return self.contexts or (self.input_len,)

    def check(self, max_model_len: int, max_num_seqs: int, prefixes: bool = False) -> None:
        """Raise ConfigError for what an engine of these limits cannot run as one batch, or not
        without a cache of prefixes.
        """
        if "turns" in self.only and not prefixes:
            raise ConfigError("enable_prefix_caching: got False, turns need it")
        first, turns, turn = self.turns
        others = self.skewed[2]
        decoded = "contexts" if self.contexts else "input_len"
        needs = {
            "decode": (max(self.decode_lengths) + self.output_len, f"{decoded} or output_len"),
            "prefill": (self.prefill_len + 1, "prefill_len"),
            "ttft": (self.prefill_len + 1, "prefill_len"),
            "mixed": (
                self.mixed_input[1] + self.mixed_output[1] - 2,
                "mixed_input or mixed_output",
            ),
            "skewed": (max(self.skewed[:2]) + self.output_len, "skewed or output_len"),
            "turns": (first + 2 * turns * turn, "turns"),
        }
        for part in self.only:
            needed, why = needs.get(part, (0, ""))
            if needed > max_model_len:
                raise ConfigError(
                    f"max_model_len: got {max_model_len}, {part} needs {needed} tokens: "
                    f"lower {why}, or leave that part out (only)"
                )
        if "decode" in self.only and max(self.batch_sizes) > max_num_seqs:
            raise ConfigError(
                f"batch_sizes: got {max(self.batch_sizes)}, max_num_seqs is {max_num_seqs}"
            )
        if "skewed" in self.only and others + 1 > max_num_seqs:
            raise ConfigError(f"skewed: got {others + 1} requests, max_num_seqs is {max_num_seqs}")


class Runner:
    """Completes random prompts on one engine and takes the time."""

    def __init__(self, llm: LLM, sampling: str = "greedy") -> None:
        llm.tokenizer = None  # token ids only, also for a folder that has a tokenizer
        self.llm = llm
        self.params = SamplingParams(temperature=0.0)
        if sampling == "model":
            own = llm.default_params
            self.params = USUAL if own == SamplingParams() else own
        self.model = llm.engine.model
        self.guesses = llm.engine.config.speculative_config is not None
        self._rng = random.Random(0)

    def accepted_tokens(self) -> int:
        """How many guessed tokens have been right so far."""
        return self.llm.engine.metrics().accepted_tokens

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Random token ids."""
        low, high = (MARGIN, self.model.vocab_size - MARGIN)
        if low >= high:
            low, high = 0, self.model.vocab_size
        return [[self._token(low, high) for _ in range(length)] for length in lengths]

    def _token(self, low: int, high: int) -> int:
        """A random token that stands for text."""
        while (token := self._rng.randrange(low, high)) in self.model.image_token_ids:
            pass
        return token

    def complete(self, prompt: Sequence[int], output_len: int) -> tuple[float, list[int]]:
        """Seconds to the first token behind a prompt, and `output_len` tokens."""
        engine, tokens = self.llm.engine, list[int]()
        params = replace(self.params, max_tokens=output_len, ignore_eos=True, seed=0)
        start, first = time.perf_counter(), 0.0
        engine.add("bench-turn", prompt, params)
        while engine.has_work:
            for update in engine.step():
                first = first or time.perf_counter() - start
                tokens += update.tokens
        return first, tokens

    def seconds(self, lengths: Sequence[int], outputs: Sequence[int]) -> float:
        """Time to complete a prompt of each length with as many tokens as `outputs` says."""
        prompts: Any = self.prompts(lengths)
        params = [
            replace(self.params, max_tokens=n, ignore_eos=True, seed=i)
            for i, n in enumerate(outputs)
        ]
        start = time.perf_counter()
        done = self.llm.generate(prompts, params, progress=False)
        elapsed = time.perf_counter() - start
        made = [len(output.outputs[0].token_ids) for output in done]
        if made != list(outputs):
            raise InternalError(f"bench: asked for {sum(outputs)} tokens, got {sum(made)}")
        return elapsed


def run_workload(llm: LLM, workload: Workload, limits: Limits) -> dict[str, Any]:
    """The figures of every part but start, by part. A batch that the cache does not hold at once is
    left out of decode; ConfigError if all are, or if it does not hold the skewed one.
    """
    config = llm.engine.config
    workload.check(config.max_model_len, config.max_num_seqs, config.enable_prefix_caching)
    shortages = _shortages(llm, workload)
    runner = Runner(llm, workload.sampling)
    warm, outputs = min(8, config.max_num_seqs), min(16, workload.output_len)
    # No part may ask for a length, and what is not asked for was not checked.
    length = min(128, *workload.decode_lengths, config.max_model_len - outputs)
    runner.seconds([max(1, length)] * warm, [outputs] * warm)
    figures: dict[str, Any] = {}
    if "decode" in workload.only:
        figures["decode"] = dict(_decodes(runner, workload, shortages, limits))
    if "prefill" in workload.only:
        figures["prefill"] = prefill(runner, workload, limits)
    if "ttft" in workload.only:
        figures["ttft"] = ttft(runner, workload, limits)
    if "mixed" in workload.only:
        figures["mixed"] = mixed(runner, workload)
    if "skewed" in workload.only:
        figures["skewed"] = skewed(runner, workload, limits)
    if "turns" in workload.only:
        figures["turns"] = turns(runner, workload, limits)
    return figures


def _shortages(llm: LLM, workload: Workload) -> dict[tuple[int, int], Shortage | None]:
    """What each batch that decodes lacks, by tokens in and requests. Raises ConfigError where
    nothing would be left of decode, or of skewed.
    """
    config, scheduler = llm.engine.config, llm.engine.scheduler
    if "skewed" in workload.only:
        long, short, others = workload.skewed
        lengths = [long] + [short] * others
        outputs = _full_outputs(config, lengths, workload.output_len)
        if shortage := find_shortage(scheduler, lengths, outputs):
            raise ConfigError(f"skewed: got {workload.skewed}, {shortage}: {REMEDY}")
    shortages = {}
    if "decode" in workload.only:
        for length in workload.decode_lengths:
            for size in workload.batch_sizes:
                lengths, outputs = [length] * size, workload.output_len
                if _read_in_parts(config, lengths):
                    outputs = _full_outputs(config, lengths, outputs)
                shortages[length, size] = find_shortage(scheduler, lengths, outputs)
        if all(shortages.values()):
            least = min(filter(None, shortages.values()), key=lambda one: one.pages_needed)
            raise ConfigError(f"batch_sizes: got {workload.batch_sizes}, {least}: {REMEDY}")
    return shortages


def _decodes(
    runner: Runner, workload: Workload, shortages: Mapping[tuple[int, int], Shortage | None],
    limits: Limits,
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """The figures of each batch that decodes, or what it lacks, by its name."""
    for (length, size), shortage in shortages.items():
        name = f"{size} of {length}" if workload.contexts else str(size)
        if shortage is not None:
            yield name, shortage.figures()
        else:
            yield name, decode(runner, replace(workload, input_len=length), size, limits)


def _read_in_parts(config: ResolvedConfig, lengths: Sequence[int]) -> bool:
    """Whether reading the prompts takes several steps."""
    return sum(lengths) > config.max_num_batched_tokens


def _full_outputs(config: ResolvedConfig, lengths: Sequence[int], wanted: int) -> int:
    """Tokens out with which as many steps as `wanted` follow once all prompts are read, or as many
    as the engine's contexts hold.
    """
    reading = -(-sum(lengths) // config.max_num_batched_tokens)
    # The first to be read has this many tokens more than the last, and steps are not all alike.
    return min(wanted + reading + 2, config.max_model_len - max(lengths))


def decode(runner: Runner, workload: Workload, batch: int, limits: Limits) -> dict[str, Any]:
    """One decode step of a batch; where tokens are guessed, one token of each request, as a step
    brings more then, and reads more than is counted here.
    """
    steps = workload.output_len - 1
    lengths = [workload.input_len] * batch
    runs, before = [], runner.accepted_tokens()
    for _ in range(workload.repeats):
        first = runner.seconds(lengths, [1] * batch)
        runs.append((runner.seconds(lengths, [workload.output_len] * batch) - first) / steps)
    step = statistics.median(runs)
    row: dict[str, Any] = {
        "ms_per_token" if runner.guesses else "ms_per_step": step * 1e3,
        "tok_s": batch / step,
        "runs_ms": [run * 1e3 for run in runs],
    }
    if runner.guesses:
        made, accepted = len(runs) * batch * steps, runner.accepted_tokens() - before
        row |= {"tokens_per_step": made / (made - accepted), "share_of_limit": None}
    else:
        # In step i of 1..steps a request attends to its prompt and i tokens.
        moved = _moved(runner, [workload.input_len + (steps + 1) / 2] * batch)
        of_copy = share(moved, step, limits.copy_bytes_per_s)
        row |= {"bytes_per_step": moved, "share_of_limit": of_copy}
    if _read_in_parts(runner.llm.engine.config, lengths):
        row |= _full_step(runner, lengths, workload.output_len, limits)
    return row


def _moved(runner: Runner, lengths: Sequence[float]) -> float:
    config = runner.llm.engine.config
    sizes = ITEMSIZE[config.dtype], ITEMSIZE[config.kv_cache_dtype]
    return decode_bytes(runner.model, lengths, *sizes)


def _full_step(
    runner: Runner, lengths: Sequence[int], wanted: int, limits: Limits
) -> dict[str, Any]:
    """A decode step of a whole batch, by the times between tokens once all prompts are read:
    `wanted` such steps, if the engine's contexts are long enough. See `decode` for guesses.

    Empty where too few such steps fit behind the prompts.
    """
    output_len = _full_outputs(runner.llm.engine.config, lengths, wanted)
    arrivals = np.array(_arrivals(runner, runner.prompts(lengths), output_len, len(lengths)))
    begin = arrivals[:, 0].max()
    end = arrivals[:, -1].min()
    inside = (arrivals > begin) & (arrivals <= end)
    steps = int(inside.sum(axis=1).min())
    if steps < LEAST_STEPS:
        return {}
    if runner.guesses:
        # The tokens that a request keeps of a step come at once.
        seen = sum(
            len(np.unique(times[kept])) for times, kept in zip(arrivals, inside, strict=True)
        )
        return {
            "ms_per_full_token": float(end - begin) / float(inside.sum(axis=1).mean()) * 1e3,
            "full_tokens": steps,
            "tokens_per_full_step": int(inside.sum()) / seen,
            "share_of_limit_full": None,
        }
    step = float(end - begin) / steps
    # How many slots each request has in the middle of that time.
    made = (arrivals <= (begin + end) / 2).sum(axis=1)
    moved = _moved(runner, (np.array(lengths) + made).tolist())
    return {
        "ms_per_full_step": step * 1e3,
        "full_steps": steps,
        "share_of_limit_full": share(moved, step, limits.copy_bytes_per_s),
    }


def prefill(runner: Runner, workload: Workload, limits: Limits) -> dict[str, Any]:
    """Prompt tokens per second."""
    count, length = workload.prefill_prompts, workload.prefill_len
    runs = [runner.seconds([length] * count, [1] * count) for _ in range(workload.repeats)]
    work = prefill_flops(runner.model, [length] * count)
    return {
        "tok_s": count * length / statistics.median(runs),
        "runs_tok_s": [count * length / run for run in runs],
        "flops": work,
        "share_of_limit": share(work, statistics.median(runs), limits.matmul_flops_per_s),
    }


def ttft(runner: Runner, workload: Workload, limits: Limits) -> dict[str, Any]:
    """Time from one prompt to its first token."""
    runs = [runner.seconds([workload.prefill_len], [1]) for _ in range(workload.ttft_repeats)]
    work = prefill_flops(runner.model, [workload.prefill_len])
    return {
        "ms": statistics.median(runs) * 1e3,
        "runs_ms": [run * 1e3 for run in runs],
        "flops": work,
        "share_of_limit": share(work, statistics.median(runs), limits.matmul_flops_per_s),
    }


def mixed(runner: Runner, workload: Workload) -> dict[str, Any]:
    """Requests of random lengths, all at once."""
    rng = random.Random(1)
    lengths = [rng.randrange(*workload.mixed_input) for _ in range(workload.mixed_requests)]
    outputs = [rng.randrange(*workload.mixed_output) for _ in range(workload.mixed_requests)]
    elapsed = runner.seconds(lengths, outputs)
    return {
        "seconds": elapsed,
        "requests_s": len(lengths) / elapsed,
        "out_tok_s": sum(outputs) / elapsed,
        "total_tok_s": (sum(lengths) + sum(outputs)) / elapsed,
        "in_tokens": sum(lengths),
        "out_tokens": sum(outputs),
    }


def skewed(runner: Runner, workload: Workload, limits: Limits) -> dict[str, Any]:
    """A decode step of one long request among short ones."""
    long, short, others = workload.skewed
    row = _full_step(runner, [long] + [short] * others, workload.output_len, limits)
    if not row:
        raise ConfigError(
            f"output_len: got {workload.output_len}, too few steps in which all {others + 1} "
            "requests decode"
        )
    return row


def turns(runner: Runner, workload: Workload, limits: Limits) -> dict[str, Any]:
    """Time to the first token of turns of a chat, whose past is cached. Each has read all weights
    and the past's cache once.
    """
    first, count, length = workload.turns
    chat = runner.prompts([first])[0]
    runner.complete(chat, 1)
    runs, moved = [], 0.0
    for _ in range(count):
        chat += runner.prompts([length])[0]
        moved = _moved(runner, [len(chat)])
        seconds, answer = runner.complete(chat, length)
        runs.append(seconds)
        chat += answer
    ttft = statistics.median(runs)
    return {
        "ms": ttft * 1e3,
        "runs_ms": [run * 1e3 for run in runs],
        "bytes": moved,
        "share_of_limit": share(moved, ttft, limits.copy_bytes_per_s),
    }


def share(work: float, seconds: float, rate: float | None) -> float | None:
    """Part of a measured rate that `work` in `seconds` makes use of; None where no rate was
    measured.
    """
    return None if rate is None else work / seconds / rate


def run_latency(
    llm: LLM, batch: int, input_len: int, output_len: int, iterations: int
) -> dict[str, Any]:
    """One batch, several times: milliseconds to the first token, between tokens, and of whole
    requests. Where tokens are guessed, several come at once: then it is the mean of a request
    between its tokens, and `tokens_per_step` says how many come together.
    """
    config = llm.engine.config
    if not 1 <= batch <= config.max_num_seqs:
        raise ConfigError(
            f"batch_size: got {batch}, must be from 1 to max_num_seqs, which is "
            f"{config.max_num_seqs}"
        )
    for name, value, low in (
        ("input_len", input_len, 1),
        ("output_len", output_len, 2),
        ("iterations", iterations, 1),
    ):
        if value < low:
            raise ConfigError(f"{name}: got {value}, must be at least {low}")
    if input_len + output_len > config.max_model_len:
        raise ConfigError(
            f"max_model_len: got {config.max_model_len}, the run needs {input_len + output_len} "
            "tokens"
        )
    if shortage := find_shortage(llm.engine.scheduler, [input_len] * batch, output_len):
        raise ConfigError(f"batch_size: got {batch}, {shortage}: {REMEDY}")
    runner = Runner(llm)
    runner.seconds([input_len] * batch, [2] * batch)
    first: list[float] = []
    between: list[float] = []
    whole: list[float] = []
    steps = 0
    for iteration in range(iterations):
        prompts = runner.prompts([input_len] * batch)
        for arrivals in _arrivals(runner, prompts, output_len, iteration):
            first.append(arrivals[0])
            if runner.guesses:
                between.append((arrivals[-1] - arrivals[0]) / (output_len - 1))
            else:
                between += [after - before for before, after in pairwise(arrivals)]
            steps += len(set(arrivals)) - 1
            whole.append(arrivals[-1])
    figures: dict[str, Any] = {
        "ttft_ms": percentiles(first),
        "per_token_ms": percentiles(between),
        "request_ms": percentiles(whole),
        "tok_s": batch * output_len / statistics.median(whole),
    }
    if runner.guesses:
        figures["tokens_per_step"] = len(whole) * (output_len - 1) / steps
    return figures


def _arrivals(
    runner: Runner, prompts: Sequence[Sequence[int]], output_len: int, iteration: int
) -> list[list[float]]:
    """Seconds from the start to each token, by request."""
    engine = runner.llm.engine
    start = time.perf_counter()
    arrivals: dict[str, list[float]] = {}
    for index, prompt in enumerate(prompts):
        request_id = f"bench-{iteration}-{index}"
        params = replace(runner.params, max_tokens=output_len, ignore_eos=True, seed=index)
        engine.add(request_id, prompt, params)
        arrivals[request_id] = []
    while engine.has_work:
        updates = engine.step()
        now = time.perf_counter() - start
        for update in updates:
            arrivals[update.request_id] += [now] * len(update.tokens)
    return list(arrivals.values())


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds, and how many there were."""
    p50, p90, p99 = (float(value) * 1e3 for value in np.percentile(seconds, (50, 90, 99)))
    return {"p50": p50, "p90": p90, "p99": p99, "count": len(seconds)}


def measure_start(model: str, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds from starting a process to a ready engine, by phase: with empty compile caches, then
    with what that left.

    Two processes, one after the other, before this one touches the device.
    """
    with TemporaryDirectory(prefix="twinfer-start-") as folder:
        names = [*CACHES, *(name for name in OPTIONAL_CACHES if name in os.environ)]
        environment = os.environ | {name: os.path.join(folder, name.lower()) for name in names}
        cache = os.path.join(folder, "cache") if backend == "torch" else None
        request = json.dumps(
            {"model": model, "backend": backend, "options": options, "cache": cache}
        )
        return {name: _start(request, environment) for name in ("cold", "warm")}


def _start(request: str, environment: dict[str, str]) -> dict[str, Any]:
    module = f"{__package__}.bench_start"
    spawned = time.monotonic()
    done = subprocess.run(
        module_command(module),
        input=request,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        for kind in (ConfigError, BackendUnavailable):
            if done.returncode == kind.exit_code:
                raise kind(last)
        raise InternalError(f"start: the process ended with {done.returncode}: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    entered, ready = answer.pop("entered_at"), answer.pop("ready_at")
    return {"ready_s": ready - spawned, "interpreter_s": entered - spawned, **answer}


def describe(llm: LLM, model: str) -> dict[str, Any]:
    """What a figure needs to be understood later: versions, device, plan, configuration,
    programs.
    """
    engine = llm.engine
    packages = {"torch": ("torch", "triton"), "jax": ("jax", "jaxlib", "libtpu")}[
        engine.config.backend
    ]
    return {
        "model": model,
        "model_hash": engine.model.raw_hash,
        "backend": engine.config.backend,
        "device": asdict(engine.device),
        "host": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {name: _version(name) for name in ("twinfer", "numpy", *packages)},
        "plan_hash": engine.worker.plan_hash(),
        "config": {f.name: getattr(engine.config, f.name) for f in fields(engine.config)},
        "programs": [{"name": p.name, "seconds": p.seconds} for p in engine.report.programs],
        "num_pages": engine.report.num_pages,
        "init_seconds": engine.report.seconds,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
