"""The benchmark's arithmetic: what is run, how a figure is made of times, and what a device's
limit is held against.
"""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from twinfer.bucketing import Table, decode_ladder, mixed_ladder
from twinfer.serving import bench
from twinfer.serving.bench import Workload
from twinfer.serving.bench_cache import find_shortage
from twinfer.shared.drafts import SpeculativeConfig
from twinfer.shared.errors import BackendUnavailable, ConfigError, ModelNotFound
from twinfer.shared.kv_config import NARROW
from twinfer.shared.limits import Limits, decode_bytes, prefill_flops
from twinfer.shared.models.config_json import load_config, parse_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.page_groups import PageGroup
from twinfer.shared.request import Request
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.scheduler import Scheduler
from twinfer.shared.scheduler_config import SchedulerConfig

NO_LIMITS = Limits(None, None, "")


def test_prompts_have_no_tokens_of_images():
    model = SimpleNamespace(vocab_size=4, image_token_ids=(1, 3))
    engine = SimpleNamespace(model=model, config=SimpleNamespace(speculative_config=None))
    runner = bench.Runner(SimpleNamespace(tokenizer=None, engine=engine))
    assert {token for prompt in runner.prompts([50, 50]) for token in prompt} == {0, 2}


def make_scheduler(num_pages, max_num_seqs=8, max_num_batched_tokens=8192, **options):
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=4096,
        page_size=options.pop("page_size", 16),
        num_pages=num_pages,
        **options,
    )
    ladders = decode_ladder(max_num_seqs), mixed_ladder(max_num_batched_tokens)
    return Scheduler(config, Table(*ladders, max_num_seqs))


class FakeRunner:
    """Takes 1 s a call, 1 ms a prompt token, and 0.25 s a step; keeps what it was asked for. With
    guesses, half of what is asked behind first tokens was guessed.
    """

    def __init__(self, guesses=False):
        self.calls, self.guesses = [], guesses
        self.model = parse_config(SHAPES["qwen3-0.6b"])

        class Llm:
            class engine:
                class config:
                    dtype = "bfloat16"
                    kv_cache_dtype = "bfloat16"
                    max_num_batched_tokens = 8192

        self.llm = Llm

    def prompts(self, lengths):
        return [[1] * length for length in lengths]

    def accepted_tokens(self):
        return sum(sum(outputs) - len(outputs) for _, outputs in self.calls) // 2

    def seconds(self, lengths, outputs):
        self.calls.append((list(lengths), list(outputs)))
        return 1.0 + 1e-3 * sum(lengths) + 0.25 * (max(outputs) - 1)


def test_the_decode_figure_is_a_difference():
    runner = FakeRunner()
    row = bench.decode(runner, Workload(), 8, Limits(1e9, None, ""))
    assert row["ms_per_step"] == pytest.approx(250)
    assert row["tok_s"] == pytest.approx(32)
    assert runner.calls == 3 * [([128] * 8, [1] * 8), ([128] * 8, [129] * 8)]
    assert row["share_of_limit"] == pytest.approx(row["bytes_per_step"] / 0.25 / 1e9)
    assert bench.decode(runner, Workload(), 8, NO_LIMITS)["share_of_limit"] is None


def test_where_tokens_are_guessed_the_decode_figure_is_of_a_token():
    """What was guessed before this batch is not counted."""
    runner = FakeRunner(guesses=True)
    runner.seconds([128], [1000])
    row = bench.decode(runner, Workload(), 8, Limits(1e9, None, ""))
    assert row.pop("runs_ms") == pytest.approx([250] * 3)
    assert row == {
        "ms_per_token": pytest.approx(250),
        "tok_s": pytest.approx(32),
        "tokens_per_step": 2.0,
        "share_of_limit": None,
    }


def test_where_tokens_are_guessed_a_full_step_is_told_by_its_tokens(monkeypatch):
    """Pairs of tokens a second, and for one of four requests single ones."""
    runner = FakeRunner(guesses=True)
    runner.llm.engine.config.max_model_len = 1024
    pairs = [1.0] + [2.0 + i // 2 for i in range(40)]
    found = [pairs, pairs, pairs, [1.0 + i for i in range(41)]]
    monkeypatch.setattr(bench, "_arrivals", lambda *_: found)
    row = bench._full_step(runner, [8] * 4, 40, Limits(1e9, None, ""))
    # 20 s until the pairs are there, with 20 tokens of the last request.
    assert row == {
        "ms_per_full_token": pytest.approx(20e3 / 35),
        "full_tokens": 20,
        "tokens_per_full_step": 140 / 80,
        "share_of_limit_full": None,
    }


def test_a_step_in_which_all_decode(monkeypatch):
    """Prompts that need several steps: what happens until the last of them is read is left out."""
    runner = FakeRunner()
    runner.llm.engine.config.max_num_batched_tokens = 512
    runner.llm.engine.config.max_model_len = 1024

    def arrivals(runner, prompts, output_len, iteration):
        # A prompt a step of 3 s, four to a step; decodes of 0.25 s once all are read.
        first = [3.0 * (1 + i // 4) for i in range(len(prompts))]
        read = max(first)
        return [
            [t for t in (3.0 * (1 + k) for k in range(10)) if start <= t < read]
            + [read + 0.25 * k for k in range(output_len - int((read - start) / 3.0))]
            for start in first
        ]

    monkeypatch.setattr(bench, "_arrivals", arrivals)
    row = bench.decode(runner, Workload(), 8, Limits(1e9, None, ""))
    assert row["ms_per_full_step"] == pytest.approx(250)
    assert row["full_steps"] > 100
    assert row["share_of_limit_full"] == pytest.approx(row["share_of_limit"], rel=0.01)
    monkeypatch.setattr(bench, "LEAST_STEPS", 1000)
    assert "ms_per_full_step" not in bench.decode(runner, Workload(), 8, NO_LIMITS)


@pytest.mark.parametrize("narrow", NARROW.values())
def test_the_decode_figure_of_a_narrow_cache(narrow, monkeypatch):
    runner = FakeRunner()
    wide = bench.decode(runner, Workload(), 8, NO_LIMITS)["bytes_per_step"]
    monkeypatch.setattr(runner.llm.engine.config, "kv_cache_dtype", narrow)
    cache = 8 * (128 + 64.5) * 28 * 2 * 8 * 128
    assert bench.decode(runner, Workload(), 8, NO_LIMITS)["bytes_per_step"] == wide - cache


def test_a_start_that_ends_for_want_of_a_device_says_so():
    with pytest.raises(BackendUnavailable, match="no tpu device"):
        bench.measure_start("demo", "torch", {"device": "tpu"})


def test_the_other_figures():
    runner = FakeRunner()
    assert bench.prefill(runner, Workload(), NO_LIMITS)["tok_s"] == pytest.approx(
        32 * 1024 / (1 + 32.768)
    )
    assert bench.ttft(runner, Workload(), NO_LIMITS)["ms"] == pytest.approx(2024)
    assert runner.calls == 3 * [([1024] * 32, [1] * 32)] + 5 * [([1024], [1])]
    runner.calls.clear()
    row = bench.mixed(runner, Workload())
    rng = random.Random(1)
    lengths = [rng.randrange(64, 1024) for _ in range(512)]
    outputs = [rng.randrange(32, 256) for _ in range(512)]
    assert runner.calls == [(lengths, outputs)]
    assert row["requests_s"] * row["seconds"] == pytest.approx(512)
    assert row["out_tok_s"] / row["requests_s"] == pytest.approx(sum(outputs) / 512)


def test_contexts_and_sampling(monkeypatch):
    """Each context with each batch; requests sample by what the model says, else as Qwen3 does."""
    asked = []
    # The fake takes so little time that two calls may take the same.
    clock = (float(second * second) for second in itertools.count())
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))

    class Llm:
        tokenizer = None
        default_params = SamplingParams()

        class engine:
            model = parse_config(SHAPES["qwen3-0.6b"])
            # In step i of 1..128 a request of 3000 tokens has 3000 + i in the cache.
            scheduler = make_scheduler(num_pages=2 * 196, watermark=0.0)

            class config:
                dtype = kv_cache_dtype = "bfloat16"
                max_model_len, max_num_seqs = 4096, 8
                max_num_batched_tokens, enable_prefix_caching = 8192, False
                speculative_config = None

            @staticmethod
            def metrics():
                return SimpleNamespace(accepted_tokens=0)

        def generate(self, prompts, params, progress):
            asked.append((len(prompts), len(prompts[0]), params[0]))
            done = [SimpleNamespace(token_ids=[0] * p.max_tokens) for p in params]
            return [SimpleNamespace(outputs=[one]) for one in done]

    work = Workload(
        only=("decode",), batch_sizes=(1, 2), contexts=(100, 3000), sampling="model", repeats=1
    )
    figures = bench.run_workload(Llm(), work, NO_LIMITS)
    assert list(figures["decode"]) == ["1 of 100", "2 of 100", "1 of 3000", "2 of 3000"]
    assert [call[:2] for call in asked[1::2]] == [(1, 100), (2, 100), (1, 3000), (2, 3000)]
    assert {(p.temperature, p.top_p, p.top_k) for _, _, p in asked} == {(0.6, 0.95, 20)}
    own = Llm()
    own.default_params = SamplingParams(temperature=0.9)
    bench.run_workload(own, replace(work, contexts=()), NO_LIMITS)
    assert {(p.temperature, p.top_k) for _, _, p in asked[9:]} == {(0.9, 0)}
    own.engine.scheduler = make_scheduler(num_pages=2 * 196 - 1, watermark=0.0)
    asked.clear()
    figures = bench.run_workload(own, work, NO_LIMITS)
    assert [call[:2] for call in asked[1::2]] == [(1, 100), (2, 100), (1, 3000)]
    assert [name for name, row in figures["decode"].items() if "left_out" in row] == ["2 of 3000"]
    assert figures["decode"]["2 of 3000"] == {
        "left_out": "2 requests of 3129 tokens need 392 pages at once, the KV cache has 391",
        "requests": 2, "tokens": 3129, "pages_needed": 392, "pages": 391,
    }  # fmt: skip
    asked.clear()
    with pytest.raises(
        ConfigError, match=r"batch_sizes: got \(2,\), 2 requests of 3129 .* has 391"
    ):
        bench.run_workload(own, replace(work, batch_sizes=(2,), contexts=(3000,)), NO_LIMITS)
    assert not asked
    with pytest.raises(
        ConfigError, match=r"decode needs 4097 tokens: lower contexts or output_len, or"
    ):
        replace(work, contexts=(8, 4096 - 128)).check(4096, 8)


@pytest.mark.parametrize("only", ["decode", "skewed"])
def test_the_longest_run_of_a_batch_is_counted(only):
    """Prompts that need several steps: the step in which all decode has the longest requests."""
    llm = SimpleNamespace(engine=SimpleNamespace(config=None, scheduler=None))
    for num_pages, least in ((4 * 25 + 1, True), (4 * 25, False)):
        scheduler = make_scheduler(num_pages, max_num_batched_tokens=64)  # keeps 1 page in reserve
        llm.engine = SimpleNamespace(scheduler=scheduler, config=scheduler.config)
        # 5 steps read the prompts: 80 + 305 + 7 tokens, 25 pages; without the 7 it would be 24
        work = Workload(
            only=(only,), batch_sizes=(4,), input_len=80, output_len=305, skewed=(80, 80, 3)
        )
        if least:
            assert not any(bench._shortages(llm, work).values())
        else:
            with pytest.raises(ConfigError, match=rf"4 requests of 392 tokens .* has {num_pages}"):
                bench._shortages(llm, work)


GROUPS = ((), (PageGroup(4, 8), PageGroup(4)))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("reading", "decode_steps"),
    [*(pytest.param(n, 1, marks=pytest.mark.slow) for n in (16, 64)), (16, 4)],
)
def test_a_batch_lacks_nothing_where_nobody_waits_or_gives_way(groups, reading, decode_steps):
    """Beside a run of the scheduler with as many pages."""
    found = []
    for num_pages in range(20, 90):
        options = {"groups": groups, "page_size": 4, "max_num_batched_tokens": reading}
        options["decode_steps"] = decode_steps
        shortage = find_shortage(make_scheduler(num_pages, watermark=0.0, **options), [13] * 4, 22)
        assert (shortage is None) == at_once(make_scheduler(num_pages, watermark=0.0, **options))
        found.append(shortage is None)
        with_reserve = make_scheduler(num_pages, watermark=0.1, **options)
        if find_shortage(with_reserve, [13] * 4, 22) is None:
            assert at_once(with_reserve)
    assert any(found)
    assert not all(found)


def test_guesses_take_no_pages_that_a_batch_lacks():
    options = {"page_size": 4, "pipeline_depth": 1, "watermark": 0.0, "max_num_seqs": 8}
    plain = [find_shortage(make_scheduler(n, **options), [13] * 4, 22) for n in (35, 36)]
    options["drafts"] = SpeculativeConfig(3)
    assert [find_shortage(make_scheduler(n, **options), [13] * 4, 22) for n in (35, 36)] == plain
    assert [shortage is None for shortage in plain] == [False, True]


def at_once(scheduler):
    """Whether four requests run at once, and none is preempted."""
    params = SamplingParams(max_tokens=22, ignore_eos=True)
    for index in range(4):
        prompt = np.arange(13) + 100 * index
        scheduler.add(Request(str(index), prompt, params, seed=0))
    running, in_flight = 0, []
    while scheduler.has_work:
        if step := scheduler.schedule():
            in_flight.append(step)
            running = max(running, scheduler.metrics().running)
        if len(in_flight) == 2 or not step:
            done = in_flight.pop(0)
            tokens = np.zeros((done.num_iterations, 8), np.int32)
            scheduler.update(done, tokens if done.loop else tokens[0])
    return running == 4 and not scheduler.metrics().preemptions


def test_a_changed_size_is_not_the_standard_workload():
    assert Workload(only=("decode",), batch_sizes=(1,)).standard
    assert not Workload(output_len=65).standard


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"only": ("decode", "speed")}, "speed"),
        ({"only": ()}, "nothing"),
        ({"batch_sizes": (1, 0)}, "batch_sizes"),
        ({"output_len": 1}, "at least 2"),
        ({"prefill_len": 0}, "prefill_len"),
        ({"sampling": "own"}, "greedy, model"),
        ({"contexts": (8, 0)}, "contexts"),
        ({"mixed_input": (64, 64)}, "mixed_input"),
        ({"mixed_output": (64,)}, "mixed_output"),
        ({"skewed": (8, 2)}, "skewed"),
        ({"turns": (8, 0, 2)}, "turns"),
    ],
)
def test_a_wrong_workload_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        Workload(**changes)


def test_what_an_engine_cannot_run_is_refused():
    Workload().check(max_model_len=1278, max_num_seqs=256)
    with pytest.raises(ConfigError, match=r"mixed needs 1278 tokens: lower mixed_input"):
        Workload().check(max_model_len=1277, max_num_seqs=256)
    with pytest.raises(ConfigError, match="got 256, max_num_seqs is 128"):
        Workload().check(max_model_len=4096, max_num_seqs=128)
    Workload(only=("ttft",)).check(max_model_len=1025, max_num_seqs=1)
    long = Workload(only=("skewed", "turns"))
    long.check(max_model_len=102_529, max_num_seqs=64, prefixes=True)
    with pytest.raises(ConfigError, match="enable_prefix_caching: got False"):
        long.check(max_model_len=102_529, max_num_seqs=64)
    with pytest.raises(ConfigError, match="skewed needs 102529"):
        long.check(max_model_len=102_528, max_num_seqs=64, prefixes=True)
    with pytest.raises(ConfigError, match="got 64 requests, max_num_seqs is 63"):
        long.check(max_model_len=102_529, max_num_seqs=63, prefixes=True)


@pytest.mark.parametrize(
    ("shape", "weights"), [("llama3-8b", 7_504_924_672), ("qwen3-0.6b", 596_049_920)]
)
def test_bytes_of_a_decode_step(shape, weights):
    # Weights that a step reads, counted by hand from the shapes: all but a separate embedding
    # table.
    model = parse_config(SHAPES[shape])
    rows = 0 if model.tie_embeddings else 8 * model.hidden_size
    cache = 8 * 192 * model.num_layers * 2 * 8 * 128
    assert decode_bytes(model, [192] * 8, 2, 2) == 2 * (weights + rows + cache)
    assert decode_bytes(model, [192] * 8, 2, 1) == 2 * (weights + rows) + cache


def test_experts_that_nobody_chooses_are_not_read_nor_computed():
    model = parse_config(SHAPES["qwen3-30b-a3b"])
    expert, attention = 3 * 768 * 2048, 2048 * (32 + 8) * 128 + 32 * 128 * 2048
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    rest = 48 * (attention + 128 * 2048) + norms + 151936 * 2048
    rows, cache = 2048, 9 * 48 * 2 * 4 * 128
    assert decode_bytes(model, [9] * 1, 2, 2) == pytest.approx(
        2 * (rest + 48 * 8 * expert + rows + cache), rel=1e-9
    )
    assert decode_bytes(model, [0] * 10_000, 2, 2) == pytest.approx(
        2 * (rest + 48 * 128 * expert + 10_000 * rows), rel=1e-9
    )
    keys = 2048 * 8 * 128
    others = attention - keys + 128 * 2048 + 8 * expert
    pairs = 47 * 32 * 128 * 45 + 32 * 128 * 9
    assert prefill_flops(model, [9]) == pytest.approx(
        2 * (47 * 9 * (keys + others) + 9 * keys + others + 151936 * 2048) + 4 * pairs, rel=1e-9
    )


def test_a_window_limits_what_is_read_and_computed():
    raw = dict(SHAPES["llama3-8b"]) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
    }
    for name in ("attention_bias", "mlp_bias"):
        raw.pop(name)
    whole, windowed = (parse_config(raw | {"sliding_window": window}) for window in (None, 5))
    assert (
        decode_bytes(whole, [9] * 1, 2, 2) - decode_bytes(windowed, [9] * 1, 2, 2)
        == 2 * 4 * 32 * 2 * 8 * 128
    )
    pairs = sum(min(position, 4) + 1 for position in range(9))
    less = sum(range(1, 10)) - pairs
    assert prefill_flops(whole, [9, 3]) - prefill_flops(windowed, [9, 3]) == 4 * 32 * 128 * (
        less * 31 + 4
    )


def test_a_chunk_limits_what_is_read_and_computed():
    """A query sees its own chunk, which is less than a window of that size but at its end."""
    windowed = parse_config(
        dict(SHAPES["llama3-8b"])
        | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4}
        | dict.fromkeys(("attention_bias", "mlp_bias"))
    )
    chunked = replace(windowed, windows_are_chunks=True)
    for length, seen in ((1, 1), (4, 4), (5, 1), (7, 3), (8, 4), (9, 1)):
        less = decode_bytes(windowed, [length], 2, 2) - decode_bytes(chunked, [length], 2, 2)
        assert less == 2 * (min(length, 4) - seen) * 32 * 2 * 8 * 128
        pairs = sum(min(position, 3) - position % 4 for position in range(length))
        less = prefill_flops(windowed, [length]) - prefill_flops(chunked, [length])
        assert less == 4 * 32 * 128 * (31 * pairs + min(length, 4) - seen)
    assert decode_bytes(windowed, [0], 2, 2) == decode_bytes(chunked, [0], 2, 2)


def test_flops_of_a_prompt():
    model = parse_config(SHAPES["qwen3-0.6b"])
    keys, rest = 1024 * 2 * 8 * 128, 1024 * 16 * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072
    attention = 4 * 16 * 128 * sum(range(1, 101))
    whole = 27 * (2 * 100 * (keys + rest) + attention)
    last = 2 * 100 * keys + 2 * rest + 4 * 16 * 128 * 100
    assert prefill_flops(model, [100]) == whole + last + 2 * 1024 * 151936


def test_percentiles_are_milliseconds():
    assert bench.percentiles([0.001 * i for i in range(101)]) == {
        "p50": pytest.approx(50), "p90": pytest.approx(90), "p99": pytest.approx(99), "count": 101
    }  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_folder(name):
    assert load_config(model_folder(name)) == parse_config(SHAPES[name])


def test_an_unknown_shape_is_named_with_the_known_ones():
    assert set(SHAPES) >= {"llama3-8b", "qwen3-0.6b"}
    with pytest.raises(ModelNotFound, match=r"llama3-9b .*; known by name: .*llama3-8b"):
        model_folder("llama3-9b")
