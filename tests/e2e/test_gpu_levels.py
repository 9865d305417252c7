"""The torch worker's compile levels and CUDA graph modes: the same tokens, the same bits,
nothing compiled late.
"""

import dataclasses
import itertools
import json
import warnings

import numpy as np
import pytest

from twinfer.serving.llm import LLM
from twinfer.shared.compilation_config import keeps_code
from twinfer.shared.config import EngineConfig
from twinfer.shared.errors import ConfigError, InternalError
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.step import NewTokens, processor_layout, sampling_layout

from .conftest import build

PROMPTS = ["Once upon a time", "The cat sat on the mat and then", "A"]
SMALL = dict(
    backend="torch",
    dtype="float32",
    max_num_seqs=2,
    max_num_batched_tokens=32,
    page_size=16,
    num_pages=64,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ON_A_GPU = SMALL | {"dtype": "bfloat16", "device": "cuda"}
"""In half precision every op of the layers is a kernel, as it is in service."""
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def with_cache(device, folder, options):
    """Options of an engine that keeps what it compiles in a folder of the test, where anything
    is kept.
    """
    options = SMALL | {"device": device} | options
    config = dict(options.get("compilation_config", {}))
    if keeps_code(EngineConfig(model="demo", **options).compilation(), device):
        config.setdefault("cache_dir", str(folder))
    return options | {"compilation_config": config}


def tokens(device, folder, **options):
    """Greedy tokens and drawn ones, of an engine that compiles nothing after ready."""
    options = with_cache(device, folder, options)
    with LLM("demo", **options) as llm:
        greedy = llm.generate(PROMPTS, GREEDY)
        drawn = llm.generate(
            PROMPTS, SamplingParams(temperature=0.8, top_k=9, seed=5, max_tokens=12)
        )
        assert llm.engine.worker.compilations_after_ready() == 0
        return [output.outputs[0].token_ids for output in (*greedy, *drawn)]


@pytest.fixture(scope="module")
def eager(device, tmp_path_factory):
    return tokens(device, tmp_path_factory.mktemp("code"), compile_level=0)


@pytest.mark.gpu
def test_traced_layers_give_the_tokens_of_eager_ones(device, eager, tmp_path):
    assert tokens(device, tmp_path, compile_level=1) == eager


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "traced"),
    [
        ("gemma4-small", {"level": 1}),
        ("mixtral", {"level": 1}),
        ("mixtral", {"level": 3, "road": "piecewise", "use_inductor": False}),
    ],
    ids=["embeddings of layers", "experts", "experts piecewise"],
)
def test_traced_layers_take_any_number_of_tokens(device, name, traced, tmp_path):
    """What each layer has of its own, an embedding of each token, is as open as the rest; so is how
    many blocks of rows the experts have.
    """
    build(name, str(tmp_path / "it"))
    prompts = [{"prompt_token_ids": list(range(1, n))} for n in (4, 8, 18, 41)]
    made = []
    for config in ({"level": 0}, traced):
        options = {"compilation_config": config, "max_model_len": 64}
        options = with_cache(device, tmp_path, options)
        with LLM(str(tmp_path / "it"), **options) as llm:
            outputs = llm.generate(prompts, GREEDY)
            made.append([output.outputs[0].token_ids for output in outputs])
    assert made[0] == made[1]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("use_inductor", [False, True])
def test_the_piecewise_road_gives_the_tokens_of_eager_steps(device, eager, use_inductor, tmp_path):
    """On a GPU with the graphs of level 3, each step captured around all its pieces or at its
    attention.
    """
    config = {
        "level": 3,
        "road": "piecewise",
        "use_inductor": use_inductor,
        "cache_dir": str(tmp_path),
    }
    assert tokens(device, tmp_path, compilation_config=config) == eager


@pytest.mark.gpu
@pytest.mark.slow
def test_compiled_layers_give_the_tokens_of_eager_ones(device, eager, tmp_path):
    dump = tmp_path / "dump"
    config = {"cache_dir": str(tmp_path / "code"), "debug_dump_path": str(dump)}
    assert tokens(device, tmp_path, compile_level=2, compilation_config=config) == eager
    assert list(dump.glob("layer_*.graph.py"))
    assert list(dump.glob("layer_*.generated_0.py"))
    (kept,) = (tmp_path / "code").iterdir()
    assert {"plan", "versions", "device"} <= set(json.loads((kept / "factors.json").read_text()))


def test_graphs_in_float32_give_the_tokens_of_eager_steps(cuda, eager, tmp_path):
    """Every mode on its own: `test_gpu_modes.py`, in bfloat16."""
    assert tokens(cuda, tmp_path, compile_level=3, cudagraph_mode="FULL_AND_PIECEWISE") == eager


def test_graphs_are_refused_on_a_cpu_with_the_reason(device):
    if device != "cpu":
        pytest.skip("this device has graphs")
    with pytest.raises(ConfigError, match="needs a cuda device"):
        LLM("demo", cudagraph_mode="FULL", **SMALL)


def test_attention_that_reads_the_host_cannot_be_captured_whole(cuda):
    with pytest.raises(ConfigError, match="reads lengths on the host"):
        LLM(
            "demo",
            cudagraph_mode="FULL",
            enable_ops=("all", "-paged_attention"),
            device=cuda,
            **SMALL,
        )


def padded_steps(worker, table, vocab):
    """A step of each program with real requests that write and read pages."""
    from twinfer.shared.packer import padding
    from twinfer.shared.step import batch_layout

    for number, d in enumerate(table):
        step = padding(d, worker._shape)
        layout = batch_layout(d, worker._shape)
        batch = step.batch.copy()
        f = layout.views(batch)
        count = d.requests if d.kind == "decode" else 1
        length = 1 if d.kind == "decode" else d.tokens
        f["token_ids"][: count * length] = (np.arange(count * length) * 7 + number) % vocab
        f["positions"][: count * length] = np.tile(np.arange(length), count)
        pages = -(-length // 16)
        page_table = np.zeros_like(step.page_table)
        page_table[:count, :pages] = 1 + np.arange(count * pages).reshape(count, pages)
        f["slots"][: count * length] = np.concatenate(
            [(1 + i * pages) * 16 + np.arange(length) for i in range(count)]
        )
        f["query_start"][: count + 1] = np.arange(count + 1) * length
        f["query_start"][count + 1 :] = count * length
        f["kv_lens"][:count] = length
        f["rows"][:count] = np.arange(count)
        f["counts"][:] = count if length == 1 else 0, count
        f["sample_index"][:count] = (np.arange(count) + 1) * length - 1
        sampling = filters(d.requests, count, length)
        yield dataclasses.replace(step, batch=batch, sampling=sampling, page_table=page_table)


def filters(requests, count, position):
    """Sampling fields of rows that use every filter."""
    layout = sampling_layout(requests)
    buffer = layout.allocate()
    f = layout.views(buffer)
    f["sample_rows"][:] = SMALL["max_num_seqs"]
    f["sample_rows"][:count] = np.arange(count)
    f["position"][:], f["seed_lo"][:], f["seed_hi"][:] = position, np.arange(requests), 7
    f["top_k"][:], f["top_p"][:], f["min_p"][:] = 20, round(0.9 * 65536), 5 * 65536
    f["scale"][:] = 1.4426950408889634 / 3.0  # so hot that samplers differ
    return buffer


def processors(requests, shape, sampler):
    """Fields of the sampler: penalties, a bias, and half of all words. `masked` has words alone, the
    other half.
    """
    layout = processor_layout(requests, shape, sampler)
    buffer = layout.allocate()
    f = layout.views(buffer)
    f["prompt_len"][:], f["rows"][:] = 4, np.arange(requests) % SMALL["max_num_seqs"]
    f["repetition"][:], f["repetition_inverse"][:] = 1.0, 1.0
    words = 0x55555555 if sampler == "processed" else ~0x55555555
    f["mask_row"][:], f["masks"][:] = np.arange(requests), words
    f["history_row"][:] = f["rows"] if sampler == "processed" else -1
    f["bias_row"][:] = np.arange(requests)
    if sampler == "processed":
        f["presence"][:], f["frequency"][:] = 30000, 9000
        f["repetition"][:], f["repetition_inverse"][:] = 1.5, 1 / 1.5
        f["bias_ids"][:] = -1
        f["bias_ids"][:, 0], f["bias"][:, 0] = 3, 65536
    return buffer


def poison(pool):
    """Overwrite all memory of a graph pool, used and free, with NaNs (as integers: -1)."""
    import torch

    from twinfer.gpu.graphs import alias_of

    torch.cuda.synchronize()
    segments = [
        s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)
    ]
    assert segments, "the graphs have no memory of their own"
    for segment in segments:
        alias_of(
            segment["address"], (segment["total_size"] // 4,), torch.int32, segment["device"]
        ).fill_(-1)
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL", "PIECEWISE"])
def test_interleaved_graphs_equal_eager_bit_for_bit(cuda, mode, tmp_path):
    """Replays of all sizes and samplers in several orders; all memory that graphs share is
    overwritten before each.
    """
    import torch

    from twinfer.gpu.programs import HEAD, TOP
    from twinfer.shared.step import PROCESSING, SAMPLERS

    with LLM(
        "demo", **ON_A_GPU, compilation_config={"cache_dir": str(tmp_path), "cudagraph_mode": mode}
    ) as llm:
        worker = llm.engine.worker
        programs, steps = (
            worker._programs,
            list(padded_steps(worker, llm.engine.table, llm.engine.model.vocab_size)),
        )

        def poisoned(run, *args):
            poison(worker._recorder.pool)
            made = run(*args)
            torch.cuda.synchronize()
            return made if isinstance(made, tuple) else ()

        def behind_its_head(sample, requests, sampler):
            sample(requests, HEAD)
            return sample(requests, sampler)

        def run(step, captured):
            """Finished rows, and by sampler what it leaves in `tokens` and returns: of the real
            requests.
            """
            count, d = int(step.field("counts")[1]), step.descriptor
            backbone, sample = programs.backbone, programs.sample
            if not captured:
                backbone, sample = programs._rows, programs._sample
            # Histories with repeated tokens, of which the step brings the last.
            each = np.arange(count, dtype=np.int32)
            new = NewTokens(0, each, each * 0 + 11, each * 0 + 12, each * 0 + 1)
            with torch.inference_mode():
                worker._inputs.histories[:] = -1
                worker._inputs.histories[:, :11] = torch.arange(11, device="cuda") % 5
                penalised = dataclasses.replace(step, sampler="processed", new_tokens=new)
                worker._inputs.fill(penalised, host=programs.host_metadata[d.kind])
                poisoned(backbone, d)
                found = {"rows": [programs.rows[:count].clone()]}
                for sampler in (*SAMPLERS, TOP):
                    if sampler in PROCESSING:
                        given = processors(d.requests, worker._shape, sampler)
                        worker._inputs.fill_processors(d.requests, sampler, given)
                        # The one program whose result the next finds in the memory that all share.
                        results = poisoned(behind_its_head, sample, d.requests, sampler)
                    else:
                        results = poisoned(sample, d.requests, sampler)
                    found[sampler] = [x[:count].clone() for x in (programs.tokens, *results)]
            return found

        assert set(programs._backbones) == {step.descriptor for step in steps}
        samplers = {
            (step.descriptor.requests, sampler)
            for step in steps
            for sampler in (*SAMPLERS, TOP, HEAD)
        }
        assert set(programs._samplers) == samplers
        want = [run(step, captured=False) for step in steps]
        for order in (range(len(steps)), reversed(range(len(steps))), [0, len(steps) - 1] * 3):
            for index in order:
                for name, got in run(steps[index], captured=True).items():
                    equal = [torch.equal(x, y) for x, y in zip(got, want[index][name], strict=True)]
                    assert all(equal), (steps[index].descriptor, name, equal)
        first, *others = (found["rows"][0][0] for found in want)
        assert not any(torch.equal(first, other) for other in others)
        for a, b in itertools.combinations(SAMPLERS, 2):
            assert any(not torch.equal(found[a][0], found[b][0]) for found in want), (
                f"{a} gives the tokens of {b}"
            )


@pytest.mark.parametrize("shared_wrongly", [False, True])
def test_the_canary_sees_a_result_that_was_left_in_the_pool(cuda, shared_wrongly):
    """Two graphs of one pool: the second reads what the first left outside of the pool, or (the
    fault) inside.
    """
    import torch

    from twinfer.bucketing import Descriptor
    from twinfer.gpu.graphs import GraphRecorder, alias
    from twinfer.shared.compilation_config import CUDAGraphMode

    x, outside, result = (torch.arange(64.0, device="cuda") + i for i in range(3))
    recorder, d = GraphRecorder(), Descriptor("decode", 1, 1, 1)
    with recorder.recording():
        first, inside = recorder.capture(d, CUDAGraphMode.FULL, lambda: x * 2)
        source = alias(inside) if shared_wrongly else outside
        copy, _ = recorder.capture(d, CUDAGraphMode.FULL, lambda: outside.copy_(x * 2))
        second, _ = recorder.capture(d, CUDAGraphMode.FULL, lambda: result.copy_(source + 1))
    first()
    copy()
    poison(recorder.pool)
    second()
    torch.cuda.synchronize()
    assert torch.equal(result, x * 2 + 1) is not shared_wrongly


@pytest.mark.parametrize("pieces", [False, True])
def test_results_of_graphs_do_not_hold_memory_of_the_pool(cuda, pieces):
    """Four programs with results of 32 MiB, all kept: each finds the memory of the one before it
    free again.
    """
    import torch

    from twinfer.bucketing import Descriptor
    from twinfer.gpu.forward_context import get_forward_context
    from twinfer.gpu.graphs import GraphRecorder
    from twinfer.shared.compilation_config import CUDAGraphMode

    recorder, kept, sizes = GraphRecorder(), [], []
    x = torch.ones(8 << 20, device="cuda")

    def program():
        y = x * 2
        if pieces:
            y = get_forward_context().splitter.split(lambda z: z + 1, (y,))
        return y + 1

    mode = CUDAGraphMode.PIECEWISE if pieces else CUDAGraphMode.FULL
    with recorder.recording():
        x * 2 + 1  # kernels are loaded by their first launch, which must not be captured
        for number in (4, 3, 2, 1):
            kept.append(recorder.capture(Descriptor("decode", number, number, 1), mode, program))
            segments = [
                s
                for s in torch.cuda.memory_snapshot()
                if tuple(s["segment_pool_id"]) == tuple(recorder.pool)
            ]
            sizes.append(sum(segment["total_size"] for segment in segments))
    assert sizes[0] >= 64 << 20
    assert sizes == [sizes[0]] * 4
    for replay, result in kept:
        result.fill_(0)
        replay()
        torch.cuda.synchronize()
        assert float(result[0]) == (4.0 if pieces else 3.0)


def test_the_check_for_waits_is_taken_back_though_torch_warns(no_waits, monkeypatch):
    """torch warns after it has switched the check on, and warnings are errors here."""
    import torch

    modes = []

    def switch(mode):
        modes.append(mode)
        if len(modes) == 1:
            warnings.warn(
                "Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2
            )

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "set_sync_debug_mode", switch)
        with no_waits():
            assert modes == ["error"]
        assert modes == ["error", "default"]
        with pytest.raises(ZeroDivisionError), no_waits():
            raise ZeroDivisionError
    assert modes == ["error", "default"] * 2


def test_the_step_loop_waits_for_nothing_but_its_results(cuda, tmp_path, no_waits):
    """With torch's check for synchronising calls on, over every sampler, log-probabilities and
    prompts.
    """
    import torch

    # larger steps run without a graph
    config = {"cache_dir": str(tmp_path), "cudagraph_mixed_limit": 16}
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 1},
        {"temperature": 0.8, "presence_penalty": 0.5, "seed": 1},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    )
    with LLM("demo", **ON_A_GPU, compilation_config=config) as llm:
        with no_waits():
            with pytest.raises(RuntimeError, match="synchroniz"):
                torch.ones(1, device="cuda").item()
            for kind in kinds:
                llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, **kind))
        assert llm.engine.worker.compilations_after_ready() == 0


def test_a_measured_start_is_reused_only_where_it_fits(cuda, tmp_path, monkeypatch):
    """The first start reserves addresses and measures; the next takes its plan; another
    configuration does not.
    """
    import torch

    free = torch.cuda.mem_get_info()
    # others may use this GPU meanwhile
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: free)

    def start(**changes):
        options = (
            ON_A_GPU
            | {"num_pages": None, "compilation_config": {"cache_dir": str(tmp_path)}}
            | changes
        )
        with LLM("demo", **options) as llm:
            made = llm.generate(PROMPTS, GREEDY)
            worker = llm.engine.worker
            assert worker.compilations_after_ready() == 0
            return (
                [o.outputs[0].token_ids for o in made],
                worker._reserved is not None,
                llm.engine.report.num_pages,
            )

    first = start()
    assert first[1] is True
    assert len(list(tmp_path.glob("*/start.json"))) == 1
    assert start() == (first[0], False, first[2])
    assert start(max_num_batched_tokens=48)[:2] == (first[0], True)


def refuse(*_):
    raise InternalError("no virtual memory")


def test_without_virtual_memory_programs_are_built_twice(cuda, tmp_path, monkeypatch):
    from twinfer.gpu import worker as module

    options = ON_A_GPU | {"num_pages": None, "compilation_config": {"cache_dir": str(tmp_path)}}
    monkeypatch.setattr(module, "ReservedCache", refuse)
    with pytest.warns(UserWarning, match="built twice"):
        llm = LLM("demo", **options)
    with llm:
        assert llm.engine.worker._reserved is None
        assert llm.engine.worker.compilations_after_ready() == 0
        assert llm.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids


@pytest.mark.gpu
def test_loops_on_the_device_give_the_tokens_of_single_steps(device, tmp_path):
    options = {"dtype": "bfloat16"} if device == "cuda" else {}
    single = tokens(device, tmp_path, **options)
    assert tokens(device, tmp_path, decode_steps=8, **options) == single
    assert tokens(device, tmp_path, decode_steps=3, async_scheduling=False, **options) == single


def test_regions_made_of_kernels_alone_are_not_compiled(cuda, tmp_path):
    """Unless the user asks for Inductor: then all are, and the tokens are the same."""
    made = {}
    for forced in (None, True):
        config = {"cache_dir": str(tmp_path), "use_inductor": forced}
        with LLM("demo", **ON_A_GPU, compilation_config=config) as llm:
            made[forced] = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
            assert bool(llm.engine.worker._compiled) is bool(forced)
    assert made[None] == made[True]


def step_logits(device, folder, **options):
    """Logits of the sampled rows of a step of each program, by whatever road the engine takes:
    [row vocab] float32.
    """
    import torch

    options = with_cache(device, folder, options)
    with LLM("demo", **options) as llm:
        worker, found = llm.engine.worker, []
        for step in padded_steps(worker, llm.engine.table, llm.engine.model.vocab_size):
            with torch.inference_mode():
                worker._inputs.fill(step, host=worker._programs.host_metadata[step.descriptor.kind])
                worker._programs.backbone(step.descriptor)
                rows = worker._programs.rows[: int(step.field("counts")[1])]
                found.append(worker._programs.logits(rows).float().cpu())
        return torch.cat(found)


@pytest.mark.gpu
@pytest.mark.slow
def test_no_level_or_mode_is_farther_from_float32_than_eager_steps(device, tmp_path):
    """sigma: the root mean square error of bfloat16 logits, as a ratio to that of eager steps of
    the same plan.

    Tracing alone changes no bit. Inductor keeps float32 between ops that it fuses, so it may be
    nearer.
    """
    import torch

    options = [
        {"compile_level": 1},
        {"compile_level": 2},
        {"compilation_config": {"level": 2, "road": "piecewise"}},
    ]
    if device == "cuda":
        options += [{"compile_level": 3, "cudagraph_mode": mode} for mode in MODES]
        options += [{"compilation_config": {"level": 3, "use_inductor": True}}]
        options += [{"compilation_config": {"level": 3, "road": "piecewise"}}]
    exact = step_logits(device, tmp_path, compile_level=0)
    want = step_logits(device, tmp_path, compile_level=0, dtype="bfloat16")
    sigma = float((want - exact).square().mean().sqrt())
    assert sigma > 1e-3
    for option in options:
        found = step_logits(device, tmp_path, dtype="bfloat16", **option)
        ratio = float((found - exact).square().mean().sqrt()) / sigma
        print(option, f"sigma {ratio:.4f}, equal {float((found == want).float().mean()):.4f}")
        assert ratio < 1.03, option
        assert option != {"compile_level": 1} or torch.equal(found, want)


@pytest.mark.gpu
def test_the_last_layer_drops_the_tokens_that_nothing_is_sampled_from(device, tmp_path):
    options = with_cache(device, tmp_path, {"compile_level": 0})
    with LLM("demo", **options) as llm:
        worker, dropped = llm.engine.worker, 0
        programs = worker._programs
        for step in padded_steps(worker, llm.engine.table, llm.engine.model.vocab_size):
            d = step.descriptor
            if not programs.drops_rows(d):
                continue
            worker.execute(step).result()
            made = programs.rows[: d.requests].clone()
            index = worker._inputs.fields(d)["sample_index"]
            wanted = programs.hidden(d)[index]
            real = slice(0, int(step.field("counts")[1]))
            assert float((made[real] - wanted[real]).norm() / wanted[real].norm()) < 1e-6
            dropped += 1
        assert dropped >= 1


@pytest.mark.gpu
def test_a_last_layer_of_its_own_kind_compiles_nothing_late(device, tmp_path):
    """The log-probabilities of a prompt need all tokens of the last layer, by code that the
    start has compiled.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 64, "dtype": "float32",
        "tie_word_embeddings": True,
        "use_sliding_window": True, "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {
        "compile_level": 1,
        "load_format": "dummy",
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
    }
    with LLM(str(tmp_path), **with_cache(device, tmp_path / "code", options)) as llm:
        llm.generate([[1, 2, 3] * 6], SamplingParams(max_tokens=2, prompt_logprobs=1))
        assert llm.engine.worker.compilations_after_ready() == 0
