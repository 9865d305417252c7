"""Plants mistakes in a copy of the source, one at a time, and shows what `twinfer numerics check`
says of each: whether it sees it, and whether the first cause is the right one.

    python scripts/plant_faults.py [--only NAME ...] [--mode S] [--jobs N] [--json FILE]

A fault is an edit of one file, at a text that must be there as often as it says; or, with
`--catalogue`, one of the self-test's, in each implementation of its op on one backend, whoever
calls it. The clean copy is checked first. Exit code 1 if a fault is not seen, or the clean copy is
not equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import twinfer.tests.numerics.faults  # noqa: F401 - it adds to the catalogue
from twinfer.numerics.faults.catalogue import CATALOGUE
from twinfer.numerics.judging.gates import MODES
from twinfer.numerics.questions.selftest_model import CONFIG, write_model
from twinfer.numerics.sides.fault import faulty
from twinfer.ops import Op, Plan
from twinfer.serving.parser import OneLineParser, output_file, some_of, whole_number
from twinfer.serving.program import run_program
from twinfer.shared.models import decoder

ROOT = Path(__file__).resolve().parents[1]
RUN = (
    "import sys, twinfer; from twinfer.serving.cli import main; "
    "assert twinfer.__file__.startswith(sys.argv[1]), twinfer.__file__; "
    "from twinfer.scripts.plant_faults import spoil; spoil(*sys.argv[2:4]); "
    "sys.exit(main(sys.argv[4:]))"
)
MODELS = "dense", "experts"
"""Those that catalogued faults are planted in; the other faults are in the bundled model."""
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False,
    "layer_types": ["full_attention"] * 2, "sliding_window": None, "attention_bias": False,
}  # fmt: skip
"""What a mixture has besides the dense model of the self-test."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`old` becomes `new` in `file`; it stands there `count` times. `backend` has the fault, which
    a right first cause names by `cause`, a regular expression. `options` of the target name an
    implementation that has it, where the plan has another one.
    """

    name: str
    backend: str
    file: str
    old: str
    new: str
    cause: str
    count: int = 1
    model: str = "demo"
    options: str = ""

    @property
    def target(self) -> str:
        """The side that is checked."""
        return f"{self.backend}:cpu" + (f":{self.options}" if self.options else "")


OURS = "^our definition"
BEHIND = "behind the layers"
NATIVE = "paged_attention=native"
TORCH_ATTENTION = "ops/native/torch_attention.py"
JAX_ATTENTION = "ops/native/jax_attention.py"
PLUMBING = "gpu/plumbing.py"
PROGRAMS = "tpu/programs.py"

FAULTS = (
    # --- one op on one backend
    Fault(
        "attention-scale-of-padded-heads", "torch", TORCH_ATTENTION,
        "attn_mask=mask, scale=scale)",
        "attn_mask=mask, scale=scale * (size / (1 << (size - 1).bit_length())) ** 0.5)",
        r"torch:cpu:\S+ paged_attention=native", options=NATIVE,
    ),
    Fault(
        "second-block-has-first-positions", "torch", TORCH_ATTENTION,
        "torch.arange(past + first - start, past + last - start, device=q.device)",
        "torch.arange(past, past + last - first, device=q.device)",
        r"torch:cpu:\S+ paged_attention=native", options=NATIVE,
    ),
    Fault(
        "slots-in-16-bits", "torch", TORCH_ATTENTION,
        "        k.shape[0], heads, size\n    )\n    target = slots.remainder(",
        "        k.shape[0], heads, size\n    )\n"
        "    target = slots.to(torch.int16).to(torch.int64).remainder(",
        r"torch:cpu:\S+ write_kv=native", options="norm_rope_write_kv=composition",
    ),
    Fault(
        "sums-in-random-order", "torch", "ops/namespaces/torch_.py",
        "        return F.linear(rows_apart(x), w, bias)",
        "        order = torch.randperm(x.shape[-1])\n"
        "        return F.linear(x[..., order], w[:, order], bias)",
        r"torch:cpu: running the same again",
    ),
    Fault(
        "values-not-rescaled", "jax", JAX_ATTENTION,
        "state.values * decay + product", "state.values + product",
        r"jax:cpu: paged_attention=native",
    ),
    Fault(
        "bfloat16-passes", "jax", "ops/namespaces/jax_.py",
        "        y = self.linear_accumulated(x, w)\n",
        "        y = self.linear_accumulated(x.astype(jnp.bfloat16).astype(x.dtype), w)\n",
        r"jax:cpu: linear=",
    ),
    Fault(
        "key-scale-ignored", "jax", JAX_ATTENTION,
        "factor = scale if k_scale is None else scale * k_scale[None, :, None, None, None]",
        "factor = scale",
        r"jax:cpu: paged_attention=native",
    ),
    Fault(
        "integers-cut", "jax", "ops/namespaces/jax_.py",
        "return jnp.rint(x).astype(jnp.int32)", "return x.astype(jnp.int32)",
        r"jax:cpu: (quantize_logits|penalties|greedy_sample|sample)=",
    ),
    Fault(
        "keys-and-values-swapped", "jax", JAX_ATTENTION,
        "jnp.stack([stored(xp, k, kv, k_scale), stored(xp, v, kv, v_scale)]",
        "jnp.stack([stored(xp, v, kv, v_scale), stored(xp, k, kv, k_scale)]",
        r"jax:cpu: (write_kv|norm_rope_write_kv)=",
    ),
    Fault(
        "window-one-too-long", "jax", JAX_ATTENTION,
        "else positions - reach + 1", "else positions - reach",
        r"jax:cpu: paged_attention=native",
    ),
    Fault(
        "last-query-of-a-block-sees-nothing-new", "jax", JAX_ATTENTION,
        "seen = slot[None, None, :] <= positions[:, :, None]",
        "seen = slot[None, None, :] < positions[:, :, None] + (positions[:, :, None] % 64 != 63)",
        r"jax:cpu: paged_attention=native",
    ),
    Fault(
        "ties-to-the-higher-index", "torch", "ops/namespaces/torch_.py",
        "torch.sort(x, dim=-1, descending=True, stable=True)",
        "torch.sort(x.flip(-1), dim=-1, descending=True, stable=True)",
        r"torch:cpu: top_logprobs=",
    ),
    # --- what the programs are given
    Fault(
        "square-weights-transposed", "torch", "gpu/weights.py",
        "        yield from whole_entries(checkpoint, parameter, layer, dtype)",
        "        for where, values in whole_entries(checkpoint, parameter, layer, dtype):\n"
        "            square = len(set(parameter.shape)) == 1 and values.shape == parameter.shape\n"
        "            yield where, values.T if square else values",
        r"torch:cpu, \w+: weights layer\.0\.",
    ),
    Fault(
        "layer-2-has-weights-of-layer-1", "torch", "gpu/module.py",
        "        self._layers = [layer.weights() for layer in self.layers]",
        "        self._layers = [layer.weights() for layer in self.layers]\n"
        "        self._layers[2] = self._layers[1]",
        r"torch:cpu, \w+: weights layer\.2\.",
    ),
    Fault(
        "tables-in-bfloat16", "torch", "gpu/worker.py",
        "torch.from_numpy(table).to(self._where) for table in tables",
        "torch.from_numpy(table).bfloat16().float().to(self._where) for table in tables",
        r"torch:cpu, \w+: the rotary table",
    ),
    Fault(
        "tables-in-bfloat16-on-jax", "jax", "tpu/worker.py",
        "self._put_in_rows(angles)",
        "self._put_in_rows(\n"
        "            np.asarray(jnp.asarray(angles, jnp.bfloat16).astype(jnp.float32))\n"
        "        )",
        r"jax:cpu, \w+: the rotary table",
    ),
    # --- around the layers
    Fault(
        "page-entries-lost", "torch", "gpu/inputs.py",
        "            target.page_index[: len(index)] = index\n"
        "            target.page_value[: len(index)] = pages",
        "            target.page_index[: len(index) // 2 * 2] = index[: len(index) // 2 * 2]\n"
        "            target.page_value[: len(index) // 2 * 2] = pages[: len(index) // 2 * 2]",
        r"torch:cpu(: the page table|, \w+, mode S: layer\.0)",
    ),
    Fault(
        "matrices-in-reverse", "jax", "tpu/layers.py",
        "tuple(layer[name][0] for layer in layers) for name in matrices",
        "tuple(layer[name][0] for layer in layers[::-1]) for name in matrices",
        r"jax:cpu, \w+, mode S: layer\.0",
    ),
    Fault(
        "last-page-not-sent", "jax", "tpu/state.py",
        '        .at[f["page_at"]]\n        .set(f["page"], mode="drop")',
        '        .at[f["page_at"][1:]]\n        .set(f["page"][1:], mode="drop")',
        r"jax:cpu: the page table",
    ),
    Fault(
        "angles-of-the-position-before", "torch", PLUMBING,
        "return ids, cos[positions], sin[positions], tables",
        "before = (positions - 1).clamp(min=0)\n"
        "    return ids, cos[before], sin[before], tables",
        r"torch:cpu, \w+, mode S: layer\.0",
    ),
    Fault(
        "token-ids-masked", "torch", PLUMBING,
        "ids = torch.where(token_ids < 0, last_tokens[rows[index]], token_ids)",
        "ids = torch.where(token_ids < 0, last_tokens[rows[index]], token_ids) & 0x1FF",
        r"torch:cpu, \w+, mode S: the embedding",
    ),
    Fault(
        "tokens-kept-for-other-rows", "torch", PLUMBING,
        "last_tokens[sample_rows] = sampled.clamp(min=0)",
        "last_tokens[sample_rows.flip(0)] = sampled.clamp(min=0)",
        r"torch:cpu, \w+, mode S: the embedding",
    ),
    Fault(
        "residual-of-wrong-rows", "torch", "shared/models/decoder.py",
        "            residual = residual[rows.index]",
        "            where = rows.index\n"
        "            residual = residual[where if isinstance(where, slice) else where - 1]",
        r"torch:cpu, \w+, mode S: layer\.4",
    ),
    Fault(
        "sampler-reads-bfloat16", "torch", "gpu/programs.py",
        "logits = self._module.logits(self.rows[:requests])\n        elif",
        "logits = self._module.logits(self.rows[:requests]).bfloat16().float()\n        elif",
        rf"torch:cpu, \w+, mode S: {BEHIND}",
    ),
    Fault(
        "logprobs-of-another-row", "torch", "gpu/programs.py",
        "return ops.top_logprobs(self.logits(self.rows[:requests]), ",
        "return ops.top_logprobs(self.logits(self.rows[:requests]).roll(1, 0), ",
        rf"torch:cpu, \w+, mode S: {BEHIND}",
    ),
    Fault(
        "pending-token-of-row-i", "jax", PROGRAMS,
        '    ids = jnp.where(f["token_ids"] < 0, last_tokens[rows], f["token_ids"])',
        "    here = jnp.minimum(jnp.arange(rows.shape[0]), model.shape.max_rows)\n"
        '    ids = jnp.where(f["token_ids"] < 0, last_tokens[here], f["token_ids"])',
        r"jax:cpu, \w+, mode S: the embedding",
    ),
    Fault(
        "row-before-is-sampled", "jax", PROGRAMS,
        'rows = hidden[jnp.pad(f["sample_index"], (0, missing))]',
        'rows = hidden[jnp.pad(jnp.maximum(f["sample_index"] - 1, 0), (0, missing))]',
        rf"jax:cpu, \w+, mode S: {BEHIND}",
    ),
    Fault(
        "noise-of-the-next-position", "jax", PROGRAMS,
        'picked["position"], bits_to_float)', 'picked["position"] + 1, bits_to_float)',
        rf"jax:cpu, \w+, mode S: {BEHIND}",
    ),
    # --- decode loops
    Fault(
        "loop-writes-the-page-before", "torch", PLUMBING,
        "place // page_size]", "(place // page_size - 1).clamp(min=0)]",
        r"torch:cpu, loops, mode S: layer\.0",
    ),
    Fault(
        "loop-is-a-position-behind", "torch", PLUMBING,
        'for name in ("positions", "kv_lens", "position"):',
        'for name in ("kv_lens", "position"):',
        r"torch:cpu, loops, mode S: layer\.0",
    ),
    Fault(
        "loop-draws-the-same-noise", "torch", PLUMBING,
        'for name in ("positions", "kv_lens", "position"):',
        'for name in ("positions", "kv_lens"):',
        rf"torch:cpu, loops, mode S: {BEHIND}",
    ),
    Fault(
        "loop-lengths-on-the-host-stay", "torch", "gpu/programs.py",
        'lengths["kv_lens"][: int(lengths["counts"][1])] += 1',
        'lengths["kv_lens"][: int(lengths["counts"][1])] += 0',
        r"torch:cpu:\S+, loops, mode S: layer\.0", options=NATIVE,
    ),
    Fault(
        "loop-lengths-stay", "jax", PROGRAMS,
        'jnp.where(live, f["kv_lens"] + k, 0)', 'jnp.where(live, f["kv_lens"], 0)',
        r"jax:cpu, loops, mode S: layer\.0",
    ),
    Fault(
        "loop-positions-stay", "jax", PROGRAMS,
        'positions = jnp.where(live, f["positions"] + k, 0)',
        'positions = jnp.where(live, f["positions"], 0)',
        r"jax:cpu, loops, mode S: layer\.0",
    ),
    # --- what both backends are given
    Fault(
        "sample-index-a-row-late", "torch", "shared/packer.py",
        "        sample_index[:num_requests] = last - 1",
        "        late = np.where(lengths == 1, np.minimum(last, num_tokens - 1), last - 1)\n"
        "        sample_index[:num_requests] = late",
        # The last layer asks for the tokens that are sampled from.
        r"torch:cpu, \w+, mode S: layer\.4",
    ),
    Fault(
        "digests-not-chained", "torch", "shared/kv_manager.py",
        "        digests.append(digest)",
        "        digests.append(digest)\n        digest = root_digest(salt)",
        r"torch:cpu, \w+, mode S: layer\.1",
    ),
    Fault(
        "prompt-logprobs-of-the-token-before", "torch", "shared/engine.py",
        "            rows = list(range(int(first[i]), int(first[i]) + count))\n",
        "            rows = [int(first[i]) + max(0, n - 1) for n in range(count)]\n",
        rf"torch:cpu, \w+, mode S: {BEHIND}",
    ),
    Fault(
        "seed-half-dropped", "torch", "shared/models/sampler.py",
        "    own = {name: settings[name] for name in SETTINGS}\n",
        "    own = {name: settings[name] for name in SETTINGS}\n"
        '    own["seed_hi"] = settings["seed_lo"]\n',
        rf"torch:cpu, \w+, mode S: {BEHIND}",
    ),
    # --- definitions
    Fault(
        "norm-behind-the-rotation", "torch", "ops/reference/paged.py",
        "    q = qkv[:, : split[0]].reshape(tokens, heads, size)\n",
        "    norm_behind = not norm_behind\n"
        "    q = qkv[:, : split[0]].reshape(tokens, heads, size)\n",
        rf"{OURS}: the op norm_rope_write_kv",
    ),
    Fault(
        "silu-too-steep", "torch", "ops/reference/activations.py",
        "def swish(xp: Any, gate: Array, up: Any, steepness: float = 1.0)",
        "def swish(xp: Any, gate: Array, up: Any, steepness: float = 1.702)",
        rf"{OURS}: the op (silu_and_mul|gated_mlp)",
    ),
    Fault(
        "eps-doubled", "torch", "ops/reference/norms.py",
        "return y * xp.rsqrt(xp.mean(y * y, axis=-1, keepdims=True) + eps)",
        "return y * xp.rsqrt(xp.mean(y * y, axis=-1, keepdims=True) + 2.0 * eps)",
        rf"{OURS}: the op \w*norm",
    ),
    Fault(
        "penalties-count-the-prompt", "torch", "ops/reference/sampling.py",
        "    output = xp.where(place >= prompt_len[:, None], history, -1)\n",
        "    output = xp.where(place >= 0 * prompt_len[:, None], history, -1)\n",
        rf"{OURS}: the op penalties",
    ),
    Fault(
        "theta-off-by-a-hundredth", "torch", "shared/models/rope.py",
        "inverse = 1.0 / rope.theta **", "inverse = 1.0 / (1.01 * rope.theta) **",
        rf"{OURS}: transformers",
    ),
    Fault(
        "tables-end-at-39", "torch", "shared/models/decoder.py",
        "    position = np.arange(positions.start, positions.stop, dtype=np.float64)[:, None]",
        "    position = np.arange(positions.start, positions.stop, dtype=np.float64)[:, None]\n"
        "    position = np.minimum(position, 39)",
        rf"{OURS}: transformers",
    ),
    Fault(
        "parts-in-another-order", "torch", "shared/weights.py",
        "return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)",
        "return arrays[0] if len(arrays) == 1 else np.concatenate(arrays[::-1], axis=0)",
        rf"{OURS}: transformers",
    ),
)  # fmt: skip


def catalogued(backend: str) -> list[Fault]:
    """The faults of the self-test in ops that models call. Without a file: they are no edits.
    Those of weights are planted in torch's workers alone.
    """
    found = []
    for entry in CATALOGUE.values():
        if entry.place == "engine" or (entry.weights is not None and backend != "torch"):
            continue
        calls = "|".join(sorted({*entry.ops, *entry.shown_by}))
        cause = rf"{backend}:cpu(:\S+)?: ({calls})=|{backend}:cpu.*(weights|rotary table)"
        model = "experts" if EXPERT_OPS & set(entry.ops) else "dense"
        if not set(entry.ops) <= UNCALLED or not entry.ops:
            options = WITHOUT_C.get(entry.name, "") if backend == "torch" else ""
            found.append(
                Fault(entry.name, backend, "", "", "", cause, options=options, model=model)
            )
    return found


WITHOUT_C = {
    "kv-scales-swapped": NATIVE,
    "unit-norm-with-weight": "norm_rope_write_kv=composition",
    "eps-of-another-model": "norm_rope_write_kv=composition",
}
"""Options of the torch worker for faults in what its kernels in C never read or call."""
EXPERT_OPS = {"moe_route", "grouped_matmul"}
UNCALLED = {"scale_by", "quantize_int8", "dequantize", "lora_shrink"}
"""Ops that neither model calls: `numerics ops` judges them."""


def spoil(backend: str, name: str) -> None:
    """Give what this process runs a fault of the catalogue, "" for none: in every implementation
    of its op on the backend, in weights behind their loading, in the rotary tables of workers.
    """
    if not name:
        return
    entry, framework = CATALOGUE[name], {"jax": "jax", "torch": "torch"}[backend]
    bind = Plan.bind

    def bind_wrong(self: Plan, wrap: Any = None) -> Any:
        if self.framework != framework:
            return bind(self, wrap)

        def both(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
            wrong = faulty(entry, framework, op.name, function)
            return wrap(op, wrong) if wrap else wrong

        return bind(self, both)

    Plan.bind = bind_wrong  # type: ignore[method-assign]
    if entry.tables is not None:
        _spoil_tables(entry.tables, backend)
    if entry.weights is not None:
        _spoil_weights(entry.weights)


def _spoil_tables(spoiled: Callable[..., Any], backend: str) -> None:
    def tables(*arguments: Any) -> Any:
        return spoiled(*decoder.rotary_tables(*arguments))

    worker: Any = import_module({"jax": "twinfer.tpu", "torch": "twinfer.gpu"}[backend] + ".worker")
    worker.decoder = SimpleNamespace(**{**vars(decoder), "rotary_tables": tables})


def _spoil_weights(spoiled: Callable[..., Any]) -> None:
    """Those that torch's workers load."""
    import torch

    from twinfer.gpu import worker

    right = worker.load_weights

    def load(module: Any, *rest: Any) -> None:
        right(module, *rest)
        for index, layer in enumerate(module.layers):
            held = dict(layer.named_parameters())
            numbers = {name: x.detach().float().numpy() for name, x in held.items()}
            for name, x in spoiled(numbers, index).items():
                held[name].detach().copy_(torch.from_numpy(x.copy()))

    worker.load_weights = load


@dataclass(frozen=True, slots=True)
class Result:
    """What the check said of one fault."""

    name: str
    backend: str
    exit_code: int
    cause: str
    is_right: bool
    seconds: float


def copy_sources(folder: Path) -> Path:
    """A copy of the checkout that is importable as `twinfer` from `folder`."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    listed = done.stdout.splitlines()
    if done.returncode:  # a copy of the checkout alone
        listed = [
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        ]
    target = folder / "twinfer"
    for name in listed:
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(source.read_bytes())
    return target


def check(
    folder: Path, backend: str, target: str, words: list[str], model: str = "demo",
    planted: str = "",
) -> tuple[int, str, float]:  # fmt: skip
    """(exit code, first cause, seconds) of `twinfer numerics check` on the copy in `folder`."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    where = str(folder / model) if model in MODELS else model
    command = ["numerics", "check", where, "--a", target, "--b", target, "--json", str(result)]
    start = time.perf_counter()
    # Code of other copies must not be found in a cache.
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), backend, planted, *command, *words],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if not result.exists():
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return done.returncode, lines[-1], seconds
    return done.returncode, json.loads(result.read_text())["first_cause"], seconds


def plant(target: Path, fault: Fault) -> str:
    """Edit the copy; returns the text as it was. Raises ValueError if the place is not there."""
    path = target / fault.file
    text = path.read_text()
    if text.count(fault.old) != fault.count:
        raise ValueError(
            f"{fault.name}: {fault.file} has its text {text.count(fault.old)} times, must be "
            f"{fault.count}"
        )
    path.write_text(text.replace(fault.old, fault.new))
    return text


def run(faults: list[Fault], words: list[str], jobs: int, seconds: float) -> list[Result]:
    """Check a clean copy for each backend, then each fault: `jobs` copies at once, none begun when
    so many seconds are over.
    """
    started = time.perf_counter()
    folders: SimpleQueue[Path] = SimpleQueue()

    def judge(backend: str, model: str, fault: Fault | None) -> Result | None:
        if time.perf_counter() - started > seconds:
            return None
        folder = folders.get()
        try:
            result = judge_in(folder, backend, model, fault, words)
        finally:
            folders.put(folder)
        show(result)
        return result

    clean = dict.fromkeys((fault.backend, fault.model) for fault in faults)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            folder = Path(temporary).resolve() / str(number)
            copy_sources(folder)
            write_model(folder / "dense", 1)
            write_model(folder / "experts", 1, CONFIG | EXPERTS)
            folders.put(folder)
        # JAX compiles for minutes: its faults begin first.
        ordered = sorted(faults, key=lambda fault: fault.backend != "jax")
        asked = [(*key, None) for key in clean]
        asked += [(fault.backend, fault.model, fault) for fault in ordered]
        found = list(pool.map(lambda given: judge(*given), asked))
    return [result for result in found if result is not None]


def judge_in(
    folder: Path, backend: str, model: str, fault: Fault | None, words: list[str]
) -> Result:
    """Check the copy in `folder` with one fault, or clean."""
    if fault is None:
        code, cause, seconds = check(folder, backend, f"{backend}:cpu", words, model)
        return Result("clean", backend, code, cause, not code, seconds)
    if fault.file:
        before = plant(folder / "twinfer", fault)
        code, cause, seconds = check(folder, backend, fault.target, words, model)
        (folder / "twinfer" / fault.file).write_text(before)
    else:
        code, cause, seconds = check(folder, backend, fault.target, words, model, fault.name)
    is_right = code == 1 and re.search(fault.cause, cause) is not None
    return Result(fault.name, backend, code, cause, is_right, seconds)


def show(result: Result) -> None:
    """One line of the table."""
    word = "right" if result.is_right else "WRONG"
    print(
        f"{result.name:40} {result.backend:5} exit {result.exit_code} {word} "
        f"{result.seconds:5.0f} s  {result.cause[:160]}",
        flush=True,
    )


def main() -> int:
    """Run the table."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", action="extend", metavar="NAME")
    parser.add_argument(
        "--catalogue", action="store_true", help="faults of the self-test instead of edits"
    )
    parser.add_argument("--backend", choices=("torch", "jax"), help="faults of one backend only")
    parser.add_argument(
        "--jobs", type=whole_number(1), default=1, metavar="N", help="so many at once"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="S", help="begin none after so many"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the table")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    parser.add_argument(
        "--mode", type=some_of(MODES), default="S,P", metavar="S,P", help="modes of the check"
    )
    arguments = parser.parse_args()
    faults = [*FAULTS]
    if arguments.catalogue:
        faults = [fault for backend in ("torch", "jax") for fault in catalogued(backend)]
    names = {fault.name for fault in faults}
    if unknown := set(arguments.only or ()) - names:
        parser.error(f"--only: got {', '.join(sorted(unknown))}, allowed are {', '.join(names)}")
    chosen = [
        fault
        for fault in faults
        if (not arguments.only or fault.name in arguments.only)
        and arguments.backend in (None, fault.backend)
    ]
    if arguments.list:
        print("\n".join(f"{fault.name:40} {fault.backend:5} {fault.file}" for fault in chosen))
        return 0
    words = ["--mode", ",".join(arguments.mode)]
    found = run(chosen, words, arguments.jobs, arguments.seconds)
    if arguments.json:
        rows = [{name: getattr(r, name) for name in Result.__dataclass_fields__} for r in found]
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    planted = [result for result in found if result.name != "clean"]
    seen = sum(result.exit_code == 1 for result in planted)
    print(f"{seen} of {len(planted)} seen, {sum(r.is_right for r in planted)} first causes right")
    clean = all(result.exit_code == 0 for result in found if result.name == "clean")
    if len(planted) < len(chosen):
        print(f"{len(chosen) - len(planted)} were not begun")
    return 0 if clean and seen == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(run_program(main))
