"""The torch worker: the same steps as the JAX worker, eager or with compiled layers, tokens fed back on the device."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import numpy as np
import torch

from ..bucketing import Descriptor, Table
from ..ops import OpError, Plans
from ..ops.bindings.torch import bind
from ..shared.config import DeviceInfo, ResolvedConfig, host_memory
from ..shared.errors import BackendUnavailable, ConfigError, InternalError, OutsideTable
from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from ..shared.models.table import parameter_count
from ..shared.step import (
    StepInput,
    StepOutput,
    StepShape,
    TopLogprobs,
    batch_layout,
    processor_layout,
    sampling_layout,
)
from ..shared.worker import HOST_MEMORY_FOR_KV, ProgramReport, Progress, kv_page_bytes, step_temporaries
from .compilation import LayerCompiler, compiled_graphs
from .module import Decoder
from .plans import DTYPES, make_plans
from .weights import load_weights

SMALL_MODEL = 64_000_000
"""Weights below which a CPU runs on one thread: more gain nothing there, and wait for cores that others hold (measured:
5 instead of 330 tokens/s with one of two cores busy)."""
PROMPT_ROWS = 64
"""Rows of logits made at a time for the log-probabilities of prompts."""


def find_device(device: str) -> DeviceInfo:
    """The torch device that `device` (auto, cpu, cuda, tpu) names. Raises BackendUnavailable."""
    if device == "tpu":
        raise BackendUnavailable("device: torch has no tpu device here; use the jax backend on TPUs")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("device: torch has no cuda device here")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        properties = torch.cuda.get_device_properties(0)
        return DeviceInfo("cuda", properties.name, properties.total_memory)
    return DeviceInfo("cpu", "cpu", host_memory())


def make_worker(model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str) -> TorchWorker:
    """A worker on `device` for the model in `folder`."""
    return TorchWorker(model, config, device, folder)


@dataclass(slots=True)
class Handle:
    """A started step. Tensors are on their way to the host; `ready` is recorded behind the copies on a GPU."""

    step: StepInput
    tokens: torch.Tensor
    top: tuple[torch.Tensor, ...] | None
    prompt: list[tuple[torch.Tensor, ...]] | None
    ready: torch.cuda.Event | None

    def result(self) -> StepOutput:
        """Wait for the step."""
        if self.ready is not None:
            self.ready.synchronize()
        top = None if self.top is None else TopLogprobs(*(x.numpy() for x in self.top))
        prompt = None
        if self.prompt is not None:
            prompt = TopLogprobs(*(torch.cat(column).numpy() for column in zip(*self.prompt, strict=True)))
        return StepOutput(self.step.step_id, self.tokens.numpy(), top, prompt)


class TorchWorker:
    """Runs steps through torch. See `shared/worker.py` for the contract of each method."""

    def __init__(self, model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str) -> None:
        self.device = device
        self._folder = folder
        self._config = config
        self._where = torch.device(device.platform)
        self._table = decoder.abstract(model)
        _pin_precision()
        if device.platform == "cpu" and parameter_count(self._table, model.num_layers) < SMALL_MODEL:
            torch.set_num_threads(1)
        try:
            self._plans = make_plans(model, config)
        except OpError as error:
            raise ConfigError(f"op_priority, enable_ops: {error}") from error
        compiling = config.compile_level > 0
        self._ops = {kind: bind(plan, compiling=compiling) for kind, plan in self._plans.by_kind.items()}
        self._shape = StepShape(config.pages_per_request, config.max_num_seqs, config.max_model_len, model.vocab_size)
        self._dtype = DTYPES[config.dtype]
        self._module = Decoder(model, self._table, self._ops, self._dtype, self._where)
        self._layers = LayerCompiler(decoder.layer_function(model), config.compile_level)
        self._graphs_at_ready: int | None = None

    def load(self, progress: Progress) -> None:
        """Read or make the weights."""
        config = self._config
        load_weights(self._module, self._folder, config.load_format, self._table, config.seed, progress)
        tables = decoder.rotary_tables(self._module.config, config.max_model_len)
        self._cos, self._sin = (torch.from_numpy(table).to(self._where) for table in tables)
        self._last_tokens = torch.zeros(config.max_num_seqs + 1, dtype=torch.int32, device=self._where)

    def measure(self) -> int:
        """Bytes for the KV cache."""
        if self.device.platform == "cpu":
            return HOST_MEMORY_FOR_KV
        free, total = torch.cuda.mem_get_info()
        temporaries = step_temporaries(self._module.config, self._config)
        return free - int(total * (1 - self._config.memory_utilization)) - temporaries

    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return kv_page_bytes(self._module.config, self._config, self._dtype.itemsize)

    def allocate_kv(self, num_pages: int) -> None:
        """Allocate the cache: one view of one buffer per layer."""
        c = self._module.config
        shape = (c.num_layers, num_pages + 1, self._config.page_size, 2 * c.num_kv_heads, c.head_dim)
        self._kv = torch.zeros(shape, dtype=self._dtype, device=self._where)

    def warm_up(self, table: Table, progress: Progress) -> list[ProgramReport]:
        """Run each program once on padding; with compiled layers, that compiles them."""
        reports = []
        for descriptor in table:
            start = time.perf_counter()
            self._layers.build(descriptor)
            self._run_once(descriptor)
            reports.append(ProgramReport(str(descriptor), time.perf_counter() - start))
            progress("programs", len(reports), len(table))
        self._graphs_at_ready = compiled_graphs()
        return reports

    def _run_once(self, descriptor: Descriptor) -> None:
        batch = batch_layout(descriptor, self._shape).allocate()
        sampling = sampling_layout(descriptor.requests).allocate()
        views = batch_layout(descriptor, self._shape).views(batch)
        views["slots"][:] = -1
        views["rows"][:] = self._shape.max_rows
        sampling_layout(descriptor.requests).view(sampling, "sample_rows")[:] = self._shape.max_rows
        self.execute(StepInput(0, descriptor, self._shape, "greedy", batch, sampling)).result()

    @torch.inference_mode()
    def execute(self, step: StepInput) -> Handle:
        """Start a step."""
        f, hidden = self._backbone(step)
        rows = hidden[f["sample_index"]]
        logits = self._module.logits(rows)
        tokens = self._sample(step, logits)
        top = prompt = None
        if step.logprobs:
            top = self._download(self._ops["sample"].top_logprobs(logits, tokens))
        if step.prompt_targets is not None:
            prompt = self._prompt_logprobs(step.prompt_targets, hidden)
        (on_host,) = self._download((tokens,))
        ready = None
        if self._where.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return Handle(step, on_host, top, prompt, ready)

    def _backbone(self, step: StepInput) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The fields of the batch on the device, and the finished hidden states [T dim]."""
        d = step.descriptor
        if d not in self._layers:
            raise OutsideTable(f"no program for {d}: the table was frozen at start")
        batch = self._upload(step.batch)
        f = batch_layout(d, self._shape).unpack(batch, _bits_to_float)
        host = step.field
        metadata = {name: f[name] for name in ("query_start", "kv_lens", "counts")}
        if self._plans[d.kind]["paged_attention"].implementation.host_metadata:
            metadata = {name: torch.from_numpy(host(name)) for name in metadata}
        ids = torch.where(f["token_ids"] < 0, self._last_tokens[_fit(f["rows"], d.tokens)], f["token_ids"])
        cos, sin = self._cos[f["positions"]], self._sin[f["positions"]]
        arguments = decoder.Batch(cos, sin, f["slots"], f["page_table"], **metadata)
        return f, self._module(ids, self._kv, arguments, d.kind, d.max_query_len, self._layers[d])

    @torch.inference_mode()
    def logits(self, step: StepInput) -> np.ndarray:
        """Run a step and return its logits at every token: [T, vocab] float32. For comparisons only."""
        logits: np.ndarray = self._module.logits(self._backbone(step)[1]).cpu().numpy()
        return logits

    def _sample(self, step: StepInput, logits: torch.Tensor) -> torch.Tensor:
        ops, requests = self._ops["sample"], step.descriptor.requests
        f = sampling_layout(requests).unpack(self._upload(step.sampling), _bits_to_float)
        if step.sampler == "greedy":
            tokens = ops.greedy_sample(logits)
        else:
            if step.processors is None:
                scores = ops.quantize_logits(logits)
            else:
                buffer = self._upload(step.processors)
                p = processor_layout(requests, self._shape).unpack(buffer, _bits_to_float)
                last = self._last_tokens[p.pop("rows")][:, None]
                scores = ops.penalties(logits, **(p | {"history": torch.where(p["history"] == -2, last, p["history"])}))
            names = ("position", "seed_lo", "seed_hi", "greedy", "scale", "top_k", "top_p", "min_p")
            tokens = ops.sample(logits, scores, *(f[name] for name in names), step.sampler != "random")
        self._last_tokens[f["sample_rows"]] = tokens
        return tokens

    def _prompt_logprobs(self, targets: np.ndarray, hidden: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        chosen = self._upload(np.maximum(targets, 0))
        parts = zip(hidden.split(PROMPT_ROWS), chosen.split(PROMPT_ROWS), strict=True)
        return [self._download(self._ops["sample"].top_logprobs(self._module.logits(rows), ids)) for rows, ids in parts]

    def _upload(self, x: np.ndarray) -> torch.Tensor:
        """A copy on the device that never waits for it: through pinned memory, which torch frees when it was read."""
        if self._where.type == "cpu":
            return torch.from_numpy(x)
        pinned = torch.empty(x.shape, dtype=torch.int32, pin_memory=True)
        pinned.numpy()[...] = x
        return pinned.to(self._where, non_blocking=True)

    def _download(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._where.type == "cpu":
            return tensors
        pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
        return tuple(host.copy_(x, non_blocking=True) for host, x in zip(pinned, tensors, strict=True))

    def plans(self) -> Plans:
        """The implementation of each op."""
        return self._plans

    def compilations_after_ready(self) -> int:
        """Graphs compiled in this process since warm_up returned."""
        if self._graphs_at_ready is None:
            raise InternalError("the worker is not warmed up yet")
        return compiled_graphs() - self._graphs_at_ready

    def close(self) -> None:
        """Drop weights and cache."""
        self._module = self._kv = self._last_tokens = None
        if self._where.type == "cuda":
            torch.cuda.empty_cache()


def _bits_to_float(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.float32)


def _fit(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """The row of the request at each token's index; only the first tokens of a batch ever look at theirs."""
    if tokens <= rows.shape[0]:
        return rows[:tokens]
    return torch.nn.functional.pad(rows, (0, tokens - rows.shape[0]))


def _pin_precision() -> None:
    """No framework defaults: float32 products in float32, bfloat16 products accumulated in float32."""
    # Inductor advises what we refuse on purpose.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
