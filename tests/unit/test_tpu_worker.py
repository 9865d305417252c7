"""The parts of the JAX worker that need no engine: placement, platforms, stored executables,
reading HLO.
"""

import json
import os
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from twinfer.bucketing import Descriptor
from twinfer.shared import step_difference
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import BackendUnavailable, ConfigError, InternalError
from twinfer.shared.models import decoder, placement
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.progress import silent
from twinfer.shared.request_table import padding_column
from twinfer.shared.step import (
    STOP_SLOTS,
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
from twinfer.tpu import compilation, executables, ladder, platforms, programs, sharding, state
from twinfer.tpu.aot_report import collectives
from twinfer.tpu.compile_options import flags_for
from twinfer.tpu.ladder import Job
from twinfer.tpu.plans import make_plans
from twinfer.xla import programs as xla_programs

LLAMA = parse_config(SHAPES["llama3-8b"])


def test_more_shards_than_devices_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size: got 64"):
        sharding.make_mesh(jax.devices("cpu"), 64)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": True},
        {"decode_sizes": (8, 8)},
        {"decode_sizes": "8"},
        {"mixed_sizes": ()},
        {"aot_folder": ""},
        {"compilation_cache_dir": 3},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        EngineConfig(model="demo", **options)


def test_libtpu_is_left_out_where_no_chip_is_seen(tmp_path, monkeypatch):
    chosen = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: chosen.append((name, value)))
    monkeypatch.setattr(type(jax.config), "jax_platforms", None, raising=False)
    monkeypatch.setattr(platforms, "find_spec", lambda name: True if name == "libtpu" else None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "vendor").write_text("0x8086\n")
    platforms.leave_out_libtpu(tmp_path)
    assert chosen == [("jax_platforms", "cpu")]
    (tmp_path / "a" / "vendor").write_text("0x1ae0\n")
    (tmp_path / "a" / "device").write_text("0x006f\n")
    platforms.leave_out_libtpu(tmp_path)
    assert len(chosen) == 1


def test_a_tpu_that_does_not_start_is_no_cpu(monkeypatch):
    """JAX itself would take the CPU without a word."""
    monkeypatch.setattr(platforms, "has_tpu", lambda *_: True)
    monkeypatch.setattr(type(jax.config), "jax_platforms", None, raising=False)
    monkeypatch.setattr(platforms, "deepen_fibers", lambda: None)

    def start(kind):
        if kind == "tpu":
            raise RuntimeError("the TPU is in use by process 7")
        return [SimpleNamespace(platform=kind or "cpu", process_index=0)]

    monkeypatch.setattr(jax, "devices", start)
    with pytest.raises(BackendUnavailable, match=r"no tpu device here .*process 7.*--device cpu"):
        platforms.devices("auto")
    assert platforms.devices("cpu")[0].platform == "cpu"
    monkeypatch.setattr(type(jax.config), "jax_platforms", "cpu", raising=False)
    assert platforms.devices("auto")[0].platform == "cpu", "somebody has chosen"


def test_a_cpu_is_found_beside_a_tpu_that_does_not_start(monkeypatch):
    """Where JAX sees a TPU it chooses platforms when it is imported, and then gives no device of
    any kind unless the TPU starts.
    """
    monkeypatch.setattr(platforms, "has_tpu", lambda *_: True)
    monkeypatch.setattr(platforms, "deepen_fibers", lambda: None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(platforms, "_failure", "")
    chosen = SimpleNamespace(jax_platforms="tpu,cpu")
    chosen.update = lambda name, value: setattr(chosen, name, value)
    monkeypatch.setattr(jax, "config", chosen)

    def start(kind):
        if "tpu" in chosen.jax_platforms:
            raise RuntimeError("Unable to initialize backend 'tpu': in use by process 7")
        return [SimpleNamespace(platform=kind, process_index=0)]

    monkeypatch.setattr(jax, "devices", start)
    with pytest.raises(BackendUnavailable, match=r"no tpu device here .*process 7.*--device cpu"):
        platforms.devices("auto")
    assert platforms.devices("cpu")[0].platform == "cpu"
    # That was for who named it: who does not is told still.
    with pytest.raises(BackendUnavailable, match=r"no tpu device here .*process 7.*--device cpu"):
        platforms.devices("auto")
    chosen.jax_platforms = "tpu,cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    with pytest.raises(BackendUnavailable, match="no cpu device here"):
        platforms.devices("cpu")


def test_the_stacks_of_libtpus_fibers(monkeypatch):
    """Set beside what the user gives, for the release that is known to need it: another may not
    know the flag.
    """
    monkeypatch.setattr(platforms, "find_spec", lambda name: True)
    monkeypatch.setattr(platforms, "version", lambda name: "0.0.42.1")
    for given, wanted in {
        "": "--fibers_default_thread_stack_size=1048576",
        "--other=1": "--other=1 --fibers_default_thread_stack_size=1048576",
        "--fibers_default_thread_stack_size=5": "--fibers_default_thread_stack_size=5",
    }.items():
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
        platforms.deepen_fibers()
        assert os.environ["LIBTPU_INIT_ARGS"] == wanted
    monkeypatch.setattr(platforms, "version", lambda name: "0.0.43")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    platforms.deepen_fibers()
    assert os.environ["LIBTPU_INIT_ARGS"] == ""


@pytest.mark.parametrize(
    "name", ["v6e", "v7x:2x2", "v6e:2x", "v6e:2x2x1", "v5p:2x2", "v6e:0x2", "cpu:1x1"]
)
def test_topologies_are_checked(name):
    with pytest.raises(ConfigError, match="topology"):
        platforms.topology(name)


def test_collectives_are_counted_inside_and_outside_of_loops():
    text = """HloModule m
%body (p: f32[4]) -> f32[4] {
  %a = f32[4] all-reduce(%p), replica_groups={}
  %b = (f32[4], f32[4]) all-reduce-start(%p), replica_groups={}
  %c = f32[4] all-reduce-done(%b)
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %d = f32[8] all-gather(%p), dimensions={0}
}
"""
    inside, outside = collectives(text)
    assert inside == {"all-reduce": 2}
    assert outside == {"all-gather": 1}


def test_one_thread_lowers_at_a_time(monkeypatch):
    """Jaxlib's bindings fail now and then where several do."""
    mesh = sharding.make_mesh(jax.devices("cpu"), 1)
    where = sharding.on(mesh)
    lowering, together = threading.Lock(), []

    def traced(x):
        alone = lowering.acquire(blocking=False)
        time.sleep(0.02)  # another thread may begin
        together.append(not alone)
        if alone:
            lowering.release()
        return x + 1

    number = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=where)
    jobs = {i: Job(f"job{i}", lambda x, i=i: traced(x) * i, (), (number,), where) for i in range(4)}
    monkeypatch.setattr(compilation, "workers", lambda: 4)
    built = list(compilation.compile_all(jobs, mesh, "test", silent))
    assert len(built) == 4
    assert together == [False] * 4


@pytest.fixture
def stored(tmp_path):
    """(folder, job, devices) of one stored program."""
    mesh = sharding.make_mesh(jax.devices("cpu"), 1)
    where = sharding.on(mesh)
    job = Job(
        "double",
        lambda x: x * 2,
        (),
        (jax.ShapeDtypeStruct((4,), jnp.float32, sharding=where),),
        where,
    )
    program, report = compilation.compile_one(job, mesh, "test")
    assert report.seconds > 0
    writer = executables.Writer(str(tmp_path / "aot"), {"plan_hash": "x", "sides": (1, 2)})
    writer.add("double", program.compiled)
    return writer.finish(), job, list(mesh.devices.flat)


def test_a_stored_program_runs(stored):
    folder, job, devices = stored
    reader = executables.Reader(folder)
    assert reader.differences({"plan_hash": "x", "sides": (1, 2)}) == []
    assert reader.differences({"plan_hash": "y", "sides": (1, 2)}) == [
        'plan_hash (of op_priority, enable_ops, row_invariant): "x" there, "y" here'
    ]
    reader.check({"plan_hash": "x", "sides": (1, 2)}, ["double"])
    with pytest.raises(ConfigError, match=r"sides: \[1, 2\] there, null here"):
        reader.check({"plan_hash": "x"}, [])
    argument = jax.device_put(np.arange(4, dtype=np.float32), job.arguments[0].sharding)
    assert reader.load(job, devices)(argument).tolist() == [0, 2, 4, 6]


def test_a_file_that_the_manifest_does_not_name_is_never_read(stored, monkeypatch):
    folder, job, devices = stored
    monkeypatch.setattr(
        executables.serialize_executable,
        "deserialize_and_load",
        lambda *a, **k: pytest.fail("read"),
    )
    path = os.path.join(folder, "double.bin")
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match="not the file that the manifest names"):
        executables.Reader(folder).load(job, devices)
    with pytest.raises(ConfigError, match="no program triple"):
        executables.Reader(folder).load(replace(job, name="triple"), devices)
    manifest = os.path.join(folder, "manifest.json")
    with open(manifest, "w") as file:
        json.dump([], file)
    with pytest.raises(ConfigError, match="manifest"):
        executables.Reader(folder)


@pytest.mark.parametrize("what", ["", "manifest.json", "double.bin"])
def test_what_others_can_write_is_never_read(stored, what):
    folder, job, devices = stored
    path = os.path.join(folder, what)
    os.chmod(path, os.stat(path).st_mode | 0o002)
    with pytest.raises(ConfigError, match="writable by no other"):
        executables.Reader(folder).load(job, devices)


SHAPE = StepShape(pages_per_request=32, max_rows=12, max_model_len=512, vocab_size=50)
PAGE = 16


class Tables:
    """What page tables and parameters of all rows should hold, and random steps that change
    them.
    """

    def __init__(self, seed):
        self.rng, self.start = np.random.default_rng(seed), 0
        self.pages = np.zeros((SHAPE.max_rows, 32), np.int32)
        self.num_pages = np.zeros(SHAPE.max_rows, int)
        self.parameters = np.zeros((len(step_difference.PARAMETERS), SHAPE.max_rows), np.int32)

    def step(self, size, loop, whole):
        """A step of some rows, each new with 30 % of chances, or with some pages more; `whole`:
        with its page table.
        """
        rng, descriptor = self.rng, Descriptor("decode", size, size, 1)
        rows, entries = rng.permutation(SHAPE.max_rows)[: int(rng.integers(1, size + 1))], []
        tenants = []
        for row in rows.tolist():
            if self.num_pages[row] in (0, 32) or rng.random() < 0.3:
                self.num_pages[row] = 0
                tenants.append(row)
                self.parameters[:, row] = rng.integers(0, 999, len(step_difference.PARAMETERS))
            first = self.num_pages[row]
            self.num_pages[row] = last = int(rng.integers(first + 1, 33))
            self.pages[row, first:last] = rng.integers(1, 999, last - first)
            entries += [(row, column, self.pages[row, column]) for column in range(first, last)]
        count = len(rows)
        batch, sampling = (
            batch_layout(descriptor, SHAPE).allocate(),
            sampling_layout(size).allocate(),
        )
        f = batch_layout(descriptor, SHAPE).views(batch)
        f["rows"][:] = SHAPE.max_rows
        f["rows"][:count], f["counts"][:] = rows, (0, count)
        f["kv_lens"][:count] = self.num_pages[rows] * PAGE - (loop.steps if loop else 0)
        settings = sampling.reshape(-1, size)
        settings[:] = padding_column(SHAPE.max_rows)[:, None]
        settings[: len(step_difference.MOVING)] = rng.integers(
            0, 9, (len(step_difference.MOVING), size)
        )
        settings[len(step_difference.MOVING) :, :count] = self.parameters[:, rows]
        step = StepInput(1, descriptor, SHAPE, "greedy", batch, sampling, loop=loop)
        if whole:
            pages = np.zeros((size, 32), np.int32)
            pages[:count] = self.pages[rows]
            return replace(step, page_table=pages)
        new = NewPages(self.start, *np.array(entries, np.int32).T, np.array(tenants, np.int32))
        self.start += len(new)
        return replace(step, new_pages=new)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_tables_on_the_devices_hold_what_a_step_says(seed, whole):
    """Also when it is too much for the buffer of a step: each row that is new brings up to 32
    pages.
    """
    tables, buffers, spills = Tables(seed), step_difference.StepBuffers(SHAPE), 0
    on_device = state.State(*map(jnp.asarray, state.initial_state(SHAPE)))
    update, updated = jax.jit(state.update), jax.jit(state.updated)
    for _ in range(6):
        size = int(tables.rng.choice([4, 12]))
        loop = (
            DecodeLoop(5, True, np.full((size, STOP_SLOTS), 3))
            if tables.rng.random() < 0.3
            else None
        )
        step = tables.step(size, loop, whole)
        spilled, buffer = buffers.pack(step)
        spills += len(spilled)
        for part in spilled:
            on_device = update(on_device, jnp.asarray(part))
        layout = step_difference.diff_layout(step.descriptor, SHAPE, loop is not None)
        on_device = updated(on_device, layout.unpack(buffer, lambda x: x))
        for row in step.field("rows")[: int(step.field("counts")[1])].tolist():
            used = tables.num_pages[row]
            assert np.array_equal(on_device.pages[row, :used], tables.pages[row, :used])
        parameters = np.asarray(on_device.parameters)[:, step.field("rows")]
        assert np.array_equal(
            parameters, step.sampling.reshape(-1, size)[len(step_difference.MOVING) :]
        )
        if loop is not None:
            assert layout.view(buffer, "limits").tolist() == [5, 1]
    assert spills


def test_a_step_that_was_lost_or_comes_twice_is_an_error():
    tables, buffers = Tables(0), step_difference.StepBuffers(SHAPE)
    first, second, third = (tables.step(4, None, False) for _ in range(3))
    buffers.pack(first)
    with pytest.raises(InternalError, match=f"{len(first.new_pages)} came: a step was lost"):
        buffers.pack(third)
    buffers.pack(second)
    with pytest.raises(InternalError, match="lost or came twice"):
        buffers.pack(second)
    buffers.pack(third)
    # 0 entries came before: the tables of another scheduler
    buffers.pack(Tables(1).step(4, None, False))


class Histories:
    """Histories of rows that grow at random, as steps bring them."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.tokens = [[] for _ in range(SHAPE.max_rows)]
        self.start = 0

    def step(self, size):
        rng, count = self.rng, int(self.rng.integers(1, size + 1))
        rows = rng.permutation(SHAPE.max_rows)[:count]
        columns, tokens = [], []
        for index, row in enumerate(rows.tolist()):
            if len(self.tokens[row]) > 40 or rng.random() < 0.2:
                self.tokens[row] = []  # another request has the row
            first = len(self.tokens[row])
            more = int(rng.choice([0, 1, 1, 1, 5])) if first else int(rng.integers(1, 9))
            self.tokens[row] += rng.integers(0, 99, more).tolist()
            if more:
                columns.append((index, first, first + more))
                tokens += self.tokens[row][first:]
        parts = np.array(columns, np.int32).reshape(-1, 3).T
        new = NewTokens(self.start, *parts, np.array(tokens, np.int32))
        self.start += len(new)
        descriptor = Descriptor("decode", size, size, 1)
        batch, layout = batch_layout(descriptor, SHAPE), processor_layout(size, SHAPE)
        step = StepInput(
            1, descriptor, SHAPE, "processed", batch.allocate(), sampling_layout(size).allocate(),
            np.full(layout.fields["bias_ids"].offset, -1, np.int32), new_tokens=new,
        )  # fmt: skip
        batch.view(step.batch, "rows")[:count] = rows
        layout.view(step.processors, "history_row")[:count] = rows
        return step


@pytest.mark.parametrize("backend", ["jax", "xla"])
def test_the_histories_on_the_devices_hold_what_steps_say(backend):
    """Also those of requests that got several tokens or are new; in rows that others have left."""
    histories, buffers, spans = Histories(0), step_difference.SamplerBuffers(SHAPE), 0
    functions, as_array = programs, jnp.asarray
    if backend == "xla":
        functions, as_array = xla_programs, torch.from_numpy
    remember = partial(functions.remember, SHAPE, *[None] * (backend == "xla"))
    on_device = as_array(np.full(histories_shape(SHAPE), 7, np.int32))
    for _ in range(30):
        step = histories.step(int(histories.rng.choice([3, 4, 12])))
        processors = buffers.processors(step, step.processors)
        size = step_difference.sampler_size(step.descriptor.requests, SHAPE.max_rows)
        rows = processor_layout(size, SHAPE).view(processors, "history_row")
        beside, new_tokens = buffers.histories(step)
        for part in beside:
            on_device = remember(on_device, as_array(part))
        spans += len(beside)
        on_device = functions.longer(on_device, as_array(rows), as_array(new_tokens))
        for row in rows[rows >= 0].tolist():
            tokens = histories.tokens[row]
            unused = [-1] * (SHAPE.max_model_len - len(tokens))
            assert np.asarray(on_device)[row].tolist() == tokens + unused
    assert spans
    histories.step(4)
    with pytest.raises(InternalError, match="lost or came twice"):
        buffers.histories(histories.step(4))


def test_processors_that_steps_share_are_widened_once():
    buffers, step = step_difference.SamplerBuffers(SHAPE), Histories(0).step(3)
    again = buffers.processors(step, step.processors)
    assert buffers.processors(step, step.processors) is not again, "who could write to it?"
    step.processors.flags.writeable = False
    wider = buffers.processors(step, step.processors)
    assert buffers.processors(step, step.processors) is wider
    assert np.array_equal(wider, again)


def test_a_steady_decode_sends_no_table():
    """The point of it: the buffer of 256 requests of up to 4096 tokens is a twentieth of their
    page table.
    """
    shape = StepShape(256, 256, 4096, 1000)
    descriptor = Descriptor("decode", 256, 256, 1)
    assert step_difference.diff_layout(descriptor, shape).size * 20 < 256 * shape.pages_per_request


def test_the_ladder_of_decode_programs_by_platform():
    """A GPU's programs have their layers unrolled and take seconds each: few of them, but one
    for a single request.
    """
    config, bytes_ = (
        EngineConfig(model="demo", backend="jax", max_num_seqs=24, max_num_batched_tokens=64),
        1 << 34,
    )
    for platform, sizes in (("cuda", (1, 2, 4, 8, 16, 24)), ("tpu", (8, 16, 24))):
        resolved, _ = resolve(config, LLAMA, DeviceInfo(platform, platform, bytes_))
        assert resolved.table().decode_sizes == sizes


def small_config(model, **options):
    """A configuration of one decode and one mixed program."""
    sizes = {
        "max_num_seqs": 4,
        "max_model_len": 64,
        "max_num_batched_tokens": 16,
        "decode_sizes": (4,),
    }
    engine = EngineConfig(model="m", backend="jax", dtype="float32", **sizes, **options)
    return resolve(engine, model, DeviceInfo("cpu", "cpu", 1 << 34))[0]


def test_what_a_request_may_not_have_changes_no_program():
    """Programs are found again by their key: fields of a model that none of them reads are not
    in it.
    """
    model = LLAMA
    mesh = sharding.make_mesh(jax.devices("cpu"), 1)

    def key(**changes):
        return executables.key(replace(model, **changes), small_config(model), "plan", mesh, 4)

    assert (
        key(image_token_ids=(7,), left_out=("vision tower",), eos_token_ids=(2,), raw_hash="x")
        == key()
    )
    assert key(hidden_size=2 * model.hidden_size) != key()


TPU7X = {"device_kind": "TPU7x", "platform": "tpu"}


def test_a_key_has_what_the_compiler_is_told(monkeypatch):
    mesh = sharding.make_mesh(jax.devices("cpu"), 1)

    def key():
        return executables.key(LLAMA, small_config(LLAMA), "plan", mesh, 4)

    before = key()
    monkeypatch.setitem(compilation.OPTIONS, "xla_allow_excess_precision", True)
    assert {name for name, value in key().items() if value != before[name]} == {"compiler"}


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", True),
        ("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=8", False),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536", True),
        ("LIBTPU_INIT_ARGS", f"{platforms.FIBERS}=1048576", False),
    ],
)
def test_a_key_has_the_flags_of_the_environment_that_change_programs(
    monkeypatch, name, given, kept
):
    """XLA reads them whoever compiles; what libtpu is told counts on TPUs alone."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    before = {platform: flags_for(platform) for platform in ("cpu", "tpu")}
    monkeypatch.setenv(name, given)
    assert flags_for("tpu") == (given.split() if kept else before["tpu"])
    of_libtpu = name == "LIBTPU_INIT_ARGS"
    assert flags_for("cpu") == (before["cpu"] if of_libtpu or not kept else given.split())


def test_flags_of_the_environment_are_told_in_an_error(monkeypatch, tmp_path):
    mesh = sharding.make_mesh(jax.devices("cpu"), 1)

    def key():
        return executables.key(LLAMA, small_config(LLAMA), "plan", mesh, 4)

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    reader = executables.Reader(executables.Writer(str(tmp_path / "x"), key()).finish())
    assert not reader.differences(key())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert reader.differences(key()) == [
        'flags (of XLA_FLAGS, LIBTPU_INIT_ARGS): [] there, ["--xla_cpu_enable_fast_math=true"] here'
    ]


def test_a_key_tells_devices_with_the_same_chip_apart():
    """An executable knows its devices by their ids, and on tpu7x two of them share a chip."""

    def places(*devices):
        model, mesh = LLAMA, SimpleNamespace(devices=np.array(devices, object))
        return executables.key(model, small_config(model), "plan", mesh, 4)["places"]

    def device(number, core):
        return SimpleNamespace(id=number, coords=(0, 1, 0), core_on_chip=core, **TPU7X)

    assert places(device(4, 0), device(5, 1)) == [[4, 0, 1, 0, 0], [5, 0, 1, 0, 1]]


def test_long_values_are_told_where_they_differ(tmp_path):
    sizes = list(range(0, 1024, 8))
    writer = executables.Writer(str(tmp_path / "x"), {"config": {"mixed_sizes": sizes}})
    reader = executables.Reader(writer.finish())
    changed = [13 if size == 512 else size for size in sizes]
    (line,) = reader.differences({"config": {"mixed_sizes": changed}})
    there, here = line.removeprefix("config.mixed_sizes: ").removesuffix(" here").split(" there, ")
    assert "504, 512, 520" in there
    assert "504, 13, 520" in here
    assert len(line) < 200


@pytest.mark.parametrize("shards", [1, 3, 4])
def test_plans_know_the_layers_that_programs_see(shards):
    """A shard computes a part of each layer; programs see all shards together, with heads of
    zeros among them.
    """
    model = replace(LLAMA, num_layers=4, layer_windows=(0, 8, 0, 8))
    plans = make_plans(model, small_config(model, tensor_parallel_size=shards))
    spec = decoder.model_of(placement.physical_config(model, shards))
    for kind in ("decode", "mixed"):
        assert all("paged_attention" in plans.of(kind, layer) for layer in spec.layers)


def test_windows_that_alternate_are_two_layer_bodies_in_a_program():
    """Counted in lines of StableHLO; `scripts/compile_blocks.py` measures what they cost to
    compile.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
    }
    small = replace(LLAMA, **sizes, vocab_size=64, num_layers=24)
    lines = {}
    for name, windows in {"uniform": (0,) * 24, "alternating": (0, 8) * 12}.items():
        model = replace(small, layer_windows=windows)
        config, mesh = small_config(model), sharding.make_mesh(jax.devices("cpu"), 1)
        tools = ladder.program_model(model, config, make_plans(model, config), mesh)
        shapes = ladder.describe(model, config, tools.blocks, 8, mesh)
        job = ladder.jobs(tools, config.table(), shapes, jnp.dtype("float32"), mesh)[
            Descriptor("decode", 4, 4, 1)
        ]
        function = programs.named("lines", job.function)
        lines[name] = jax.jit(function).lower(*job.arguments).as_text().count("\n")
    assert lines["alternating"] < 1.5 * lines["uniform"]
