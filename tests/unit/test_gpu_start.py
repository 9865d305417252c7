"""What the torch worker's start and step loop rest on: start plans, static inputs, plumbing,
shapes without data.
"""

import dataclasses
import json
import os
import threading
import warnings
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from twinfer.bucketing import Descriptor, Table
from twinfer.gpu import start_plan
from twinfer.gpu.backend import code_kept_in, key_factors
from twinfer.gpu.compilation import check_effect, compiled_kinds
from twinfer.gpu.fit import fit_mode
from twinfer.gpu.graphs import GraphRecorder
from twinfer.gpu.inputs import StepInputs
from twinfer.gpu.plans import make_plans
from twinfer.gpu.plumbing import plumbing, put_pages
from twinfer.ops import Plan, Plans
from twinfer.ops import resolve as resolve_plan
from twinfer.shared.cache_folder import fingerprint
from twinfer.shared.compilation_config import CUDAGraphMode, ResolvedCompilation
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError, InternalError
from twinfer.shared.models import stages
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.families import model_of
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.models.spec import Mlp
from twinfer.shared.page_groups import PageGroup
from twinfer.shared.step import (
    DecodeLoop,
    NewPages,
    NewTokens,
    StepInput,
    StepShape,
    batch_layout,
    histories_shape,
    processor_layout,
    sampling_layout,
)

MODEL = parse_config(SHAPES["qwen3-0.6b"])
GPU = DeviceInfo("cuda", "a GPU", 80 << 30)
CPU = DeviceInfo("cpu", "cpu", 1 << 34)
FREE = 60 << 30


def factors(free=FREE, device=GPU, plan="plan", model=MODEL, **options):
    config, _ = resolve(EngineConfig(model="m", backend="torch", **options), model, device)
    return start_plan.start_factors(model, config, plan, device, free)


def test_the_sources_of_a_start_plan_are_those_of_its_rooms(tmp_path):
    for room in (*start_plan.ROOMS, "tests"):
        (tmp_path / room / "inner").mkdir(parents=True)
        (tmp_path / room / "inner" / "part.py").write_text("x = 1")
    before = start_plan._sources(tmp_path)
    (tmp_path / "tests/inner/part.py").write_text("x = 2")
    assert start_plan._sources(tmp_path) == before
    for room in start_plan.ROOMS:
        (tmp_path / room / "inner" / "part.py").write_text("x = 2")
        now = start_plan._sources(tmp_path)
        assert now != before, room
        before = now


def test_a_start_plan_is_reused_only_if_everything_matches(tmp_path, monkeypatch):
    root = str(tmp_path)
    kept = start_plan.write_start_plan(root, factors(), 50 << 30)
    assert start_plan.read_start_plan(root, factors(), FREE) == 50 << 30
    assert start_plan.read_start_plan(root, factors(FREE + 1000), FREE) == 50 << 30, (
        "of the same class of memory"
    )
    others = {
        "free memory": factors(free=FREE - start_plan.CLASS),
        "device": factors(device=DeviceInfo("cuda", "a GPU", 40 << 30)),
        "plan": factors(plan="other"),
        "model": factors(model=dataclasses.replace(MODEL, num_layers=3)),
        "requests": factors(max_num_seqs=8),
        "utilization": factors(memory_utilization=0.5),
        "graphs": factors(compilation_config={"cudagraph_mode": "PIECEWISE"}),
        "sizes": factors(compilation_config={"cudagraph_capture_sizes": [1, 2]}),
    }
    monkeypatch.setattr(torch, "__version__", "0.0")
    others["versions"] = factors()
    monkeypatch.undo()
    monkeypatch.setattr(start_plan, "_sources", lambda package: "of another release")
    others["sources"] = factors()
    for name, changed in others.items():
        assert start_plan.read_start_plan(root, changed, FREE) is None, name
    monkeypatch.undo()
    assert start_plan.read_start_plan(root, factors(), 49 << 30) is None, "more than is free now"
    for wrong in (
        "{",
        "{}",
        '{"kv_bytes": "many"}',
        '{"kv_bytes": true}',
        '{"kv_bytes": -1}',
        "[]",
    ):
        kept.write_text(wrong)
        assert start_plan.read_start_plan(root, factors(), FREE) is None, wrong


def test_a_start_plan_that_others_may_write_is_refused(tmp_path):
    kept = start_plan.write_start_plan(str(tmp_path), factors(), 1 << 30)
    kept.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        start_plan.read_start_plan(str(tmp_path), factors(), FREE)


def test_a_default_folder_that_cannot_be_had_costs_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        assert start_plan.write_start_plan(None, factors(), 1 << 30) is None
        assert start_plan.read_start_plan(None, factors(), FREE) is None
    (warning,) = told
    assert str(warning.message).startswith("cache_dir: compiled code is not kept: [Errno")
    assert "\n" not in str(warning.message)
    named = str(tmp_path / "file" / "here")
    with pytest.raises(ConfigError, match=f"cache_dir: got {named}: "):
        start_plan.write_start_plan(named, factors(), 1 << 30)


TABLE = Table((1, 2, 8, 40), (16, 64), 40)
SHAPE = StepShape(pages_per_request=12, max_rows=40, max_model_len=48, vocab_size=100)
PAGE = 4


def random_step(d, rng, count, longest, loop=None, shape=SHAPE):
    layout, sampling = batch_layout(d, shape), sampling_layout(d.requests)
    batch = rng.integers(0, 99, layout.size, dtype=np.int32)
    f = layout.views(batch)
    f["counts"][:] = count, count
    f["rows"][:] = shape.max_rows
    f["rows"][:count] = rng.permutation(shape.max_rows)[:count]
    f["kv_lens"][:] = 0
    f["kv_lens"][:count] = rng.integers(1, longest + 1, count)
    rows = shape.num_groups * d.requests
    pages = rng.integers(0, 99, (rows, shape.pages_per_request), dtype=np.int32)
    settings = rng.integers(0, 99, sampling.size, dtype=np.int32)
    return StepInput(0, d, shape, "greedy", batch, settings, loop=loop, page_table=pages)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_static_inputs_hold_what_the_steps_say(device, captured):
    """Every field of every program, over steps of all kinds in turn, each with its page table."""
    where, rng = torch.device(device), np.random.default_rng(0)
    inputs = StepInputs(TABLE, SHAPE, (PageGroup(PAGE),), where)
    if captured:
        if device == "cpu":
            pytest.skip("nothing is captured on a CPU")
        recorder = GraphRecorder()
        with recorder.recording():
            inputs.capture(recorder)
    for _ in range(20):
        for d in TABLE:
            loop = (
                DecodeLoop(3, False, np.zeros((d.requests, 8), np.int32))
                if d.kind == "decode"
                else None
            )
            step = random_step(d, rng, int(rng.integers(1, d.requests + 1)), 40, loop)
            inputs.fill(step, host=True)
            fields = inputs.fields(d)
            for layout, buffer in (
                (batch_layout(d, SHAPE), step.batch),
                (sampling_layout(d.requests), step.sampling),
            ):
                for name, value in layout.views(buffer).items():
                    assert fields[name].cpu().numpy().tobytes() == value.tobytes(), (d, name)
            assert inputs.host_fields(d)["kv_lens"].tolist() == step.field("kv_lens").tolist()
            # Whatever lay there before: a sampler that reads histories may run on this step's fields.
            assert (fields["new_column"] == -1).all()
            put_pages(inputs.pages, fields["page_index"], fields["page_value"])
            for i in range(int(step.field("counts")[1])):
                used = -(-int(step.field("kv_lens")[i] + (2 if loop else 0)) // PAGE)
                row = inputs.pages[step.field("rows")[i]]
                assert row[:used].tolist() == step.field("page_table")[i, :used].tolist(), d


def differences(rng, shape, most):
    """Steps of new pages, more than fit into the fields of some programs, and the tables after
    each.
    """
    start, tables = 0, np.zeros((shape.max_rows + 1, shape.pages_per_request), np.int32)
    while True:
        count = int(rng.integers(0, most))
        rows, columns = np.divmod(
            rng.permutation(shape.max_rows * shape.pages_per_request)[:count], 12
        )
        pages = rng.integers(0, 99, count)
        tables[rows, columns] = pages
        entries = (x.astype(np.int32) for x in (rows, columns, pages))
        yield NewPages(start, *entries, np.zeros(0, np.int32)), tables.copy()
        start += count


def penalised_step(d, rng, rows, new_tokens):
    """A step with penalties whose requests are those of `rows`."""
    step = random_step(d, rng, len(rows), 40)
    batch_layout(d, SHAPE).view(step.batch, "rows")[: len(rows)] = rows
    layout = processor_layout(d.requests, SHAPE)
    processors = np.full(layout.fields["bias_ids"].offset, -1, np.int32)
    layout.view(processors, "history_row")[: len(rows)] = rows
    return dataclasses.replace(
        step, sampler="processed", processors=processors, new_tokens=new_tokens
    )


def test_histories_are_made_of_differences_and_a_lost_one_is_an_error():
    """One token a request comes with the step's fields, more of them beside; also as a whole."""
    inputs, rng = (
        StepInputs(TABLE, SHAPE, (PageGroup(PAGE),), torch.device("cpu")),
        np.random.default_rng(0),
    )
    inputs.histories[:] = 7  # of requests that have left
    d = Descriptor("decode", 8, 8, 1)
    histories, sent, start = {3: [1, 2, 3], 9: [4], 5: [5, 6]}, {3: 0, 9: 0, 5: 0}, 0
    last = torch.zeros(SHAPE.max_rows + 1, dtype=torch.int32)

    def run(step):
        inputs.fill(step)
        inputs.fill_processors(d.requests, step.sampler, step.processors)
        import_module(PLUMBING["torch"]).processors(
            inputs.processors(d.requests, step.sampler), last
        )
        for row in histories:
            want = histories[row] + [-1] * (SHAPE.max_model_len - len(histories[row]))
            assert inputs.histories[row].tolist() == want

    for number in range(12):
        rows = rng.permutation(list(histories)).tolist()
        for row in rows if number else []:
            count = int(rng.integers(0, 3 if number % 3 == 0 else 2))
            histories[row] += rng.integers(0, 99, count).tolist()
        if number == 8:
            histories[9], sent[9] = [8, 8], 0  # another request got the row
        firsts, ends = [sent[row] for row in rows], [len(histories[row]) for row in rows]
        indices = [i for i in range(len(rows)) if firsts[i] < ends[i]]
        tokens = [token for i in indices for token in histories[rows[i]][firsts[i] :]]
        columns = (np.array(x, np.int32)[indices] for x in (range(3), firsts, ends))
        new = NewTokens(start, *columns, np.array(tokens, np.int32))
        sent |= {row: len(histories[row]) for row in rows}
        run(penalised_step(d, rng, rows, new))
        start += len(new)
    nothing = np.zeros((4, 0), np.int32)
    with pytest.raises(InternalError, match="lost or came twice"):
        inputs.fill(penalised_step(d, rng, rows, NewTokens(start + 1, *nothing)))
    with pytest.raises(InternalError, match="neither new tokens nor histories"):
        inputs.fill(penalised_step(d, rng, rows, None))
    histories = {row: [row, row] for row in rows}
    whole = np.full((3, SHAPE.max_model_len), -1, np.int32)
    whole[:, :2] = np.array(rows)[:, None]
    run(dataclasses.replace(penalised_step(d, rng, rows, None), histories=whole))


def test_processors_that_steps_share_are_sent_once(monkeypatch):
    inputs, rng = (
        StepInputs(TABLE, SHAPE, (PageGroup(PAGE),), torch.device("cpu")),
        np.random.default_rng(0),
    )
    sent, send = [], inputs._pinned
    monkeypatch.setattr(inputs, "_pinned", lambda x: sent.append(len(x)) or send(x))
    layout = processor_layout(8, SHAPE)
    first, second = (rng.integers(0, 3, layout.size, dtype=np.int32) for _ in range(2))
    for given in (first, second):
        given.flags.writeable = False
    for given in (first, first, second, second, first, first.copy(), first):
        inputs.fill_processors(8, "processed", given)
        for name, values in layout.views(given).items():
            got = inputs.processors(8, "processed")[name]
            assert got.numpy().tobytes() == values.tobytes(), name
    assert len(sent) == 5


def test_page_tables_are_made_of_differences_and_a_lost_one_is_an_error():
    inputs, rng = (
        StepInputs(TABLE, SHAPE, (PageGroup(PAGE),), torch.device("cpu")),
        np.random.default_rng(0),
    )
    stream = differences(rng, SHAPE, 100)

    def fill(d, new):
        step = dataclasses.replace(random_step(d, rng, 1, 40), page_table=None, new_pages=new)
        inputs.fill(step)
        put_pages(inputs.pages, inputs.fields(d)["page_index"], inputs.fields(d)["page_value"])

    for _ in range(5):
        for d in TABLE:
            new, tables = next(stream)
            fill(d, new)
            assert np.array_equal(inputs.pages[:-1], tables[:-1]), d
    d = Descriptor("decode", 8, 8, 1)
    with pytest.raises(InternalError, match="lost or came twice"):
        fill(d, new)
    lost, _ = next(stream)
    while not len(lost):
        lost, _ = next(stream)
    with pytest.raises(InternalError, match="lost or came twice"):
        fill(d, next(stream)[0])
    fill(d, lost)
    # 0 entries came before: the tables of another scheduler
    fill(d, next(differences(rng, SHAPE, 100))[0])


@pytest.mark.gpu
def test_a_gpu_takes_the_kernels(device):
    kernels = find_spec("triton") is not None and device == "cuda"
    assert plumbing(torch.device(device)).__name__.endswith(
        ".step_kernels" if kernels else ".plumbing"
    )


PLUMBING = {"torch": "twinfer.gpu.plumbing", "triton": "twinfer.gpu.step_kernels"}


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "count"), [(8, 5), (200, 150)])
@pytest.mark.parametrize("page_sizes", [(PAGE,), (PAGE, 2 * PAGE, PAGE)])
@pytest.mark.parametrize("by", PLUMBING)
def test_plumbing_follows_its_contract(by, page_sizes, requests, count, device, request):
    """Gathers, tokens that are kept, and the inputs of the second step of a loop; 200 requests
    are several blocks.
    """
    if by == "triton":
        request.getfixturevalue("kernels")
    does = import_module(PLUMBING[by])
    where, rng = torch.device(device), np.random.default_rng(1)
    groups = [PageGroup(size) for size in page_sizes]
    shape = dataclasses.replace(SHAPE, max_rows=requests, num_groups=len(groups))
    d = Descriptor("decode", requests, requests, 1)
    inputs = StepInputs(Table((requests,), (16,), requests), shape, groups, where)
    step = random_step(d, rng, count, 30, shape=shape)
    step.field("token_ids")[:] = -1
    step.field("token_ids")[3] = 7
    step.field("positions")[count:] = 0
    step.field("positions")[:count] = step.field("kv_lens")[:count] - 1
    inputs.fill(step)
    f = inputs.fields(d)
    does.put_pages(inputs.pages, f["page_index"], f["page_value"])
    last = torch.arange(requests + 1, dtype=torch.int32, device=where) + 50
    cos = torch.arange(96.0, device=where).view(48, 2)
    ids, cosines, sines, table = does.select(
        f["token_ids"], f["positions"], f["rows"], last, cos, -cos, inputs.pages, len(groups)
    )
    rows = torch.from_numpy(step.field("rows")).long()
    assert ids.tolist() == [7 if i == 3 else 50 + int(row) for i, row in enumerate(rows)]
    assert cosines.tolist() == cos.cpu()[step.field("positions")].tolist()
    assert torch.equal(sines, -cosines)
    tables = inputs.pages.cpu().view(len(groups), requests + 1, -1)
    assert torch.equal(table.cpu(), tables[:, rows].reshape(table.shape))
    for i in range(count):
        used = -(-int(step.field("kv_lens")[i]) // PAGE)
        for line in range(i, len(table), requests):
            assert table[line, :used].tolist() == step.field("page_table")[line, :used].tolist()
    before = last.clone()
    sampled = torch.arange(requests, dtype=torch.int32, device=where) + 1000
    tokens = torch.zeros_like(sampled)
    does.keep(sampled, f["rows"], last, tokens)
    assert last[rows[:count].to(where)].tolist() == sampled[:count].tolist()
    others = sorted({*range(requests)} - {*rows.tolist()})
    assert last[others].tolist() == before[others].tolist()
    assert torch.equal(tokens, sampled)
    before = {name: value.clone() for name, value in f.items()}
    does.advance(f, inputs.pages, page_sizes)
    for name in ("positions", "kv_lens", "position"):
        assert (f[name] - before[name]).tolist() == [1] * count + [0] * (requests - count), name
    for i in range(count):
        place = int(step.field("positions")[i]) + 1
        for group, size in enumerate(page_sizes):
            page = int(tables[group, step.field("rows")[i], place // size])
            assert int(f["slots"][group * requests + i]) == page * size + place % size
    padding = f["slots"].view(len(groups), requests)[:, count:].reshape(-1)
    given = step.field("slots").reshape(len(groups), requests)[:, count:].reshape(-1)
    assert padding.tolist() == given.tolist()
    assert f["token_ids"].tolist() == [-1] * count + before["token_ids"][count:].tolist()
    for name in ("rows", "counts", "sample_rows"):
        assert torch.equal(f[name], before[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", ["processed", "masked"])
@pytest.mark.parametrize("by", PLUMBING)
def test_processors_follow_their_rows(by, sampler, device, request):
    """A request's entry of each table, or -1 throughout; the last token of those that have a
    history and a token that was not read back; and histories get what is new to them.
    """
    if by == "triton":
        request.getfixturevalue("kernels")
    requests, where, rng = 6, torch.device(device), np.random.default_rng(2)
    shape = dataclasses.replace(SHAPE, vocab_size=33_000)
    layout = processor_layout(requests, shape, sampler)
    buffer = rng.integers(-9, 9, layout.size).astype(np.int32)
    rows = {"history_row": [1, -1, 0, -1, 2, -1], "bias_row": [-1, 0, -1, 2, 1, -1],
            "mask_row": [2, -1, -1, 0, -1, 1], "pending": [1, 1, 0, 0, 1, 0],
            "rows": [3, 0, 5, 1, 2, 4]}  # fmt: skip
    new_column, new_token = [2, 2, -1, -1, 47, 3], [60, 61, 62, 63, 64, 65]
    for name, values in rows.items():
        layout.view(buffer, name)[:] = values
    fields = layout.unpack(
        torch.from_numpy(buffer).to(where), lambda bits: bits.view(torch.float32)
    )
    size = histories_shape(shape, (sampler,))
    histories = torch.full(size, -1, dtype=torch.int32, device=where)
    fields |= {
        "histories": histories,
        "new_column": torch.tensor(new_column, dtype=torch.int32, device=where),
        "new_token": torch.tensor(new_token, dtype=torch.int32, device=where),
    }
    longer = histories.cpu().clone()
    if sampler == "processed":
        longer[1, 2], longer[2, 47] = 60, 64
    last = torch.arange(7, dtype=torch.int32, device=where) + 50
    got = import_module(PLUMBING[by]).processors(fields, last)
    assert got["last"].tolist() == [53, -1, -1, -1, 52, -1]
    for name, (table, of) in {
        "bias_ids": ("bias_ids", "bias_row"), "bias": ("bias", "bias_row"),
        "mask": ("masks", "mask_row"),
    }.items():  # fmt: skip
        given = layout.view(buffer, table)
        nothing = np.full_like(given[0], -1)
        want = [given[row] if row >= 0 else nothing for row in rows[of]]
        assert np.array_equal(got[name].cpu().numpy(), np.array(want)), name
    assert got["history"] is histories
    assert torch.equal(histories[:-1].cpu(), longer[:-1])
    for name in ("prompt_len", "presence", "frequency", "repetition", "history_row"):
        assert got[name] is fields[name]


def as_kernels(plans, but=()):
    """Plans whose implementations are all kernels, but for some ops, in kinds of programs by
    name.
    """

    def as_kernel(choice):
        return dataclasses.replace(
            choice, implementation=dataclasses.replace(choice.implementation, opaque=True)
        )

    def changed(kind, plan):
        native = dict(but).get(kind)
        choices = {
            name: choice if name == native else as_kernel(choice)
            for name, choice in plan.choices.items()
        }
        return Plan(plan.framework, choices)

    layers = {
        kind: {
            spec: dataclasses.replace(layer, plan=changed(kind, layer.plan))
            for spec, layer in of_kind.items()
        }
        for kind, of_kind in plans.layers.items()
    }
    return Plans({kind: changed(kind, plan) for kind, plan in plans.by_kind.items()}, layers)


def test_only_layers_made_of_kernels_stay_uncompiled():
    config, _ = resolve(EngineConfig(model="m", backend="torch"), MODEL, GPU)
    native = EngineConfig(model="m", backend="torch", enable_ops=("none",))
    plans = make_plans(MODEL, resolve(native, MODEL, CPU)[0])
    (layer,) = plans.layers["decode"].values()
    assert layer.called == {
        "fused_add_rms_norm",
        "linear",
        "norm_rope_write_kv",
        "paged_attention",
        "gated_mlp",
    }
    mostly, spec = as_kernels(plans, {"mixed": "silu_and_mul"}), model_of(MODEL)
    assert config.compilation.skip_kernels
    assert compiled_kinds(spec, as_kernels(plans), config.compilation) == frozenset()
    assert compiled_kinds(spec, mostly, config.compilation) == {"mixed"}
    forced = dataclasses.replace(config.compilation, skip_kernels=False)
    assert compiled_kinds(spec, mostly, forced) == {"decode", "mixed"}
    assert compiled_kinds(spec, mostly, dataclasses.replace(forced, level=0)) == frozenset()


def test_a_helper_inside_of_a_stage_changes_nothing_that_is_compiled(monkeypatch):
    """Which ops a layer calls is recorded, so how its code is cut into functions cannot matter."""
    gpu, _ = resolve(EngineConfig(model="m", backend="torch"), MODEL, GPU)
    natives = EngineConfig(model="m", backend="torch", enable_ops=("none",))
    cpu, _ = resolve(natives, MODEL, CPU)
    native = {"decode": "silu_and_mul", "mixed": "silu_and_mul"}

    def compiled():
        plans = make_plans(MODEL, cpu)
        called = [layer.called for layer in plans.layers["decode"].values()]
        return called, compiled_kinds(model_of(MODEL), as_kernels(plans, native), gpu.compilation)

    def stage(*arguments):
        return feed_forward(*arguments)

    def feed_forward(ops, spec, weights, x, cache, batch):
        return getattr(ops, "_".join(["gated", "mlp"]))(
            x, weights["gate_up"], None, weights["down"], None
        ), cache

    before = compiled()
    assert before[1] == {"decode", "mixed"}
    monkeypatch.setattr(stages, "STAGES", {**stages.STAGES, Mlp: stage})
    assert compiled() == before


PLAN_LEAVES_NO_EFFECT = {
    "compile_sizes": (
        [1, 8],
        r"compile_sizes: got \(1, 8\), allowed is none: .* no layer is compiled",
    ),
    "compile_ranges": (
        [[2, 4]],
        r"compile_ranges: got \(\(2, 4\),\), allowed is none: .* no layer is compiled",
    ),
    "splitting_ops": (
        ["paged_attention"],
        "splitting_ops: got .*, allowed is none: cudagraph_mode is FULL",
    ),
}


@pytest.mark.parametrize("name", PLAN_LEAVES_NO_EFFECT)
def test_options_that_the_plan_leaves_without_effect_are_refused(name):
    """Sizes have one only where layers are compiled, splitting only where graphs are pieces."""
    value, message = PLAN_LEAVES_NO_EFFECT[name]
    config, filled = resolve(
        EngineConfig(model="m", backend="torch", compilation_config={name: value}), MODEL, GPU
    )
    assert name not in {change.field for change in filled}
    with pytest.raises(ConfigError, match=message):
        check_effect(config.compilation, frozenset())
    in_pieces = dataclasses.replace(
        config.compilation, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    check_effect(in_pieces, frozenset({"mixed"}))


def test_defaults_are_refused_by_no_plan():
    default, filled = resolve(EngineConfig(model="m", backend="torch"), MODEL, GPU)
    check_effect(default.compilation, frozenset())
    assert "compile_sizes" not in {change.field for change in filled}


def with_attention(reads_host):
    """A native plan whose attention, of which a model has one kind, reads lengths on the host, or
    not.
    """
    native = resolve_plan("torch", enable=("none",))
    choice = native["paged_attention"]
    made = dataclasses.replace(choice.implementation, host_metadata=reads_host)
    choices = native.choices | {"paged_attention": dataclasses.replace(choice, implementation=made)}
    del choices["latent_attention"]
    return dataclasses.replace(native, choices=choices)


def test_the_default_graph_mode_gives_way_to_attention_that_reads_the_host():
    config, _ = resolve(EngineConfig(model="m", backend="torch"), MODEL, GPU)
    whole, reads = with_attention(False), with_attention(True)
    assert config.compilation.cudagraph_mode.name == "FULL"
    fitted = [
        fit_mode(config.compilation, Plans({"decode": decode, "mixed": mixed}))
        for decode, mixed in ((whole, whole), (whole, reads), (reads, whole), (reads, reads))
    ]
    modes = [compilation.cudagraph_mode.name for compilation, _ in fitted]
    assert modes == ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE", "PIECEWISE"]
    told = [[change.after for change in changes] for _, changes in fitted]
    assert told == [[], ["FULL_AND_PIECEWISE"], ["PIECEWISE"], ["PIECEWISE"]]
    given = dataclasses.replace(config.compilation, mode_given=True)
    with pytest.raises(ConfigError, match=r"in mixed steps.*reads lengths on the host"):
        fit_mode(given, Plans({"decode": whole, "mixed": reads}))


CHANGES_THE_CODE = {
    "level": 1,
    "road": "piecewise",
    "ops": "wrapped",
    "splitting_ops": ("linear",),
    "compile_sizes": (1, 2),
    "compile_ranges": ((2, 8),),
    "use_inductor": False,
    "skip_kernels": True,
    "inductor_compile_config": {"epilogue_fusion": False},
}
LEAVES_THE_CODE = {
    "cudagraph_mode": CUDAGraphMode.FULL,
    "mode_given": True,
    "splitting_given": True,
    "cudagraph_capture_sizes": (1, 2),
    "cudagraph_mixed_limit": 16,
    "debug_dump_path": "dump",
    "cache_dir": "cache",
}


def test_code_is_kept_under_all_that_it_depends_on():
    """Every option of compilation is named here: a new one has to say whether it changes what is
    generated.
    """
    base = ResolvedCompilation(level=2, use_inductor=True)
    assert {f.name for f in dataclasses.fields(base)} == {*CHANGES_THE_CODE, *LEAVES_THE_CODE}

    def key(plan="plan", model=None, **changes):
        return fingerprint(
            key_factors(plan, dataclasses.replace(base, **changes), model or {"layers": 2})
        )

    others = [key(**{name: value}) for name, value in CHANGES_THE_CODE.items()]
    others += [key(plan="another"), key(model={"layers": 3})]
    assert len({key(), *others}) == 1 + len(others)
    for name, value in LEAVES_THE_CODE.items():
        assert key(**{name: value}) == key(), name


def test_factors_are_written_beside_the_plan(tmp_path):
    kept = start_plan.write_start_plan(str(tmp_path), factors(), 1 << 30)
    stored = json.loads((kept.parent / "factors.json").read_text())
    assert stored["config"]["max_num_seqs"] == 256
    assert stored["memory"]["total"] == GPU.memory


def test_engines_that_start_in_threads_keep_code_in_their_own_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    inside, seen = threading.Event(), []

    def start(name, before, after):
        before()
        with code_kept_in(tmp_path / name):
            after()
            seen.append(os.environ["TRITON_CACHE_DIR"])

    second = threading.Thread(target=start, args=("second", inside.wait, lambda: None))
    second.start()

    def meet():
        inside.set()
        second.join(0.2)

    start("first", lambda: None, meet)
    second.join()
    assert seen == [str(tmp_path / name / "triton") for name in ("first", "second")]
    assert "TRITON_CACHE_DIR" not in os.environ
