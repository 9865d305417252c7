"""Programs that a start builds and finds: what is asked for, stored executables, and JAX's cache,
on a CPU.

In processes of their own: JAX's cache is for a whole process, and that of the tests of this folder
must not be found.
"""

import json
import os
import re
import subprocess
import sys
from math import prod

import pytest

SCRIPT = """
import hashlib, json, os, sys
import jax
from twinfer.shared.config import EngineConfig
from twinfer.shared.demand import ANYTHING, Demand
from twinfer.shared.engine import Engine
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.sampling_params import SamplingParams
from twinfer.tpu import compilation, executables
from twinfer.tpu import worker as tpu_worker

demo = model_folder("demo")
model = load_config(demo)
cache = {"cache_hits": 0, "cache_misses": 0}


def count(name, **_):
    kind = name.rpartition("/")[2]
    if kind in cache:
        cache[kind] += 1


jax.monitoring.register_event_listener(count)


def start(demand=ANYTHING, **options):
    base = dict(
        model="demo", backend="jax", device="cpu", dtype="float32", max_model_len=32, max_num_seqs=8,
        max_num_batched_tokens=16, page_size=8, num_pages=16, decode_sizes=(8,), mixed_sizes=(16,),
    )
    before = compilation.compilations()
    cache.update(cache_hits=0, cache_misses=0)
    engine = Engine(EngineConfig(**base | options), model, demo, demand=demand)
    params = SamplingParams(temperature=0, max_tokens=6)
    made = [engine.add(str(i), list(range(2 + i, 8 + 2 * i)), params) for i in (0, 1)]
    while engine.has_work:
        engine.step()
    report = [program.name for program in engine.report.programs]
    late, count = engine.worker.compilations_after_ready(), compilation.compilations() - before
    return engine, {"tokens": [r.output for r in made], "programs": report, "count": count, "late": late} | cache


def refused(**options):
    try:
        return start(**options)[1]
    except ConfigError as error:
        return str(error)


def write(engine, folder):
    worker = engine.worker
    key = executables.key(model, engine.config, worker.plans().hash, worker._mesh, engine.report.num_pages)
    writer = executables.Writer(folder, key)
    for program in worker._programs.values():
        writer.add(program.name, program.compiled)
    writer.finish()


def with_manifest(folder, change):
    # What a start says of a manifest that was changed.
    path = os.path.join(folder, "manifest.json")
    with open(path) as file:
        before = file.read()
    changed = json.loads(before)
    change(changed)
    with open(path, "w") as file:
        json.dump(changed, file)
    said = refused(aot_folder=folder)
    with open(path, "w") as file:
        file.write(before)
    return said


def stored(folder):
    engine, first = start()
    write(engine, folder)
    out = {"first": first, "second": start(aot_folder=folder)[1]}
    greedy = Demand.of([(6, SamplingParams(temperature=0))])
    out["of greedy"] = start(greedy, aot_folder=folder)[1]
    out["own pages"] = start(aot_folder=folder, num_pages=None, enable_prefix_caching=False)[1]
    few, out["few"] = start(greedy, num_pages=3)
    write(few, folder + "-few")
    out["own few"] = refused(demand=greedy, aot_folder=folder + "-few", num_pages=None)
    narrow, out["narrow"] = start(greedy)
    write(narrow, folder + "-narrow")
    out["both narrow"] = refused(demand=greedy, aot_folder=folder + "-narrow")
    out["wider"] = refused(aot_folder=folder + "-narrow")
    out["camera"] = refused(aot_folder=folder, capture="somewhere,step=1")
    out["version"] = with_manifest(folder, lambda m: m["key"]["versions"].update(jax="0.1"))
    out["place"] = with_manifest(folder, lambda m: m["key"].update(places=[[3]]))
    load, tpu_worker.load_weights = tpu_worker.load_weights, None  # nobody may read weights
    out["early"] = with_manifest(folder, lambda m: m["key"]["versions"].update(jax="0.2"))
    out["nowhere"] = refused(aot_folder=folder + "-nowhere")
    tpu_worker.load_weights = load
    name = first["programs"][0]
    whole = os.path.join(folder, name + ".bin")
    os.rename(whole, whole + "-")
    out["no file"] = refused(aot_folder=folder)
    os.rename(whole + "-", whole)
    # A file that is as it was written, and no program.
    with open(whole, "rb") as file:
        kept = file.read()
    with open(whole, "wb") as file:
        file.write(kept[:1000])
    digest = hashlib.sha256(kept[:1000]).hexdigest()
    out["no program"] = with_manifest(folder, lambda m: m["sha256"].update({name: digest}))
    with open(whole, "wb") as file:
        file.write(kept)
    out["length"] = refused(aot_folder=folder, max_model_len=24)
    out["pages"] = refused(aot_folder=folder, num_pages=17)
    for name in ("", "manifest.json"):
        path = os.path.join(folder, name)
        mode = os.stat(path).st_mode
        os.chmod(path, mode | 0o020)
        out["writable " + name] = refused(aot_folder=folder)
        os.chmod(path, mode)
    with open(os.path.join(folder, first["programs"][0] + ".bin"), "r+b") as file:
        file.seek(100)
        file.write(b"changed")
    out["changed"] = refused(aot_folder=folder)
    return out


def cached(**options):
    engine, found = start(Demand.of([(6, SamplingParams(temperature=0))] * 2), **options)
    lines = [str(change) for change in engine.report.changes if change.field == "compilation_cache_dir"]
    return found | {"lines": lines}


what, folder = sys.argv[1:]
if what == "aot":
    print(json.dumps(stored(folder)))
else:
    print(json.dumps(cached(compilation_cache_dir="none") if what == "off" else cached()))
"""


GREEDY_PROGRAMS = ["backbone_decode_8", "backbone_mixed_16", "update", "sample_greedy_8"]


def run(what, folder, **variables):
    """What the script found, in a process that uses JAX's cache only if it is told to."""
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))
    }
    environment |= {
        "JAX_ENABLE_COMPILATION_CACHE": str(what != "aot").lower(),
        "XDG_CACHE_HOME": folder,
    } | variables
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def aot(tmp_path_factory, xla_flags):
    """What starts with a folder of stored programs say, and the start that compiled them."""
    return run("aot", str(tmp_path_factory.mktemp("aot") / "programs"), **xla_flags)


def test_an_engine_starts_from_stored_programs_and_compiles_none(aot):
    first, second = aot["first"], aot["second"]
    assert second["tokens"] == first["tokens"]
    assert second["programs"] == first["programs"]
    # What is left makes arrays: no program of the table is among it.
    assert second["count"] <= first["count"] - len(first["programs"])
    assert second["late"] == 0


def test_an_engine_reads_the_programs_that_it_needs(aot):
    """Of a folder with all, and of one that an engine with the same demand has built."""
    built = aot["narrow"]
    assert built["programs"] == GREEDY_PROGRAMS
    for what in ("of greedy", "both narrow"):
        assert aot[what]["programs"] == GREEDY_PROGRAMS
        assert aot[what]["tokens"] == built["tokens"]
        assert aot[what]["late"] == 0


def test_the_cache_is_that_of_the_folder_where_nobody_gives_a_size(aot):
    assert aot["own pages"]["tokens"] == aot["first"]["tokens"]
    # Fewer than a request of max_model_len needs, as --num-pages allows.
    assert isinstance(aot["own few"], dict), aot["own few"]
    assert aot["own few"]["tokens"] == aot["few"]["tokens"]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("length", "was compiled for another config.max_model_len: 32 there, 24 here"),
        ("pages", "was compiled for another num_pages .*: 16 there, 17 here"),
        ("version", r'another versions.jax: "0.1" there, "[\d.]+" here'),
        ("early", r'another versions.jax: "0.2" there, "[\d.]+" here'),
        ("nowhere", "aot_folder: got .*-nowhere, which is not a folder"),
        ("place", r"another places \(of device, .*: \[\[3\]\] there, \[\[0\]\] here"),
        ("wider", "has no program take_rows_16, .*, of the 11 that this start needs"),
        ("camera", "capture: keeps steps with aot_folder None, got .*programs"),
        ("no file", "cannot read .*backbone_decode_8.bin: No such file"),
        ("no program", r"backbone_decode_8.bin cannot be loaded here \("),
        ("writable ", "writable by no other"),
        ("writable manifest.json", "manifest.json must belong to this user or root"),
        ("changed", "is not the file that the manifest names"),
    ],
)
def test_what_does_not_fit_or_is_not_trusted_is_refused(aot, what, why):
    assert re.search(why, aot[what]), aot[what]


def entries(folder):
    """The programs that are kept below a folder."""
    return sorted(path.name for path in folder.rglob("*-cache"))


@pytest.mark.slow
def test_the_second_start_finds_every_program_in_the_users_cache(tmp_path):
    first = run("cache", str(tmp_path))
    kept = entries(tmp_path)
    second = run("cache", str(tmp_path))
    assert [name.partition("_6")[0] for name in first["programs"]] == GREEDY_PROGRAMS
    assert first["tokens"] == second["tokens"]
    assert first["cache_misses"] >= len(first["programs"])
    assert second["cache_misses"] == 0
    assert second["cache_hits"] >= len(second["programs"])
    assert entries(tmp_path) == kept
    (folder,) = (tmp_path / "twinfer" / "jax").iterdir()
    assert second["lines"] == [
        f"compilation_cache_dir: None -> {folder} (compiled programs are kept for later starts)"
    ]
    assert folder.stat().st_mode & 0o777 == 0o700
    off = run("off", str(tmp_path))
    assert off["tokens"] == first["tokens"]
    assert off["cache_hits"] == off["cache_misses"] == 0
    assert off["lines"] == ["compilation_cache_dir: none -> none (compiled programs are not kept)"]
    assert entries(tmp_path) == kept


@pytest.mark.slow
def test_an_entry_that_was_cut_short_costs_a_compilation(tmp_path):
    first = run("cache", str(tmp_path))
    for path in tmp_path.rglob("*backbone*-cache"):
        path.write_bytes(path.read_bytes()[:1000])
    second = run("cache", str(tmp_path))
    assert second["tokens"] == first["tokens"]


def engine(demand, **options):
    """A small JAX engine for what is demanded."""
    from twinfer.shared.config import EngineConfig
    from twinfer.shared.engine import Engine
    from twinfer.shared.models.config_json import load_config
    from twinfer.shared.models.locate import model_folder

    demo = model_folder("demo")
    base = dict(
        model="demo", backend="jax", device="cpu", dtype="float32", max_model_len=64, page_size=8
    )
    return Engine(EngineConfig(**base | options), load_config(demo), demo, demand=demand)


def finished(engine, prompt, params):
    request = engine.add("a", prompt, params)
    while engine.has_work:
        engine.step()
    return request.output


def test_an_engine_for_one_greedy_prompt_builds_four_programs_and_refuses_the_rest():
    from twinfer.shared.demand import Demand
    from twinfer.shared.errors import RequestError
    from twinfer.shared.sampling_params import SamplingParams

    greedy, prompt = SamplingParams(temperature=0, max_tokens=5), list(range(3, 12))
    narrow = engine(Demand.of([(len(prompt), greedy)]))
    names = [program.name for program in narrow.report.programs]
    assert names == ["backbone_decode_1", "backbone_mixed_16", "update", "sample_greedy_1"]
    tokens = finished(narrow, prompt, greedy)
    assert len(tokens) == 5
    for field, value in {
        "temperature": 1.0,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "min_tokens": 1,
    }.items():
        with pytest.raises(RequestError, match=field):
            narrow.add("b", prompt, SamplingParams(**{"temperature": 0, field: value}))
    # Longer prompts come in chunks, and more requests wait: what was refused left nothing behind.
    assert len(finished(narrow, prompt * 4, greedy)) == 5
    assert finished(narrow, prompt, greedy) == tokens
    assert narrow.worker.compilations_after_ready() == 0
    narrow.close()


def test_a_step_that_samples_nothing_needs_no_sampler_of_its_own():
    """A chunk of a prompt is packed for the greedy sampler; here is only one that draws."""
    from twinfer.shared.demand import Demand
    from twinfer.shared.sampling_params import SamplingParams

    params = SamplingParams(temperature=1.0, seed=7, max_tokens=3)
    random = engine(Demand.of([(40, params)]), max_num_batched_tokens=16)
    assert {name for p in random.report.programs if (name := p.name).startswith("sample")} == {
        "sample_random_1"
    }
    assert len(finished(random, list(range(3, 43)), params)) == 3
    random.close()


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_program_on_a_cpu_copies_the_cache(dtype, scan, compiled_as_for_users):
    """The scatter of new keys and values is the only instruction as large as the cache, and it
    works in place.
    """
    from twinfer.shared.config import EngineConfig, resolve
    from twinfer.shared.models.config_json import load_config
    from twinfer.shared.models.locate import model_folder
    from twinfer.tpu import compilation, ladder
    from twinfer.tpu.worker import JaxWorker, find_device

    folder = model_folder("demo")
    model, device = load_config(folder), find_device("cpu")
    options = {
        "dtype": dtype,
        "scan_layers": scan,
        "num_pages": 1024,
        "decode_sizes": (8,),
        "mixed_sizes": (16,),
    }
    limits = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    config, _ = resolve(
        EngineConfig(model="demo", backend="jax", **options, **limits), model, device
    )
    worker = JaxWorker(model, config, device, folder)
    worker.load(lambda *progress: None)
    worker.allocate_kv(1024)
    jobs = ladder.jobs(worker._model, config.table(), worker._shapes, worker._dtype, worker._mesh)
    cache = worker._kv
    in_place = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "scatter"}
    for descriptor in config.table():
        program, report = compilation.compile_one(jobs[descriptor], worker._mesh, "test")
        text = program.compiled.as_text()
        found = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\((.*)", text)
        large = [
            operation
            for sizes, operation, rest in found
            if prod(int(size) for size in sizes.split(",")) >= cache.size
            and "wrapped_scatter" not in rest
        ]
        assert large, "the cache was not found"
        assert set(large) <= in_place, (descriptor, set(large) - in_place)
        assert report.temporaries < cache.nbytes
    worker.close()
