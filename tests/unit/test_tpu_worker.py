"""The parts of the JAX worker that need no engine: placement, platforms, stored executables, reading HLO."""

import json
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinfer.shared.config import EngineConfig
from twinfer.shared.errors import ConfigError
from twinfer.shared.models import decoder
from twinfer.shared.models.config import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.tpu import compilation, executables, platforms, sharding
from twinfer.tpu.aot import collectives
from twinfer.tpu.ladder import Job

LLAMA = parse_config(SHAPES["llama3-8b"])


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (4, 2), (6, 2), (6, 3), (14, 2), (5, 1), (9, 9), (12, 4)])
def test_every_shard_reads_the_groups_of_its_own_heads(heads, kv_heads, shards):
    layout = sharding.head_layout(heads, kv_heads, shards)
    assert len(layout.query) % shards == len(layout.kv) % shards == 0
    assert len(layout.query) % len(layout.kv) == 0
    assert sorted(h for h in layout.query if h >= 0) == list(range(heads))
    assert {h for h in layout.kv if h >= 0} == set(range(kv_heads))
    group = len(layout.query) // len(layout.kv)
    for i, head in enumerate(layout.query):
        assert head < 0 or layout.kv[i // group] == head // (heads // kv_heads)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_each_shard_of_a_stacked_projection_is_a_small_projection(shards):
    """Shard s of qkv holds its q, then its k, then its v: what the layer's code takes apart by position."""
    table = decoder.abstract(LLAMA)
    placement = sharding.place(table["qkv"], LLAMA, shards)
    assert sorted(placement.source) == list(range(6144))
    first = placement.source.reshape(shards, -1)[-1]
    q, k = 4096 // shards, 1024 // shards
    assert first[:q].tolist() == list(range(4096 - q, 4096))
    assert first[q : q + k].tolist() == list(range(5120 - k, 5120))
    assert first[q + k :].tolist() == list(range(6144 - k, 6144))
    assert sharding.place(table["o"], LLAMA, shards).axis == 1
    assert sharding.place(table["input_norm"], LLAMA, shards).axis is None


def test_a_vocabulary_that_does_not_divide_is_held_whole():
    odd = replace(LLAMA, vocab_size=997)
    assert sharding.place(decoder.abstract(odd)["embed"], odd, 4).axis is None
    assert sharding.place(decoder.abstract(LLAMA)["embed"], LLAMA, 4).axis == 0


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


def test_a_tpu_is_found_by_its_vendor(tmp_path, monkeypatch):
    chosen = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: chosen.append((name, value)))
    monkeypatch.setattr(type(jax.config), "jax_platforms", None, raising=False)
    monkeypatch.setattr(platforms, "find_spec", lambda name: True if name == "libtpu" else None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "vendor").write_text("0x8086\n")
    platforms.leave_out_libtpu(tmp_path)
    assert chosen == [("jax_platforms", "cpu")]
    (tmp_path / "a" / "vendor").write_text("0x1ae0\n")
    platforms.leave_out_libtpu(tmp_path)
    assert len(chosen) == 1


@pytest.mark.parametrize("name", ["v6e", "v7x:2x2", "v6e:2x", "v6e:2x2x1", "v5p:2x2", "v6e:0x2", "cpu:1x1"])
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


@pytest.fixture
def stored(tmp_path):
    """(folder, job, devices) of one stored program."""
    mesh = sharding.make_mesh(jax.devices("cpu"), 1)
    where = sharding.on(mesh)
    job = Job("double", lambda x: x * 2, (), (jax.ShapeDtypeStruct((4,), jnp.float32, sharding=where),), where)
    program, report = compilation.compile_one(job, mesh, "test")
    assert report.seconds > 0
    writer = executables.Writer(str(tmp_path / "aot"), {"plan_hash": "x", "sides": (1, 2)})
    writer.add("double", program.compiled)
    return writer.finish(), job, list(mesh.devices.flat)


def test_a_stored_program_runs(stored):
    folder, job, devices = stored
    reader = executables.Reader(folder)
    assert reader.differences({"plan_hash": "x", "sides": (1, 2)}) == []
    assert reader.differences({"plan_hash": "y", "sides": (1, 2)}) == ["plan_hash"]
    argument = jax.device_put(np.arange(4, dtype=np.float32), job.arguments[0].sharding)
    assert reader.load(job, devices)(argument).tolist() == [0, 2, 4, 6]


def test_a_file_that_the_manifest_does_not_name_is_never_read(stored, monkeypatch):
    folder, job, devices = stored
    monkeypatch.setattr(executables.serialize_executable, "deserialize_and_load", lambda *a, **k: pytest.fail("read"))
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
