"""How many KV tokens fit: `twinfer aot` and the worker say the same, from what the compiler says of
their programs.

A slice is played by virtual CPU devices that pretend to have so much memory; in use is what arrays
really take there.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.step import SAMPLERS
from twinfer.shared.worker import HOST_MEMORY_FOR_KV, MOST_PAGES, cache_pages, most_room
from twinfer.tpu.chips import CHIPS

SCRIPT = """
import json, sys
from dataclasses import replace
import jax
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.engine import silent
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.caches import request_pages
from twinfer.shared.worker import cache_pages
from twinfer.tpu import aot, chips, footprint, platforms, worker

folder, shards, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model, devices = load_config(folder), jax.devices("cpu")


class Slice(platforms.Topology):
    # The plan of a CPU, the cache of a TPU: all that there is.
    info = DeviceInfo("cpu", "cpu", memory)


def resolved(*given):
    config, changes = resolve(*given)
    return replace(config, platform="tpu"), changes


aot.topology = lambda name: Slice(name, chips.Chip("cpu", memory, 0, 1e12, 1e14, 1e10), devices)
aot.make_plans = lambda model, config: worker.make_plans(model, replace(config, platform="cpu"))
aot.resolve = resolved
options = json.loads(sys.argv[4]) | {"tensor_parallel_size": shards, "load_format": "dummy"}
report = aot.build(folder, folder, model, "virtual", options, None, silent)


def in_use(device):
    # By address: to look at a shard makes an array of it, which is live too.
    parts = (shard.data for x in jax.live_arrays() for shard in x.addressable_shards if shard.device == device)
    return memory, sum({part.unsafe_buffer_pointer(): part.nbytes for part in parts}.values())


worker.memory_of = in_use
config, _ = resolve(EngineConfig(**options, backend="jax", model=folder), model, Slice.info)
made = worker.JaxWorker(model, config, Slice.info, folder)
made.load(silent)
loaded = max(in_use(device)[1] for device in devices[:shards])
made.device, made.config = replace(made.device, platform="tpu"), replace(config, platform="tpu")
room, page = made.measure(), made.page_bytes()
pages = cache_pages(made.config, room, page, request_pages(model, config))
made.allocate_kv(pages)
reports = made.warm_up(config.table(), silent)
result = {
    "aot": [report.num_pages, report.kv_tokens, report.fits], "worker": [pages, pages * config.page_size, True],
    "besides": report.besides, "page": [report.page_bytes, page], "names": [p.name for p in report.programs],
    "ladder": [report.ladder, len(reports)], "temporaries": max(r.temporaries for r in reports),
    "loaded": loaded, "in_use": max(in_use(device)[1] for device in devices[:shards]),
    "guess": worker.step_temporaries(model, config),
}
print(json.dumps(result))
"""

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 2048, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "decode_sizes": (6,),
    "mixed_sizes": (16, 64),
}
MEMORY = 64 << 20


def both(folder, shards, **options):
    """What aot and the worker say of the small shape on `shards` devices."""
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"] | SHAPE))
    flags = f"--xla_force_host_platform_device_count={shards}"
    arguments = [str(folder), str(shards), str(MEMORY), json.dumps(SIZES | options)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, cwd="/",
        check=False,
        env=os.environ | {"XLA_FLAGS": flags},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4, 16])
def test_aot_and_the_worker_agree(tmp_path, shards):
    found = both(tmp_path, shards)
    assert found["aot"] == found["worker"]
    assert found["page"][0] == found["page"][1]
    # What the compiler says and what is left over fill what may be used, to a page.
    pages = found["aot"][0]
    taken = sum(found["besides"].values()) + (pages + 1) * found["page"][0]
    assert 0 <= int(0.9 * MEMORY) - taken < found["page"][0]
    # The programs that were asked are those that need most, and no guess stands for them.
    assert (
        found["besides"]["temporaries of the largest program"]
        == found["temporaries"]
        != found["guess"]
    )
    # Of what is resident all was counted: with the head, which no step reads, though samplers do.
    assert (
        found["loaded"]
        <= found["besides"]["weights, rotary and page tables"]
        <= found["loaded"] + (64 << 10)
    )
    assert found["in_use"] <= 0.9 * MEMORY
    assert found["names"] == [
        "backbone_decode_6", "backbone_mixed_64", "take_rows_64", "sample_processed_6", "logprobs_6"
    ]  # fmt: skip
    assert found["ladder"] == [3 + 2 + 2 + len(SAMPLERS) + 1] * 2


@pytest.mark.slow
def test_loops_are_counted(tmp_path):
    found = both(tmp_path, 1, decode_steps=3)
    assert found["aot"] == found["worker"]
    assert "loop_filtered_6" in found["names"]


def test_a_program_that_is_too_large_is_an_error_of_the_configuration():
    import jax

    from twinfer.tpu import footprint

    with (
        pytest.raises(ConfigError, match=r"max_num_batched_tokens, max_num_seqs: .* 17G of 15G"),
        footprint.memory_errors(),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 17G of\n 15G hbm")
    with pytest.raises(jax.errors.JaxRuntimeError), footprint.memory_errors():
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")


def settings(platform, **options):
    backend = "jax" if platform == "tpu" else "torch"
    config = EngineConfig(model="x", backend=backend, max_model_len=1024, max_num_seqs=8, **options)
    return resolve(
        config, parse_config(SHAPES["qwen3-0.6b"]), DeviceInfo(platform, platform, 1 << 40)
    )[0]


def test_the_cache_takes_what_is_left():
    """What requests do not use holds prefixes: but not on a CPU, and not where there is no
    prefix cache.
    """
    page, per_request = 1 << 20, {"tpu": 8, "cuda": 64, "cpu": 64}

    def pages(platform, room, **options):
        return cache_pages(settings(platform, **options), room, page, per_request[platform])

    for platform, most in (("tpu", 8 * 8), ("cuda", 8 * 64)):
        assert pages(platform, 5000 * page + 1) == 5000
        assert pages(platform, 5000 * page, enable_prefix_caching=False) == most
    assert pages("cpu", 5000 * page) == 8 * 64
    assert pages("cpu", 100 * page) == 100
    assert pages("cuda", -page) == 0
    assert pages("cuda", 1 << 60) == MOST_PAGES
    stored = {"aot_folder": "x", "enable_prefix_caching": False}
    assert pages("tpu", (MOST_PAGES + 1) * page, **stored) == MOST_PAGES + 1


def test_what_the_cache_may_take_is_known_before_weights_are_read():
    def room(memory, platform="cuda", **options):
        device = DeviceInfo(platform, platform, memory)
        return most_room(parse_config(SHAPES["qwen3-0.6b"]), settings(platform, **options), device)

    taken = room(1 << 36, memory_utilization=0.5) - (1 << 35)
    assert -taken == 596_049_920 * 2  # its parameters in bfloat16, tied embeddings counted once
    assert room(1 << 36, memory_utilization=0.5, dtype="float32") == (1 << 35) + 2 * taken
    assert room(1 << 36, memory_utilization=0.5, tensor_parallel_size=2) == (1 << 35) + taken // 2
    assert room(0) is None
    assert room(1 << 40, platform="cpu") == HOST_MEMORY_FOR_KV


def test_programs_that_were_compiled_before_say_how_many_pages(tmp_path, monkeypatch):
    """A worker with `aot_folder` compiles nothing to size its cache, and takes the folder's if
    it fits.
    """
    from twinfer.tpu import executables, worker

    model = parse_config(SHAPES["qwen3-0.6b"] | SHAPE)
    device = DeviceInfo("cpu", "cpu", 1 << 40)
    config, _ = resolve(EngineConfig(model="x", backend="jax", **SIZES), model, device)
    made = worker.JaxWorker(model, config, device, "x")
    made.device = replace(device, platform="tpu")
    monkeypatch.setattr(worker.footprint, "measure", lambda *given: pytest.fail("compiled"))
    page = made.page_bytes()

    def pages(number, limit):
        (tmp_path / "manifest.json").write_text(
            json.dumps({"key": {"num_pages": number}, "sha256": {}})
        )
        made._stored = executables.Reader(str(tmp_path))
        monkeypatch.setattr(worker, "memory_of", lambda device: (limit, 10 * page))
        return made.measure() // page

    assert pages(70, 1000 * page) == 70
    # 0.9 of the memory, without what is in use and the scratch page
    assert pages(70, 50 * page) == 45 - 10 - 1
    # A v6e tells of 4 MiB less than its compiler counts with, by which the folder's number fitted.
    made.device = replace(device, platform="tpu", name="TPU v6 lite")
    fitting = int(0.9 * CHIPS["v6e"].hbm) // page - 10 - 1
    assert pages(fitting, 33550235648) == fitting
    assert pages(fitting + 1, 33550235648) == fitting
    with pytest.raises(ConfigError, match="num_pages '70', must be an integer"):
        pages("70", 1000 * page)
