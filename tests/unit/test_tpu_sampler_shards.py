"""Samplers on several devices: what they send to each other, by the compiled programs, and that the
tokens are those of one device. Devices are counted when JAX starts, so that each case runs in a
process of its own, which is this file run as a script.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from math import prod

import numpy as np
import pytest

from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.step import PROCESSING, SAMPLERS, processor_layout

NARROW = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 8, "num_kv_heads": 8}
NARROW |= {"head_dim": 16, "num_layers": 2}
LENGTH = 64
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.5, allowed_token_ids=tuple(range(3, 900, 2))),
    SamplingParams(
        temperature=0, repetition_penalty=1.7, frequency_penalty=0.5, logit_bias={5: 1.0}
    ),
)
"""Requests that need each of SAMPLERS; one that does more serves them too."""


def programs_on(where, shards, rows, model, **options):
    """(jobs by name, mesh, what they are made of) of a worker with samplers for `rows` requests."""
    import jax

    from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
    from twinfer.tpu import ladder
    from twinfer.tpu.plans import make_plans
    from twinfer.tpu.platforms import leave_out_libtpu, topology
    from twinfer.tpu.sharding import make_mesh

    if where == "cpu":
        devices, info = jax.devices("cpu"), DeviceInfo("cpu", "cpu", 1 << 34)
    else:
        leave_out_libtpu()
        target = topology(where)
        devices, info = target.devices, target.info
    sizes = {"max_num_seqs": rows, "decode_sizes": (rows,), "max_num_batched_tokens": 64}
    asked = EngineConfig(
        model="m", backend="jax", load_format="dummy", tensor_parallel_size=shards,
        max_model_len=LENGTH, mixed_sizes=(64,), page_size=16 if where == "cpu" else 128,
        **sizes, **options,
    )  # fmt: skip
    config, _ = resolve(asked, model, info)
    mesh = make_mesh(devices, shards)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        plans = make_plans(model, config)
    tools = ladder.program_model(model, config, plans, mesh)
    shapes = ladder.describe(model, config, tools.blocks, 16, mesh)
    jobs = ladder.jobs(tools, config.table(), shapes, jax.numpy.dtype(config.dtype), mesh)
    return {job.name: job for job in jobs.values()}, mesh, tools


def small_model(words):
    from dataclasses import replace

    from twinfer.shared.models.config_json import parse_config
    from twinfer.shared.models.shapes import SHAPES

    return replace(parse_config(SHAPES["llama3-8b"]), vocab_size=words, **NARROW)


def sent(text):
    """[whether it stands outside of loops, kind, numbers that come] of each collective."""
    from twinfer.tpu.aot_report import COLLECTIVE

    found, entry = [], False
    for line in text.splitlines():
        if not line.startswith(" "):
            entry = line.startswith("ENTRY")
            continue
        match = COLLECTIVE.search(line)
        if match:
            shapes = re.findall(r"\w+\[([\d,]*)\]", line[: match.start(1)])
            numbers = [prod(int(n) for n in dims.split(",") if n) for dims in shapes]
            found.append([entry, match[1], sum(numbers)])
    return sorted(found)


def exchanges(where, shards, rows, names, shape=""):
    """As a script: by name, what programs send."""
    from twinfer.shared.models.config_json import parse_config
    from twinfer.shared.models.shapes import SHAPES
    from twinfer.tpu import compilation

    model = parse_config(SHAPES[shape]) if shape else small_model(1024)
    steps = {"decode_steps": 4} if "loop" in names else {}
    jobs, mesh, _ = programs_on(where, shards, rows, model, **steps)
    return {
        name: sent(compilation.compile_one(jobs[name], mesh, "x")[0].compiled.as_text())
        for name in names.split(",")
    }


def arguments(job, tools, variant, rows):
    """Arrays for a sampler: rows in another order than they have in the tables, those of PROCESSING
    with histories, biases and masks. Logits are sums that float32 holds exactly.
    """
    from twinfer.shared.sampling_encoding import (
        encode_bias,
        encode_mask,
        encode_processors,
        encode_sampling,
    )
    from twinfer.shared.step_difference import PARAMETERS

    rng = np.random.default_rng(rows)
    config, shape = tools.config, tools.shape
    kinds = KINDS[: SAMPLERS.index(variant) + 1]
    params = [kinds[(row + len(kinds) - 1) % len(kinds)] for row in range(rows)]
    order = rng.permutation(rows).astype(np.int32)
    table = np.zeros((len(PARAMETERS), rows + 1), np.int32)
    for row, its in zip(order, params, strict=True):
        encoded = encode_sampling(its, int(rng.integers(1 << 62)))
        encoded["scale"] = int(np.float32(encoded["scale"]).view(np.int32))
        table[:, row] = [encoded[name] for name in PARAMETERS]
    eighths = lambda *dims: rng.integers(-8, 9, dims).astype(np.float32) / 8  # noqa: E731
    last = rng.integers(0, config.vocab_size, rows + 1).astype(np.int32)
    position = rng.integers(0, LENGTH, rows).astype(np.int32)
    head = {name: eighths(*weight.shape) for name, weight in job.arguments[0].items()}
    picked = {"rows": order, "sample_rows": order, "position": position}
    given = [head, last, table, eighths(rows, config.hidden_size), picked]
    if variant not in PROCESSING:
        return given
    layout = processor_layout(rows, shape, variant)
    buffer = layout.allocate()
    fields = layout.views(buffer)
    fields["rows"][:] = order
    for at, its in enumerate(params):
        for name, value in encode_processors(its).items():
            fields[name][at] = value
        fields["history_row"][at] = order[at] if its.repetition_penalty != 1 else -1
        fields["prompt_len"][at], fields["pending"][at] = 5, at % 2
        ids, values = encode_bias(its)
        fields["bias_row"][at] = at if ids and variant == "processed" else -1
        if fields["bias_row"][at] >= 0:
            fields["bias_ids"][at] = -1
            fields["bias_ids"][at, : len(ids)], fields["bias"][at, : len(ids)] = ids, values
        mask = encode_mask(its, config.vocab_size)
        fields["mask_row"][at] = -1 if mask is None else at
        fields["masks"][at] = -1 if mask is None else mask
    given.append(buffer)
    if variant == "processed":
        histories = rng.integers(0, config.vocab_size, (rows + 1, LENGTH)).astype(np.int32)
        histories[:, 40:] = -1
        new = rng.integers(0, config.vocab_size, (2, rows)).astype(np.int32)
        new[0] = np.where(np.arange(rows) % 3 == 0, 40, -1)
        given += [histories, new]
    return given


def tokens(words, rows, *shards):
    """As a script: by sampler, what it returns on each number of shards."""
    import jax

    from twinfer.tpu import compilation

    found = {variant: [] for variant in SAMPLERS}
    for count in shards:
        jobs, mesh, tools = programs_on("cpu", count, rows, small_model(words), dtype="float32")
        for variant in SAMPLERS:
            job = jobs[f"sample_{variant}_{rows}"]
            program, _ = compilation.compile_one(job, mesh, "x")
            given = arguments(job, tools, variant, rows)
            placed = jax.tree.map(
                lambda x, like: jax.device_put(x, like.sharding), tuple(given), job.arguments
            )
            found[variant].append([np.asarray(x).tolist() for x in program(*placed)])
    return found


def script(*arguments):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=580, cwd="/", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_filtered_sampler_sends_logits_once_and_then_tokens():
    """Each of 8 shards gets its two of 16 rows: an eighth of the logits, and nothing of the head."""
    found = script("exchanges", "cpu", 8, 16, "sample_filtered_16")
    assert found == {
        "sample_filtered_16": [[True, "all-gather", 16], [True, "all-to-all", 16 * 1024 // 8]]
    }


@pytest.mark.slow
def test_no_sampler_sends_within_its_passes_over_rows():
    names = [f"sample_{variant}_16" for variant in SAMPLERS if variant != "greedy"]
    found = script("exchanges", "cpu", 8, 16, ",".join(names))
    assert list(found) == names
    for name in names:
        assert found[name] == [[True, "all-gather", 16], [True, "all-to-all", 2 * 1024]], name


@pytest.mark.slow
def test_a_few_rows_are_sampled_whole_on_each_shard():
    names = [f"sample_{variant}_4" for variant in SAMPLERS if variant != "greedy"]
    found = script("exchanges", "cpu", 8, 4, ",".join(names))
    assert found == {name: [[True, "all-gather", 4 * 1024]] for name in names}


@pytest.mark.slow
def test_a_loop_of_decode_steps_sends_no_more_for_its_sampler():
    """Two sums of a layer and that of embeddings stand in it besides."""
    found = script("exchanges", "cpu", 8, 16, "loop_filtered_16")["loop_filtered_16"]
    hidden = [[False, "all-reduce", 16 * NARROW["hidden_size"]]] * 3
    assert found == [[False, "all-gather", 16], *hidden, [False, "all-to-all", 2 * 1024]]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("variant", ["random", "filtered", "processed"])
def test_samplers_of_eight_chips_send_logits_once(variant):
    """Compiled for the head of an 8B model and 64 requests. Tokens come in a sum here."""
    name = f"sample_{variant}_64"
    found = script("exchanges", "v6e:2x4", 8, 64, name, "llama3.1-8b")
    assert found == {name: [[True, "all-reduce", 64], [True, "all-to-all", 8 * 128256]]}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "rows"), [(1024, 8), (1024, 6), (997, 8)])
def test_samplers_give_the_tokens_of_one_device(words, rows):
    """6 rows are dealt out to 2 shards, stay as they are on 4, and are whole on each of 8. 997
    words are whole on each.
    """
    found = script("tokens", words, rows, 1, 2, 4, 8)
    assert list(found) == list(SAMPLERS)
    for variant, of_shards in found.items():
        assert of_shards[1:] == of_shards[:1] * 3, variant
    chosen = [tuple(of_shards[0][1]) for of_shards in found.values()]
    assert len(set(chosen)) == len(SAMPLERS)
    assert all(len(set(row)) > rows // 2 and min(row) >= 0 for row in chosen)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    given = [int(x) if x.isdecimal() else x for x in rest]
    print(json.dumps({"exchanges": exchanges, "tokens": tokens}[kind](*given)))
