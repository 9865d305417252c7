"""One model on one GPU and on two, and what the sums between them take.

    python scripts/bench_tp.py --model llama3-8b --json out.json

First the sums by size, in microseconds inside of a CUDA graph, for each way to make them, after a
check that all ranks get the same right bits. Then decode and prefill of a model with dummy weights
on one GPU and on `--ranks` by each provider of the sum: a decode figure is (time for 65 tokens -
time for 1) / 64 with prompts of `--input-len` tokens, a prefill figure is of 32 prompts of 1 024,
medians of `--repeats`, and `--mixed` has so many requests of random lengths at once (the load of
`twinfer bench offline`). `tokens` are those of the bundled model in float32, `graphs` compares
tokens and log-probabilities of CUDA graphs with eager calls in bfloat16, bit by bit, `limits`
measures a copy and a product on one GPU. Everything runs in processes of its own.

A shape that needs two GPUs, on cards that it nearly fills:

    python scripts/bench_tp.py --model llama3.1-70b --parts engines --only 'tp 2 peers'
        --mixed 128 --options '{"memory_utilization": 0.98, "max_num_batched_tokens": 4096}'
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from twinfer.serving.parser import (
    OneLineParser,
    json_object,
    output_file,
    some_of,
    whole_number,
    whole_numbers,
)
from twinfer.serving.program import run_program
from twinfer.shared.models.locate import model_folder

PARTS = ("limits", "sums", "tokens", "graphs", "engines")
PROVIDERS = ("nccl", "peers")
ROWS = (1, 4, 16, 64, 256, 512, 1024, 8192)
WIDTH = 4096
CALLS = 64
STEPS = 64


def sums(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Microseconds of a sum by way and rows, on one rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    from twinfer.gpu.kernels import reduce
    from twinfer.gpu.ranks import join
    from twinfer.shared.models.spec import Shard

    torch.cuda.set_device(rank)
    join(Shard(rank, world), f"file://{folder}/ranks", "cuda")
    reduce.meet_peers(max(ROWS), WIDTH, torch.bfloat16)
    name = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    found: dict[str, Any] = {}

    def measured(run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                run()
        times = []
        for _ in range(7):
            dist.all_reduce(torch.zeros(1))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
        return round(statistics.median(times), 2)

    for rows in ROWS:
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        residual, weight = torch.randn_like(x), torch.ones(WIDTH, device="cuda", dtype=x.dtype)
        dist.broadcast(residual, 0)
        shared = symmetric.empty(rows, WIDTH, dtype=x.dtype, device=x.device)
        symmetric.rendezvous(shared, dist.group.WORLD)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        total = sum(part.float() for part in parts).to(x.dtype)
        for turn in range(5):
            for way in PROVIDERS:
                add = {
                    "nccl": reduce.reduce_add_rms_norm,
                    "peers": reduce.reduce_add_rms_norm_of_peers,
                }[way]
                y, stream = add(x.clone(), residual.clone(), weight, 1e-6)
                want = (total.float() + residual.float()).to(x.dtype)
                off = (stream.float() - want.float()).abs().max().item()
                held = [torch.empty_like(y) for _ in range(world)]
                dist.all_gather(held, y)
                same = all(torch.equal(one, held[0]) for one in held)
                if not same or off > 0.0 or not torch.isfinite(y).all():
                    raise SystemExit(f"{way} of {rows} rows, turn {turn}: off {off}, same {same}")
        ways: dict[str, Callable[[], Any]] = {
            "nccl": lambda x=x: reduce.all_reduce(x),
            "peers": lambda x=x: reduce.all_reduce_of_peers(x),
            "two_shot": lambda s=shared: torch.ops.symm_mem.two_shot_all_reduce_(s, "sum", name),
            "nccl, add, norm": lambda x=x, r=residual, w=weight: reduce.reduce_add_rms_norm(
                x, r, w, 1e-6
            ),
            "peers, add, norm": lambda x=x, r=residual, w=weight: (
                reduce.reduce_add_rms_norm_of_peers(x, r, w, 1e-6)
            ),
        }
        if rows <= 512:
            ways["one_shot"] = lambda s=shared: torch.ops.symm_mem.one_shot_all_reduce(
                s, "sum", name
            )
        x.zero_()
        shared.zero_()
        found[str(rows * WIDTH * 2)] = {way: measured(run) for way, run in ways.items()}
        if rank == 0:
            print(rows, found[str(rows * WIDTH * 2)], file=sys.stderr, flush=True)
    return found


def seconds(llm: Any, batch: int, length: int, tokens: int, rng: random.Random) -> float:
    """Time to complete `batch` random prompts with `tokens` tokens each."""
    from twinfer import SamplingParams

    vocab = llm.engine.model.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - start


def say(*words: Any) -> None:
    """Tell how far it has come, for a run that is cut off."""
    print(*words, file=sys.stderr, flush=True)


def limits() -> dict[str, Any]:
    """What one GPU does at most, by measurement."""
    from twinfer.gpu.devices import find_device
    from twinfer.gpu.limits import measure_limits

    return asdict(measure_limits(find_device("cuda"), "bfloat16"))


def engine(
    model: str, options: dict[str, Any], sizes: list[int], length: int, repeats: int, requests: int
) -> dict[str, Any]:
    """Decode behind prompts of `length` tokens and prefill of one engine, and `requests` at once if
    there are to be any.
    """
    from twinfer import LLM
    from twinfer.serving.bench import Runner, Workload, mixed
    from twinfer.shared.limits import decode_bytes

    usual = dict(
        backend="torch", load_format="dummy", max_model_len=2048, max_num_seqs=max(sizes),
        enable_prefix_caching=False, progress=False,
    )  # fmt: skip
    start = time.perf_counter()
    with LLM(model, **(usual | options)) as llm:
        found: dict[str, Any] = {
            "options": options,
            "device": llm.engine.device.name,
            "start_s": round(time.perf_counter() - start, 1),
            "phases_s": {k: round(v, 1) for k, v in llm.engine.report.seconds.items()},
            "num_pages": llm.engine.report.num_pages,
            "decode_ms": {},
            "decode_bytes": {},
        }
        say(found)
        rng = random.Random(0)
        seconds(llm, min(sizes), length, 4, rng)
        for size in sizes:
            both = [
                (seconds(llm, size, length, 1 + STEPS, rng), seconds(llm, size, length, 1, rng))
                for _ in range(repeats)
            ]
            step = statistics.median(a - b for a, b in both) / STEPS * 1e3
            found["decode_ms"][size] = round(step, 3)
            lengths = [length + (STEPS + 1) / 2] * size
            found["decode_bytes"][size] = decode_bytes(llm.engine.model, lengths, 2, 2)
            say(size, found["decode_ms"][size])
        took = statistics.median(seconds(llm, 32, 1024, 1, rng) for _ in range(repeats))
        found["prefill_tok_s"] = round(32 * 1024 / took)
        say("prefill", found["prefill_tok_s"])
        if requests:
            found["mixed"] = mixed(Runner(llm), Workload(mixed_requests=requests))
            say("mixed", found["mixed"])
        metrics = llm.engine.metrics()
        found["preemptions"] = metrics.preemptions
        found["late"] = llm.engine.worker.compilations_after_ready()
    return found


def tokens(options: dict[str, Any]) -> list[Any]:
    """What the bundled model says: greedy and drawn, in float32 unless the options name another
    dtype, and then with its log-probabilities.
    """
    from twinfer import LLM, SamplingParams

    kinds = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=1.0, seed=5, max_tokens=24),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=6, max_tokens=24),
        SamplingParams(temperature=0.7, repetition_penalty=1.2, seed=7, max_tokens=24),
    ]
    if "dtype" in options:
        kinds = [replace(kind, logprobs=3) for kind in kinds]
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 900) for _ in range(3 + 11 * i)] for i in range(12)]
    usual = dict(
        backend="torch", dtype="float32", max_model_len=256, max_num_seqs=16, progress=False,
        max_num_batched_tokens=64, num_pages=200,
    )  # fmt: skip
    start = time.perf_counter()
    with LLM("demo", **(usual | options)) as llm:
        say("tokens", options, f"started after {time.perf_counter() - start:.0f} s")
        outputs = llm.generate(prompts, [kinds[i % 4] for i in range(12)], progress=False)
        said = [output.outputs[0] for output in outputs]
        return [[list(one.token_ids), repr(one.logprobs)] for one in said]


def child(*words: str, patience: float = 200.0) -> Any:
    """The result of this script with these words, or what went wrong."""
    command = [sys.executable, __file__, *words]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {patience:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    if done.returncode or not lines:
        return {"error": f"exit code {done.returncode}"}
    return json.loads(lines[-1])


def sums_of_all(world: int) -> Any:
    """The sums on all ranks; the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, __file__, "--sums", str(rank), "--ranks", str(world), "--at", folder]
            for rank in range(world)
        ]
        ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
        try:
            out = [rank.communicate(timeout=90)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            return {"error": "took more than 90 s"}
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            return {"error": [rank.returncode for rank in ranks]}
        return json.loads(out[0].splitlines()[-1])


def settings(world: int) -> dict[str, dict[str, Any]]:
    """Options by name: one GPU, and ranks by each provider."""
    found: dict[str, dict[str, Any]] = {"tp 1": {}}
    for way in PROVIDERS:
        priority = {"all_reduce": [way], "reduce_add_rms_norm": [way]}
        found[f"tp {world} {way}"] = {"tensor_parallel_size": world, "op_priority": priority}
    return found


def main() -> None:
    """Run all parts, or one of them as a process of its own."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--ranks", type=whole_number(1), default=2)
    parser.add_argument("--batch-sizes", type=whole_numbers(1), default="1,8,64,256")
    parser.add_argument("--parts", type=some_of(PARTS), default="sums,tokens,graphs,engines")
    parser.add_argument("--only", default="", help="names that begin so: 'tp 1,tp 2 peers'")
    parser.add_argument("--options", type=json_object, default={}, help="more, of the engines")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of decode's prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mixed", type=int, default=0, metavar="REQUESTS")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds for a process")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--sums", type=int)
    parser.add_argument("--at", default="")
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--engine", type=json.loads)
    parser.add_argument("--tokens", type=json.loads)
    arguments = parser.parse_args()
    model_folder(arguments.model)
    made: Any = None
    if arguments.sums is not None:
        made = sums(arguments.sums, arguments.ranks, arguments.at)
    elif arguments.limits:
        made = limits()
    elif arguments.engine is not None:
        more = arguments.input_len, arguments.repeats, arguments.mixed
        made = engine(arguments.model, arguments.engine, arguments.batch_sizes, *more)
    elif arguments.tokens is not None:
        made = tokens(arguments.tokens)
    if made is not None:
        print(json.dumps(made), flush=True)
        return
    result: dict[str, Any] = {"model": arguments.model, "date": time.strftime("%Y-%m-%d")}
    parts = arguments.parts
    begins = tuple(arguments.only.split(","))
    chosen = {n: o for n, o in settings(arguments.ranks).items() if n.startswith(begins)}

    def keep() -> None:
        print(json.dumps(result), flush=True)
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)

    if "limits" in parts:
        result["limits"] = child("--limits", patience=60)
        keep()
    if "sums" in parts:
        result["sums_us"] = sums_of_all(arguments.ranks)
        keep()
    if "tokens" in parts:
        first = child("--tokens", "{}", patience=arguments.patience)
        result["same_tokens"] = {}
        for name, options in chosen.items():
            words = (
                child("--tokens", json.dumps(options), patience=arguments.patience)
                if options
                else first
            )
            result["same_tokens"][name] = words == first if isinstance(words, list) else words
        keep()
    if "graphs" in parts:
        result["graphs_equal_eager"] = {}
        for name, options in chosen.items():
            exact = options | {"dtype": "bfloat16"}
            graphs, eager = (
                child("--tokens", json.dumps(exact | more), patience=arguments.patience)
                for more in ({}, {"enforce_eager": True})
            )
            held = isinstance(graphs, list)
            result["graphs_equal_eager"][name] = graphs == eager if held else graphs
            keep()
    if "engines" in parts:
        result["engines"] = {}
        for name, options in chosen.items():
            batches = ",".join(map(str, arguments.batch_sizes))
            words = ["--model", arguments.model, "--batch-sizes", batches]
            words += ["--repeats", str(arguments.repeats), "--mixed", str(arguments.mixed)]
            words += ["--input-len", str(arguments.input_len)]
            asked = json.dumps(options | arguments.options)
            found = child("--engine", asked, *words, patience=arguments.patience)
            result["engines"][name] = found
            keep()


if __name__ == "__main__":
    sys.exit(run_program(main))
