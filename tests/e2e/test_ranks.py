"""One model on several ranks of the torch worker, processes that gloo joins: the tokens of one
process.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from twinfer.shared.config import EngineConfig
from twinfer.shared.demand import Demand
from twinfer.shared.engine import Engine
from twinfer.shared.errors import EngineDead, RankLost
from twinfer.shared.executor import driver
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.sampling_params import SamplingParams

from ..processes import children, run
from .conftest import build
from .server_process import gone, held, served
from .test_server_failures import Stream

KINDS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1.0, max_tokens=9, seed=5),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=7, seed=6),
    SamplingParams(
        temperature=0.7, repetition_penalty=1.2, logit_bias={5: 2.0}, max_tokens=6, seed=7
    ),
    SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.9, min_p=0.1, presence_penalty=0.5, max_tokens=8, seed=8),
]
FORM = SamplingParams(
    temperature=0.8, seed=3, max_tokens=12, structured_outputs={"regex": "[a-f]{3,9}"}
)
SIX_HEADS = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 90,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 333,
    "max_position_embeddings": 128, "attention_bias": True, "tie_word_embeddings": True,
}  # fmt: skip


def engine_of(folder, shards, demand=None, **options):
    settings = dict(
        model=str(folder), backend="torch", device="cpu", dtype="float32", max_model_len=64,
        max_num_seqs=8, max_num_batched_tokens=32, page_size=8, num_pages=20,
        tensor_parallel_size=shards,
    )  # fmt: skip
    config = EngineConfig(**(settings | options))
    more = {} if demand is None else {"demand": demand}
    return Engine(config, load_config(folder), str(folder), **more)


def tokens_of(folder, shards, kinds=KINDS, **options):
    """What requests of all kinds get: some in chunks, some preempted, some behind a cached
    prefix.
    """
    engine = engine_of(folder, shards, **options)
    try:
        words = engine.model.vocab_size
        rng = np.random.default_rng(3)
        prompts = [rng.integers(1, words - 7, n) for n in (5, 23, 40, 3, 17, 9)]
        made = [engine.add(str(i), p, kinds[i % len(kinds)]) for i, p in enumerate(prompts * 2)]
        for _ in range(3):
            engine.step()
        made += [engine.add(f"late{i}", prompts[i], kinds[(i + 2) % len(kinds)]) for i in range(3)]
        while engine.has_work:
            engine.step()
        engine.scheduler.check_integrity()
        assert engine.worker.compilations_after_ready() == 0
        return [request.output for request in made], engine.metrics()
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("demo", 4),
        ("llama-biases-head96", 4),
        ("mistral-mqa", 2),
        ("qwen3", 2),
        ("gemma4-small", 2),
        ("granite", 2),
        ("phi3", 4),
        ("arcee-biases", 4),
        ("hunyuan", 2),
        ("six-heads", 4),
    ],
)
def test_the_tokens_of_one_process(name, shards, request, tmp_path):
    """Biases, one KV head, vocabularies that do not divide, post-norms, tied embeddings; 6 query
    and 3 KV heads on 4 ranks.
    """
    options = {}
    if name == "demo":
        folder = model_folder("demo")
    elif name == "six-heads":
        folder, options = tmp_path, {"load_format": "dummy"}
        (tmp_path / "config.json").write_text(json.dumps(SIX_HEADS))
    else:
        folder, _ = request.getfixturevalue("checkpoints")(name)
    alone, metrics = tokens_of(folder, 1, **options)
    together, _ = tokens_of(folder, shards, **options)
    assert together == alone
    if name == "demo":
        assert metrics.preemptions > 0
        assert metrics.prefix_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("mixtral", 2),
        ("qwen2-moe", 2),
        ("qwen3-moe", 4),
        ("glm4-moe", 4),
        ("gpt-oss", 2),
        ("gemma4-experts", 4),
        ("ernie4-5-moe", 4),
        ("llama4", 2),
        ("deepseek-v2", 2),
        ("deepseek-v3", 4),
    ],
)
def test_the_tokens_of_experts_on_one_process(name, shards, tmp_path):
    """Whole experts on each rank: with biases, with an expert that all tokens go through, plain and
    gated, beside an MLP, and some layers without.
    """
    build(name, str(tmp_path))
    more = {"num_pages": 40} if name == "llama4" else {}  # four groups of layers
    alone, _ = tokens_of(tmp_path, 1, **more)
    assert tokens_of(tmp_path, shards, **more)[0] == alone


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "shards"), [(4, 2), (6, 4)])
def test_the_tokens_of_latents_on_one_process(heads, shards, tmp_path):
    """Each rank has all latents and some of the heads, of which six are too few for four."""
    build("youtu", str(tmp_path), num_attention_heads=heads, num_key_value_heads=heads)
    alone, _ = tokens_of(tmp_path, 1)
    assert tokens_of(tmp_path, shards)[0] == alone


WIDE_NORMS = [
    ("olmo2", 2, {}),
    ("olmo2", 4, {"num_attention_heads": 6, "head_dim": 16}),
    ("olmo3", 4, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
    ("olmoe", 2, {"num_experts": 8}),
    ("minimax-m2", 2, {}),
    ("minimax-m2", 4, {"num_local_experts": 8, "num_key_value_heads": 1}),
]
"""Models that norm q and k over all heads, and on how many ranks: 2 KV heads of 3 queries each, 3
and 1 on 4.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shards", "fields"), WIDE_NORMS)
def test_the_tokens_of_norms_over_all_heads_on_one_process(name, shards, fields, tmp_path):
    build(name, str(tmp_path), **fields)
    alone, _ = tokens_of(tmp_path, 1, num_pages=40)
    assert tokens_of(tmp_path, shards, num_pages=40)[0] == alone


OWN_SQUARES = """
from twinfer.ops.native import torch_parallel

gathered = torch_parallel.gathered

def own(x):
    # A mean square of q and one of k: as if those of this rank were those of all.
    found = gathered(x)
    return x[None].expand_as(found) if x.ndim == 2 and x.shape[1] == 2 else found

torch_parallel.gathered = own
"""
COUNTED_ONCE = """
from twinfer.shared.models import placement

# Squares of a KV head that several ranks hold are added up for each.
placement._dealt_heads = lambda model, shards: (model.num_heads, model.num_kv_heads)
"""
RANK = """
import os, sys
from twinfer.shared.executor import rank

code = rank.main()
sys.stdout.flush()
os._exit(code)
"""


@pytest.mark.slow
def test_tokens_tell_whose_squares_the_norms_over_all_heads_are_of(tmp_path, monkeypatch):
    build("olmo2", str(tmp_path))
    right, _ = tokens_of(tmp_path, 4)
    script = tmp_path / "rank.py"
    monkeypatch.setattr(driver, "COMMAND", (sys.executable, str(script)))
    for fault, same in (("", True), (OWN_SQUARES, False), (COUNTED_ONCE, False)):
        script.write_text(fault + RANK)
        assert (tokens_of(tmp_path, 4)[0] == right) == same


@pytest.mark.slow
def test_forms_loops_and_streams():
    """Masks that come behind the backbone, several decode steps at a time, and the residual of all
    ranks, whose digests are compared in each step.
    """
    folder = model_folder("demo")
    kinds = [FORM, *KINDS[:3]]
    options = {"max_num_batched_tokens": 16}
    assert tokens_of(folder, 2, kinds, **options)[0] == tokens_of(folder, 1, kinds, **options)[0]
    loops = {"decode_steps": 4, "demand": Demand(streams=True)}
    assert tokens_of(folder, 2, KINDS[:3], **loops)[0] == tokens_of(folder, 1, KINDS[:3])[0]


UNORDERED = """
import os, sys
from twinfer.ops.native import torch_parallel
from twinfer.shared.executor import rank

gathered = torch_parallel.gathered

def unordered(x):
    found = gathered(x)
    # Sums of hidden states, not words; the other way round, on one rank alone.
    flip = x.ndim == 2 and x.shape[1] == WIDTH and torch_parallel.dist.get_rank() == 1
    return found.flip(0) if flip else found

torch_parallel.gathered = unordered
code = rank.main()
sys.stdout.flush()
os._exit(code)
"""


@pytest.mark.slow
def test_a_rank_that_sums_in_another_order_is_caught(tmp_path, monkeypatch):
    folder = model_folder("demo")
    width = load_config(folder).hidden_size
    script = tmp_path / "rank.py"
    script.write_text(UNORDERED.replace("WIDTH", str(width)))
    monkeypatch.setattr(driver, "COMMAND", (sys.executable, str(script)))
    engine = engine_of(folder, 4, Demand(streams=True))
    try:
        with pytest.raises(RankLost, match="rank 1 has other tokens or another residual"):
            run_one(engine)
        with pytest.raises(EngineDead, match="failed with RankLost: call"):
            engine.step()
    finally:
        engine.close()


def run_one(engine):
    """One request of a prompt in chunks."""
    if not engine.scheduler.requests:
        engine.add("one", np.arange(5, 45), KINDS[0])
    while engine.has_work:
        engine.step()


DRIVER = """
import sys
from twinfer import LLM, SamplingParams
with LLM("demo", backend="torch", device="cpu", tensor_parallel_size=2, progress=False,
         max_model_len=32, num_pages=8) as llm:
    (out,) = llm.generate(["Once"], SamplingParams(temperature=0, max_tokens=3), progress=False)
    print(len(out.outputs[0].token_ids), llm.engine.worker.plan_hash())
print(*{"torch", "jax", "triton"} & set(sys.modules))
"""


@pytest.mark.slow
def test_the_driver_imports_no_framework():
    done = run([sys.executable, "-c", DRIVER], 200)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    assert first.startswith("3 ")
    assert second == ""


def ranks_of(engine):
    """The processes of an engine's ranks, in their order. It also has one that tries out forms."""
    return [
        pid
        for pid in children(engine)
        if driver.COMMAND[-1] in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "words"),
    [(0, signal.SIGKILL, "rank 0 was ended by SIGKILL"), (1, signal.SIGSTOP, "rank 1 was stopped")],
)
def test_a_lost_rank_ends_streams_and_server(rank, number, words, tmp_path):
    """50 streams get an error, the server leaves with 70 and one line why, and nothing is left."""
    flags = ["--backend", "torch", "--device", "cpu", "--tp", "2", "--max-num-seqs", "50"]
    with served(*flags, env=held(tmp_path)) as server:
        engine = server.engine_pid()
        started, ranks = children(engine), ranks_of(engine)
        assert len(ranks) == 2
        streams = [Stream(server, prompt=f"x{i}") for i in range(50)]
        assert streams[0].begun.wait(60)
        os.kill(ranks[rank], number)
        began = time.monotonic()
        assert server.wait_exit() == 70
        assert time.monotonic() - began < 10
        for stream in streams:
            stream.join(10)
            assert stream.error is not None or '"error"' in "".join(stream.lines[-2:])
        assert sum(words in line for line in server.log.splitlines()) == 1
        assert all(gone(pid) for pid in (engine, *started))


def requests_of(folder, shards, lost=None, **options):
    """The tokens of requests of all kinds, some running, some waiting, one with a form, and how much
    was compiled late. `lost`: what is done to the engine, and before which step.
    """
    engine = engine_of(folder, shards, **options)
    try:
        rng = np.random.default_rng(5)
        prompts = [rng.integers(5, 900, n) for n in (5, 23, 40, 3, 17, 9, 30)]
        made = [engine.add(str(i), p, [*KINDS, FORM][i]) for i, p in enumerate(prompts)]
        updates, steps = [], 0
        while engine.has_work:
            steps += 1
            if lost is not None and steps == lost[1]:
                lost[0](engine)
            updates += engine.step()
        engine.scheduler.check_integrity()
        ended = [u.request_id for u in updates if u.finish_reason is not None]
        assert sorted(ended) == [str(i) for i in range(len(prompts))]
        tokens = {str(i): [] for i in range(len(prompts))}
        for update in updates:
            tokens[update.request_id] += update.tokens
        assert tokens == {request.request_id: request.output for request in made}
        return tokens, engine.late_compilations()
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "after"), [(0, 3), (1, 9)])
def test_requests_go_on_with_their_tokens_where_ranks_are_started_anew(rank, after):
    """Then nothing else is lost."""
    folder = model_folder("demo")

    def lose(engine):
        os.kill(engine.worker.processes[rank], signal.SIGKILL)

    lost = requests_of(folder, 2, (lose, after), restart_on_failure=True)
    assert lost == requests_of(folder, 1)


@pytest.mark.slow
def test_what_ends_new_ranks_at_once_ends_the_engine(monkeypatch):
    """Nobody waits for ever."""
    engine = engine_of(model_folder("demo"), 2, restart_on_failure=True)
    try:
        engine.add("one", np.arange(5, 45), KINDS[0])
        os.kill(engine.worker.processes[1], signal.SIGKILL)
        monkeypatch.setattr(driver, "COMMAND", (sys.executable, "-c", "raise SystemExit(9)"))
        with pytest.raises(RankLost, match="ended with exit code 9"):
            run_one(engine)
    finally:
        engine.close()


def streamed(*flags, lose=None, env=None):
    """The texts of 50 streams of a server, what it has said, and whether it serves still. `lose` is
    called with the server once the first has begun.
    """
    usual = ["--backend", "torch", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "50"]
    with served(*usual, *flags, env=env) as server:
        streams = [Stream(server, prompt=f"x{i}", max_tokens=60) for i in range(50)]
        assert streams[0].begun.wait(60)
        if lose is not None:
            lose(server)
        for stream in streams:
            stream.join(120)
            assert stream.lines[-1] == "data: [DONE]"
        with server.client() as client:
            assert client.get("/health").status_code == 200
        # Lines without an event say that the stream lives.
        events = [
            [json.loads(line[6:]) for line in stream.lines if line.startswith("data: {")]
            for stream in streams
        ]
        words = ["".join(e["choices"][0]["text"] for e in each) for each in events]
        return words, server.log


@pytest.mark.slow
def test_streams_go_on_where_a_rank_is_lost():
    """All of 50 end with the text of an undisturbed run, and the server serves."""

    def lose(server):
        os.kill(ranks_of(server.engine_pid())[1], signal.SIGKILL)

    undisturbed, _ = streamed()
    lost, log = streamed("--tp", "2", "--restart-on-failure", lose=lose)
    assert lost == undisturbed
    assert "starting again: rank 1 was ended by SIGKILL" in log
