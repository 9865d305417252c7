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
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from twinfer.numerics.judging.diff import Diff, pooled_sides
from twinfer.numerics.judging.gates import Family
from twinfer.numerics.questions.invariants import check_invariants
from twinfer.numerics.questions.model import compare_model
from twinfer.numerics.questions.served import check_served
from twinfer.numerics.sides.steps import make_steps
from twinfer.numerics.sides.subject import Subject, open_subject, parse_target
from twinfer.serving.parser import OneLineParser, output_file, whole_number
from twinfer.serving.program import run_program
from twinfer.shared.models import decoder
from twinfer.shared.models.config_json import parse_config
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
HALVES = "calibration", "held-back"
SERVED_EVERY, INVARIANTS_EVERY, JAX_EVERY, PAIR_EVERY = 25, 12, 40, 8
"""One run in so many is of another question, or of two sides. JAX compiles each model for a
minute.
"""


@dataclass(frozen=True)
class Model:
    """A model of the population: `magnitudes` are kinds of KINDS with their factors."""

    seed: int
    family: str
    shape: tuple[int, ...]
    dtype: str
    magnitudes: tuple[tuple[str, float], ...]
    half: str

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
    most = 2 if held_back else 1
    count = most if rng.random() < 0.75 else 0
    kinds = rng.choice(list(KINDS), count, replace=False).tolist()
    magnitudes = tuple((kind, float(rng.choice(KINDS[kind][1]))) for kind in kinds)
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    family, dtype = str(rng.choice(list(FAMILIES))), str(rng.choice(list(DTYPES)))
    if dtype == "float16" and any(factor >= 300.0 for _, factor in magnitudes):
        dtype = "bfloat16"  # such values are beyond float16, whose models overflow
    return Model(seed, family, shape, dtype, magnitudes, HALVES[held_back])


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


def prompts_of(
    model: Model, number: int, lengths: tuple[int, ...] = (19, 5, 30, 9)
) -> list[np.ndarray]:
    """Random prompts of run `number` that begin with token 0."""
    rng = np.random.default_rng([model.seed, 8, number])
    prompts = [rng.integers(0, model.shape[-1], length).astype(np.int32) for length in lengths]
    for ids in prompts:
        ids[0] = 0
    return prompts


@dataclass(frozen=True, slots=True)
class Run:
    """One clean run: its model, which of the model's runs it is, and its place among all."""

    model: Model
    number: int
    index: int
    targets: tuple[str, ...] = ()

    @property
    def question(self) -> str:
        """What is asked; `pair` and `jax` are `model` with a second side. Of `targets` that were
        named, `model` and `served` in turn.
        """
        if self.targets:
            return ("model", "served")[self.number % 2]
        if self.index % SERVED_EVERY == SERVED_EVERY - 1:
            return "served"
        if self.index % INVARIANTS_EVERY == INVARIANTS_EVERY - 1:
            return "invariants"
        jax = self.index % JAX_EVERY == JAX_EVERY - 1 and self.model.dtype != "float16"
        if jax:
            return "jax"
        return "pair" if self.index % PAIR_EVERY == PAIR_EVERY - 1 else "model"


Answer = tuple[list[str], Diff | None]
"""The complaints of a run, in full, and what was compared."""


def ask_model(run: Run, subject: Subject) -> Answer:
    """All layers of torch, and of a second side."""
    names = run.targets or ("torch:cpu", *SECOND.get(run.question, ()))
    targets = [parse_target(name) for name in names]
    steps = make_steps(subject, prompts_of(run.model, run.number))
    diff = compare_model(subject, targets, steps)
    return complaints_of(diff), diff


def ask_served(run: Run, subject: Subject) -> Answer:
    """What engines serve."""
    prompts = prompts_of(run.model, run.number)
    targets = [parse_target(name) for name in run.targets or ("torch:cpu",)]
    diff = check_served(subject, targets, prompts=prompts, definition="off")
    return complaints_of(diff), diff


def ask_invariants(run: Run, subject: Subject) -> Answer:
    """Relations between runs of one worker of torch."""
    names = ("batch", "chunks", "decode-prefill")
    prompts = prompts_of(run.model, run.number)
    report = check_invariants(subject, parse_target("torch:cpu"), prompts, names=names)
    return [
        f"{result.mode} invariants: {result.relation}: {text}"
        for result in report.results
        for text in result.complaints
    ], None


SECOND = {"jax": ("jax:cpu",), "pair": ("torch:cpu:row_invariant=true",)}
QUESTIONS: dict[str, Callable[[Run, Subject], Answer]] = {
    "model": ask_model,
    "jax": ask_model,
    "pair": ask_model,
    "served": ask_served,
    "invariants": ask_invariants,
}


def complaints_of(diff: Diff) -> list[str]:
    """What a comparison complains of, with the place and the figures."""
    found = [
        f"{f.mode} {f.scope}: {complaint} [{f.side} {f.name} {f.implementation}, step {f.step}]"
        for f in diff.findings
        for complaint in f.complaints
    ]
    found += [f"{x.mode} ends: {c}" for x in diff.logits for c in x.complaints]
    found += [f"{x.mode} served: {c}" for x in diff.served for c in x.complaints]
    return found + [f"problem: {text}" for text in diff.problems]


def word(complaint: str) -> str:
    """The kind of a complaint, without its figures."""
    return re.sub(r"[-+]?\d[\d.e+-]*", "#", re.split(r" [\d#]|;| at | \[", complaint)[0])[:60]


def run_model(runs: list[Run]) -> list[dict[str, Any]]:
    """All runs of one model, as rows of the table."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="twinfer-gates-") as folder:
        subject = open_model(runs[0].model, Path(folder))
        for run in runs:
            started = time.perf_counter()
            try:
                complaints, diff = QUESTIONS[run.question](run, subject)
            except Exception as error:  # a run that breaks is a row too, and an alarm
                complaints, diff = [f"broke: {type(error).__name__}: {error}"], None
            rows.append({
                "half": run.model.half, "seed": run.model.seed, "number": run.number,
                "model": str(run.model), "question": run.question, "complaints": complaints,
                "missing": list(diff.missing) if diff is not None else [],
                **shares_of(diff), "seconds": time.perf_counter() - started,
            })  # fmt: skip
    return rows


def shares_of(diff: Diff | None) -> dict[str, Any]:
    """How many limits a comparison had, and the largest share of each kind of limit."""
    count, largest = 0, dict[str, float]()
    for f in diff.findings if diff is not None else ():
        count += len(f.shares)
        for name, share in f.shares.items():
            key = f"{f.mode} {f.scope:9} {name}"
            largest[key] = max(largest.get(key, 0.0), float(share))
        if f.contract is not None:
            key = f"{f.mode} {f.scope:9} contract"
            largest[key] = max(largest.get(key, 0.0), float(f.contract))
    is_narrow = any(f.mode == "P" and "sigma" in f.shares for f in diff.findings) if diff else False
    family, pooled = pooled_sides(diff) if diff is not None and is_narrow else (Family(), {})
    for layer in pooled.values():
        key = "P all steps sigma of rows"
        largest[key] = max(largest.get(key, 0.0), layer.row_sigma / layer.limit(family))
    return {"comparisons": count + len(pooled), "shares": largest}


# --- the table
# --------------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]]) -> None:
    """The alarms, and how near the gates were."""
    alarming = [row for row in rows if row["complaints"]]
    models = len({(row["half"], row["seed"]) for row in rows})
    limits = sum(row["comparisons"] for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    print(
        f"{len(rows)} clean runs of {models} models, {limits} limits: {len(alarming)} alarm, "
        f"{sum(bool(row['missing']) for row in rows)} not fully compared; "
        f"{seconds:.0f} s of one process"
    )
    asked = Counter(row["question"] for row in rows)
    print("  " + ", ".join(f"{count} {question}" for question, count in asked.most_common()))
    kinds = Counter(kind for row in alarming for kind in {word(c) for c in row["complaints"]})
    for kind, count in kinds.most_common():
        print(f"  {count:5} runs  {kind}")
    shares: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, share in row["shares"].items():
            shares[name].append(share)
    print("largest share of a gate in a run: largest of all runs, 99 %, median")
    for name, values in sorted(shares.items()):
        most, high, middle = np.max(values), np.quantile(values, 0.99), np.median(values)
        print(f"  {name:32} {most:9.3f} {high:9.3f} {middle:9.3f}  of {len(values)}")


def known(path: str | None) -> list[dict[str, Any]]:
    """The rows of a table. A line that was cut off is left out."""
    if path is None or not Path(path).exists():
        return []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def planned(arguments: argparse.Namespace, done: set[tuple[int, int]]) -> list[list[Run]]:
    """The runs that are not done, by model."""
    per = arguments.runs_per_model
    found = []
    for number in range(arguments.models):
        model = draw(arguments.seed0 + number, arguments.held_back)
        if arguments.on:
            model = replace(model, shape=SHAPES[number % len(SHAPES)])
        runs = [Run(model, i, number * per + i, tuple(arguments.on)) for i in range(per)]
        runs = [run for run in runs if run.question not in arguments.skip]
        found.append([run for run in runs if (model.seed, run.number) not in done])
    return [runs for runs in found if runs]


def main() -> None:
    """Run what is not in the table yet, and print it."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=whole_number(1), default=100, metavar="N")
    parser.add_argument("--runs-per-model", type=whole_number(1), default=1, metavar="N")
    parser.add_argument("--seed0", type=int, default=0, metavar="S")
    parser.add_argument("--held-back", action="store_true", help="the other half of the population")
    parser.add_argument(
        "--on", action="append", default=[], metavar="T", help="targets, on each shape in turn"
    )
    parser.add_argument(
        "--skip", action="append", default=[], choices=tuple(QUESTIONS),
        help="leave runs of this question out; jax takes half of the time",
    )  # fmt: skip
    parser.add_argument("--workers", type=whole_number(1), default=1, metavar="N", help="processes")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no model after so many")
    parser.add_argument("--out", type=output_file, metavar="FILE", help="a table that goes on")
    arguments = parser.parse_args()
    half = HALVES[arguments.held_back]
    try:
        rows = [row for row in known(arguments.out) if row["half"] == half]
    except (ValueError, KeyError) as error:
        parser.error(f"argument --out: {arguments.out} is no table of this script: {error}")
    todo = planned(arguments, {(row["seed"], row["number"]) for row in rows})
    started = time.perf_counter()
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        waiting = iter(todo)
        # A few ahead of the workers, so that no model begins when the time is over.
        running = {pool.submit(run_model, runs) for runs in islice(waiting, arguments.workers)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                rows += note(future.result(), arguments.out)
                over = arguments.seconds is not None
                over = over and time.perf_counter() - started > arguments.seconds
                if not over:
                    running |= {pool.submit(run_model, runs) for runs in islice(waiting, 1)}
    print(f"{half} half")
    show(rows)


def note(rows: list[dict[str, Any]], out: str | None) -> list[dict[str, Any]]:
    """Say the alarms of some runs, and add them to the table."""
    for row in rows:
        if row["complaints"]:
            kinds = Counter(word(c) for c in row["complaints"]).most_common(3)
            what = "; ".join(f"{count} {kind}" for kind, count in kinds)
            print(f"ALARM {row['question']} {row['model']}, run {row['number']}: {what}")
            print(f"  {row['complaints'][0]}", flush=True)
    if out is not None:
        with open(out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


if __name__ == "__main__":
    sys.exit(run_program(main))
