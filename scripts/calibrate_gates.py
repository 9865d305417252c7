"""How often do the gates of `twinfer numerics` alarm on models that are right, and how near do
correct results come to them?

Random models of several families, shapes, dtypes and magnitudes (amplified residual channels, sharp
attention, sink tokens, tiny norms, loud heads, streams near epsilon, depth) run on the CPU without
a fault. Every alarm is false. `--held-back` draws other seeds, and combines two kinds of magnitudes
where the calibration half has one: gates were set on the one half and are reported on the other.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from twinfer.numerics.judging.diff import Diff
from twinfer.numerics.questions.invariants import check_invariants
from twinfer.numerics.questions.model import compare_model
from twinfer.numerics.questions.served import check_served
from twinfer.numerics.sides.steps import make_steps
from twinfer.numerics.sides.subject import Subject, open_subject, parse_target
from twinfer.shared.models import decoder
from twinfer.shared.models.config import parse_config
from twinfer.shared.models.table import keys

Weights = dict[str, np.ndarray]
"""A checkpoint in float64, by name."""
Change = Callable[[Weights, float, np.random.Generator], None]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16},
    "olmo2": {},
    "phi3": {"sliding_window": 12, "pad_token_id": 0},
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "phi3": "Phi3ForCausalLM",
}  # fmt: skip
SHAPES = (
    # layers, hidden, MLP, heads, K/V heads, vocabulary
    (1, 32, 48, 2, 1, 31),
    (2, 64, 160, 4, 2, 300),
    (3, 64, 96, 4, 4, 160),
    (4, 96, 256, 6, 2, 2000),
    (8, 64, 128, 4, 1, 300),
)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SERVED_EVERY, INVARIANTS_EVERY, JAX_EVERY = 25, 12, 40
"""One run in so many is of another question, or of JAX, which compiles each model for a minute."""


@dataclass(frozen=True)
class Model:
    """A model of the population: `magnitudes` are kinds of KINDS with their factors."""

    seed: int
    family: str
    shape: tuple[int, ...]
    dtype: str
    magnitudes: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} x{factor:g}" for kind, factor in self.magnitudes) or "ordinary"
        return f"seed {self.seed}: {self.family} {self.shape} {self.dtype}, {kinds}"


# --- magnitudes
# --------------------------------------------------------------------------------------------------


def named(weights: Weights, pattern: str) -> Iterator[np.ndarray]:
    """The tensors whose names match."""
    return (array for name, array in weights.items() if re.search(pattern, name))


def outlier(weights: Weights, factor: float, rng: np.random.Generator) -> None:
    """One channel of the residual stream is `factor` times as large, as in trained models: in
    embeddings, and in what every layer adds.
    """
    embed = weights["model.embed_tokens.weight"]
    channel = int(rng.integers(embed.shape[1]))
    embed[:, channel] *= factor
    for array in named(weights, r"(o|down)_proj.weight"):
        array[channel] *= factor


def sink(weights: Weights, factor: float, rng: np.random.Generator) -> None:
    """The first token of every prompt has an embedding that is `factor` times as large."""
    weights["model.embed_tokens.weight"][0] *= factor


def sharp(weights: Weights, factor: float, rng: np.random.Generator) -> None:
    """Queries and keys are `factor` times as large."""
    norms = list(named(weights, r"[qk]_norm"))
    for array in norms or named(weights, r"([qk]|qkv)_proj.weight"):
        array *= factor


def tiny_norms(weights: Weights, factor: float, rng: np.random.Generator) -> None:
    """Weights of norms are `factor` times as small."""
    for array in named(weights, r"layernorm|model\.norm"):
        array /= factor


def loud_head(weights: Weights, factor: float, rng: np.random.Generator) -> None:
    """What one head adds to the stream is `factor` times as large."""
    for array in named(weights, r"o_proj.weight"):
        array[:, : array.shape[1] // 4] *= factor


def near_eps(weights: Weights, factor: float, rng: np.random.Generator) -> None:
    """The stream's power begins near the epsilon of norms."""
    weights["model.embed_tokens.weight"] /= factor


KINDS: dict[str, tuple[Change, tuple[float, ...]]] = {
    "residual channel": (outlier, (30.0, 100.0, 300.0, 1000.0)),
    "sharp attention": (sharp, (2.0, 4.0, 12.0)),
    "sink token": (sink, (100.0, 3000.0)),
    "tiny norms": (tiny_norms, (30.0,)),
    "loud head": (loud_head, (60.0,)),
    "hidden near epsilon": (near_eps, (300.0,)),
}


def draw(seed: int, held_back: bool) -> Model:
    """A model of the population, the same for a seed. Ordinary ones are one in four."""
    rng = np.random.default_rng([seed, held_back])
    count = (2 if held_back else 1) if rng.random() < 0.75 else 0
    kinds = rng.choice(list(KINDS), count, replace=False).tolist()
    magnitudes = tuple((kind, float(rng.choice(KINDS[kind][1]))) for kind in kinds)
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    family, dtype = str(rng.choice(list(FAMILIES))), str(rng.choice(list(DTYPES)))
    if dtype == "float16" and any(factor >= 300.0 for _, factor in magnitudes):
        dtype = "bfloat16"  # such values are beyond float16, whose models overflow
    return Model(seed, family, shape, dtype, magnitudes)


# --- writing and running
# --------------------------------------------------------------------------------------------------


def config_of(model: Model) -> dict[str, Any]:
    """Its config.json."""
    layers, hidden, mlp, heads, kv_heads, vocab = model.shape
    return {
        "architectures": [ARCHITECTURES[model.family]], "model_type": model.family,
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128, "dtype": model.dtype, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        **FAMILIES[model.family],
    }  # fmt: skip


def write_model(model: Model, folder: Path) -> None:
    """A checkpoint whose activations are of the size that trained models have, but for its
    magnitudes.
    """
    config = config_of(model)
    rng = np.random.default_rng([model.seed, 7])
    weights: Weights = {}
    for parameter, layer in decoder.parameters_of(parse_config(config)).placed():
        for part, key in zip(parameter.parts, keys(parameter.parts, layer), strict=True):
            shape = parameter.part_shape(part)
            if parameter.init in ("ones", "zeros"):
                values = rng.uniform(0.5, 1.5, shape) - parameter.offset
            else:
                scale = 0.3 if len(shape) == 1 or parameter.name == "embed" else shape[-1] ** -0.5
                values = rng.normal(size=shape) * scale
            weights[key] = values
    for kind, factor in model.magnitudes:
        KINDS[kind][0](weights, factor, rng)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    dtype = DTYPES[model.dtype]
    save_file({name: x.astype(dtype) for name, x in weights.items()}, folder / "model.safetensors")


def open_model(model: Model, folder: Path, tokens: int = 24) -> Subject:
    """Its subject, written to `folder`."""
    write_model(model, folder)
    return open_subject(
        str(folder), seed=model.seed, tokens=tokens, max_num_seqs=4, max_model_len=64, page_size=8
    )


def prompts_of(model: Model, lengths: tuple[int, ...] = (19, 5, 30, 9)) -> list[np.ndarray]:
    """Random prompts that begin with token 0."""
    rng = np.random.default_rng([model.seed, 8])
    prompts = [rng.integers(0, model.shape[-1], length).astype(np.int32) for length in lengths]
    for ids in prompts:
        ids[0] = 0
    return prompts


def compare(model: Model, folder: Path, number: int) -> Diff:
    """A clean comparison of all layers, of torch and of torch or JAX."""
    subject = open_model(model, folder)
    jax = number % JAX_EVERY == JAX_EVERY - 1 and model.dtype != "float16"
    b = "jax:cpu" if jax else "torch:cpu"
    targets = [parse_target("torch:cpu"), parse_target(b)]
    return compare_model(subject, targets, make_steps(subject, prompts_of(model)))


def alarms_of(diff: Diff) -> list[str]:
    """What a comparison complains of, without its figures."""
    found = [
        f"{f.mode} {f.scope}: {word(complaint)}"
        for f in diff.findings
        for complaint in f.complaints
    ]
    found += [f"{x.mode} ends: {word(c)}" for x in diff.logits for c in x.complaints]
    found += [f"{x.mode} served: {word(c)}" for x in diff.served for c in x.complaints]
    found += [f"problem: {word(text)}" for text in diff.problems]
    return found


def word(complaint: str) -> str:
    """The kind of a complaint."""
    return re.sub(r"[-+]?\d[\d.e+-]*", "#", re.split(r" [\d#]|;| at ", complaint)[0])[:60]


@dataclass
class Tally:
    """What the runs gave: alarms by kind with the number of runs, and shares of gates."""

    runs: int = 0
    alarming: int = 0
    comparisons: int = 0

    def __post_init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.shares: dict[str, list[float]] = defaultdict(list)

    def add(self, found: list[str], diff: Diff | None = None) -> None:
        """One run."""
        self.runs += 1
        self.alarming += bool(found)
        self.kinds.update(set(found))
        for f in diff.findings if diff is not None else ():
            self.comparisons += len(f.shares)
            for name, share in f.shares.items():
                self.shares[f"{f.mode} {f.scope:9} {name}"].append(share)

    def print(self) -> None:
        """The tables."""
        print(f"{self.runs} clean runs, {self.comparisons} comparisons: {self.alarming} alarm")
        for kind, count in self.kinds.most_common():
            print(f"  {count:5} runs  {kind}")
        print("share of the gate: largest, 99.9 %, median")
        for name, values in sorted(self.shares.items()):
            most, high, middle = np.max(values), np.quantile(values, 0.999), np.median(values)
            print(f"  {name:32} {most:9.3f} {high:9.3f} {middle:9.3f}  of {len(values)}")


def run(model: Model, number: int, folder: Path, tally: Tally) -> list[str]:
    """One clean run; its alarms."""
    diff = None
    if number % SERVED_EVERY == SERVED_EVERY - 1:
        subject = open_model(model, folder)
        served = check_served(
            subject, [parse_target("torch:cpu")], prompts=prompts_of(model), definition="off"
        )
        found = alarms_of(served)
    elif number % INVARIANTS_EVERY == INVARIANTS_EVERY - 1:
        subject, target = open_model(model, folder), parse_target("torch:cpu")
        names = ("batch", "chunks", "decode-prefill")
        report = check_invariants(subject, target, prompts_of(model), names=names)
        found = [
            f"{result.mode} invariants: {result.relation}"
            for result in report.results
            if result.complaints
        ]
    else:
        diff = compare(model, folder, number)
        found = alarms_of(diff)
    tally.add(found, diff)
    return found


def main() -> None:
    """Run, and print the alarms and how near the gates were."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100, metavar="N")
    parser.add_argument("--seed0", type=int, default=0, metavar="S")
    parser.add_argument("--held-back", action="store_true", help="the other half of the population")
    arguments = parser.parse_args()
    tally, started = Tally(), time.perf_counter()
    for number in range(arguments.runs):
        model = draw(arguments.seed0 + number, arguments.held_back)
        with tempfile.TemporaryDirectory(prefix="twinfer-gates-") as folder:
            found = run(model, number, Path(folder), tally)
        if found:
            kinds = "; ".join(f"{count} {kind}" for kind, count in Counter(found).most_common(3))
            print(f"ALARM {model}: {kinds}", flush=True)
    half = "held-back" if arguments.held_back else "calibration"
    print(f"{half} half, {time.perf_counter() - started:.0f} s")
    tally.print()


if __name__ == "__main__":
    main()
