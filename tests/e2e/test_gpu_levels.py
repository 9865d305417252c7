"""The torch worker's compile levels and CUDA graph modes: the same tokens, the same bits, nothing compiled late."""

import dataclasses
import json

import numpy as np
import pytest

from twinfer.serving.llm import LLM
from twinfer.shared.errors import ConfigError
from twinfer.shared.sampling_params import SamplingParams

PROMPTS = ["Once upon a time", "The cat sat on the mat and then", "A"]
SMALL = dict(backend="torch", dtype="float32", max_num_seqs=2, max_num_batched_tokens=32, num_pages=64)
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def tokens(device, folder, **options):
    """Greedy tokens and drawn ones, of an engine that compiles nothing after ready."""
    options = {"compilation_config": {"cache_dir": str(folder)}} | SMALL | {"device": device} | options
    with LLM("demo", **options) as llm:
        greedy = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12))
        drawn = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_k=9, seed=5, max_tokens=12))
        assert llm.engine.worker.compilations_after_ready() == 0
        return [output.outputs[0].token_ids for output in (*greedy, *drawn)]


@pytest.fixture(scope="module")
def eager(device, tmp_path_factory):
    return tokens(device, tmp_path_factory.mktemp("code"), compile_level=0)


def test_traced_layers_give_the_tokens_of_eager_ones(device, eager, tmp_path):
    assert tokens(device, tmp_path, compile_level=1) == eager


@pytest.mark.slow
@pytest.mark.parametrize("use_inductor", [False, True])
def test_the_piecewise_road_gives_the_tokens_of_eager_steps(device, eager, use_inductor, tmp_path):
    """On a GPU with the graphs of level 3, each step captured around all its pieces or at its attention."""
    config = {"level": 3, "road": "piecewise", "use_inductor": use_inductor, "cache_dir": str(tmp_path)}
    assert tokens(device, tmp_path, compilation_config=config) == eager


@pytest.mark.slow
def test_compiled_layers_give_the_tokens_of_eager_ones(device, eager, tmp_path):
    dump = tmp_path / "dump"
    config = {"cache_dir": str(tmp_path / "code"), "debug_dump_path": str(dump)}
    assert tokens(device, tmp_path, compile_level=2, compilation_config=config) == eager
    assert list(dump.glob("layer_*.graph.py"))
    assert list(dump.glob("layer_*.generated_0.py"))
    (kept,) = (tmp_path / "code").iterdir()
    assert {"plan", "versions", "device"} <= set(json.loads((kept / "factors.json").read_text()))


@pytest.mark.parametrize("mode", MODES)
def test_graph_modes_give_the_tokens_of_eager_steps(device, eager, mode, tmp_path):
    if device != "cuda":
        pytest.skip("CUDA graphs need a cuda device")
    assert tokens(device, tmp_path, compile_level=3, cudagraph_mode=mode) == eager


def test_graphs_are_refused_on_a_cpu_with_the_reason(device):
    if device != "cpu":
        pytest.skip("this device has graphs")
    with pytest.raises(ConfigError, match="needs a cuda device"):
        LLM("demo", cudagraph_mode="FULL", **SMALL)


def test_attention_that_reads_the_host_cannot_be_captured_whole(device):
    if device != "cuda":
        pytest.skip("CUDA graphs need a cuda device")
    with pytest.raises(ConfigError, match="reads lengths on the host"):
        LLM("demo", cudagraph_mode="FULL", enable_ops=("all", "-paged_attention"), device=device, **SMALL)


def padded_steps(worker, table, vocab):
    """A step of each program with real requests that write and read pages."""
    from twinfer.shared.step import batch_layout

    for number, d in enumerate(table):
        step = worker._padding(d)
        layout = batch_layout(d, worker._shape)
        batch = step.batch.copy()
        f = layout.views(batch)
        count = d.requests if d.kind == "decode" else 1
        length = 1 if d.kind == "decode" else d.tokens
        f["token_ids"][: count * length] = (np.arange(count * length) * 7 + number) % vocab
        f["positions"][: count * length] = np.tile(np.arange(length), count)
        pages = -(-length // 16)
        f["page_table"][:count, :pages] = 1 + np.arange(count * pages).reshape(count, pages)
        f["slots"][: count * length] = np.concatenate([(1 + i * pages) * 16 + np.arange(length) for i in range(count)])
        f["query_start"][: count + 1] = np.arange(count + 1) * length
        f["query_start"][count + 1 :] = count * length
        f["kv_lens"][:count] = length
        f["rows"][:count] = np.arange(count)
        f["counts"][:] = count if length == 1 else 0, count
        f["sample_index"][:count] = (np.arange(count) + 1) * length - 1
        yield dataclasses.replace(step, batch=batch)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL", "PIECEWISE"])
def test_interleaved_graphs_equal_eager_bit_for_bit(device, mode, tmp_path):
    """Replays of all sizes in several orders; free memory outside of the graphs' pool is overwritten in between."""
    if device != "cuda":
        pytest.skip("CUDA graphs need a cuda device")
    import torch

    config = {"cache_dir": str(tmp_path)}
    with LLM("demo", device=device, compile_level=3, cudagraph_mode=mode, compilation_config=config, **SMALL) as llm:
        worker = llm.engine.worker
        programs, steps = worker._programs, list(padded_steps(worker, llm.engine.table, llm.engine.model.vocab_size))

        def rows(step, captured):
            with torch.inference_mode():
                worker._inputs.fill(step)
                (programs.backbone if captured else programs._rows)(step.descriptor)
                torch.cuda.synchronize()
                found = programs.rows[: int(step.field("counts")[1])].clone()
                poison = [torch.full((1 << 18,), -1, dtype=torch.int32, device="cuda") for _ in range(16)]
                torch.cuda.synchronize()
                del poison
            return found

        assert any(step.descriptor in programs._backbones for step in steps)
        want = [rows(step, captured=False) for step in steps]
        for order in (range(len(steps)), reversed(range(len(steps))), [0, len(steps) - 1] * 3):
            for index in order:
                assert torch.equal(rows(steps[index], captured=True), want[index]), steps[index].descriptor
        assert not any(torch.equal(want[0][:1], other[:1]) for other in want[1:])
