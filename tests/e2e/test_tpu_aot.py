"""Programs compiled by libtpu for slices that nobody has: what fits, what is sent between devices,
what is refused.

Every figure is the compiler's; nothing runs on a TPU. The normal suite compiles a decode and a
mixed step of Qwen3-0.6B for one chip; `make test-tpu` compiles the 8B shape's ladder of six for
v6e, and samples the rest: without samplers, a decode program of 16 requests and a mixed one of 512
tokens for each chip, a slice of four hosts, and both shapes.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from twinfer.shared.models.shapes import SHAPES

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")

SMALL = [
    "--max-num-seqs",
    "16",
    "--max-num-batched-tokens",
    "512",
    "--decode-sizes",
    "16",
    "--mixed-sizes",
    "512",
]
SMALL += ["--max-model-len", "2048", "--page-size", "128"]
CHIPS = {"v4:2x2x1": 4, "v5e:2x2": 4, "v5p:2x2x1": 4, "v6e:2x2": 4, "tpu7x:2x2x1": 8, "v5e:4x4": 16}


BACKBONES = """
import sys
from twinfer.serving.cli import main
from twinfer.tpu import aot
every = aot.jobs
aot.jobs = lambda *given: {key: job for key, job in every(*given).items() if job.name.startswith("backbone")}
sys.exit(main(sys.argv[1:]))
"""
"""The command without the samplers, which take most of its time and are nearly the same for
every chip.
"""


OF_TABLES = """
import json, re, sys
from twinfer.serving.cli import main
from twinfer.tpu import aot
every, cost = aot.jobs, aot.program_cost
aot.jobs = lambda *given: {key: job for key, job in every(*given).items() if job.name.startswith("backbone")}
def counted(name, compiled, *rest):
    found = re.findall(r"= .?f32.131072,.* copy(?:-start)?[(].*", compiled.as_text())
    print(json.dumps([name, found]), file=sys.stderr)
    return cost(name, compiled, *rest)
aot.program_cost = counted
sys.exit(main(sys.argv[1:]))
"""
"""The command, which also tells which copies of arrays with 131 072 rows there are."""


LAYOUTS = """
import json, sys
import jax
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.tpu import aot, compilation
from twinfer.tpu.platforms import leave_out_libtpu
from twinfer.tpu.worker import empty_buffer
leave_out_libtpu()
found, done, folder = {}, {}, str(model_folder("demo"))
kept = compilation.compile_one
def compile_one(job, *given):
    program, report = kept(job, *given)
    done[job.name] = job, program.compiled
    return program, report
compilation.compile_one = compile_one
def see(formats, **where):
    for what, take in where.items():
        for path, form in jax.tree_util.tree_leaves_with_path(take(formats)):
            if form.layout is not None:
                found.setdefault(what + jax.tree_util.keystr(path), set()).add(str(form.layout))
first, second, third, fourth = ((lambda x, i=i: x[i]) for i in range(4))
options = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "decode_sizes": (8,), "mixed_sizes": (64,),
    "max_model_len": 256, "num_pages": 64, "tensor_parallel_size": 2, "decode_steps": 2,
}
aot.build("demo", folder, load_config(folder), "v6e:2x2", options, None, lambda *_: None, "all")
for name, (job, compiled) in done.items():
    given, made = compiled.input_formats[0], compiled.output_formats
    kind = name.partition("_")[0]
    if kind in ("backbone", "loop"):
        see(given, weights=first, angles=second, kv=third, state=fourth, last=lambda x: x[4])
        see(made, kv=first, state=second)
        kv = job.arguments[2]
    if kind == "backbone":
        see(made, rows=third, picked=lambda x: x[4], **{"hidden" + name.rpartition("_")[2]: fourth})
    if kind == "loop":
        see(made, last=third, halted=fourth)
        see(given, halted=lambda x: x[5])
    if kind == "sample":
        see(given, weights=first, last=second, rows=fourth, picked=lambda x: x[4])
        see(given, **{"state.parameters": third})
        see(made, last=first, tokens=second)
    if kind == "logprobs":
        see(given, weights=first, rows=second, tokens=third)
    if kind == "take":
        see(given, **{"hidden" + name.rpartition("_")[2]: first})
        see({0: made}, rows=first)
    if kind == "update":
        see(given, state=first)
        see({0: made}, state=first)
see({0: empty_buffer(kv).lower().compile().output_formats}, kv=first)
print(json.dumps({what: sorted(layouts) for what, layouts in found.items()}))
"""
"""What each program takes and gives lies how, by what it is: the runtime refuses an array that lies
otherwise than a program was compiled for, and no device but a TPU has more than one way.
"""


REFUSED = """
import json, sys
from twinfer.serving.cli import main
for arguments in json.loads(sys.argv[1]):
    print("code", main(arguments), file=sys.stderr)
"""


def aot(*arguments, program=("-m", "twinfer")):
    """(exit code, report) of `twinfer aot --json`, in a process of its own: libtpu is loaded
    once and for all.
    """
    command = [sys.executable, *program, "aot", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd="/")
    assert done.returncode in (0, 3), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def check(report, programs=2, whole_embedding=False, sums=2):
    layers = {
        "llama3-8b": 32,
        "qwen3-0.6b": 28,
        "phi4-mini": 32,
        "granite3.3-8b": 40,
        "olmo3-7b": 32,
    }[report["model"]]
    backbones = [p for p in report["programs"] if p["name"].startswith("backbone")]
    assert len(backbones) == programs
    for program in backbones:
        if program["collectives_per_layer"]:
            assert program["collectives_per_layer"] == {"all-reduce": sums}
            assert program["collectives_per_step"] == ({} if whole_embedding else {"all-reduce": 1})
        else:  # layers unrolled, as on tpu7x by default
            assert report["topology"].startswith("tpu7x")
            assert program["collectives_per_step"] == {"all-reduce": 2 * layers + 1}
        # Nothing as large as the cache or a layer's weights is copied.
        assert program["temporaries"] < 64 << 20, program
        assert program["seconds"] > 0
        assert program["code"] > 0
        assert program["arguments"] >= report["weights"]
    shards = report["tensor_parallel_size"]
    for one in report["estimates"]:
        assert one["sums"] == (2 * layers + 1 if shards > 1 else 0)
        assert one["ms"] == max(one["bytes_ms"], one["flops_ms"]) + one["sums_ms"]
        assert one["bytes"] >= 0.7 * report["weights"]  # of embeddings, a few rows are read
    assert [one["what"] for one in report["estimates"]] == ["decode", "decode", "prefill"]
    assert 0 < report["step_message"] < 1 << 16


def test_a_model_that_does_not_fit_says_what_is_too_large():
    code, report = aot("llama3-8b", "--topology", "v5e:1x1", *SMALL)
    assert code == 3
    assert not report["fits"]
    assert report["programs"] == []
    assert report["kv_tokens"] == 0
    sizes = {row["what"]: row["bytes"] for row in report["too_large"]}
    assert sizes["whole model: gate_up"] == 32 * 4096 * 2 * 14336 * 2
    each = [size for what, size in sizes.items() if what.startswith("each device: ")]
    *parts, together, allowed = each
    assert sum(parts) == together > allowed
    assert "each device: KV cache for 2048 tokens (16 pages): one request of 2048" in sizes


def test_a_cache_that_does_not_fit_says_how_much_would():
    options = ["--topology", "v6e:2x2", "--tp", "4", "--num-pages", "100000", *SMALL]
    code, report = aot("llama3-8b", *options)
    assert code == 3
    assert 0 < report["num_pages"] < 100000
    assert report["kv_tokens"] == report["num_pages"] * 128
    assert any(
        "KV cache for 12800000 tokens (100000 pages)" in row["what"] for row in report["too_large"]
    )


def test_what_is_refused_before_anything_is_compiled(tmp_path):
    shared, file = tmp_path / "shared", tmp_path / "file"
    shared.mkdir()
    shared.chmod(0o777)
    file.write_text("")
    expected = {
        "llama3-8c --topology v6e:1x1": "no such folder: llama3-8c .*; known by name: "
        ".*llama3-8b, "
        ".*qwen3-0.6b",
        "qwen3-0.6b --topology v6e:3x5": "topology: got 'v6e:3x5', libtpu knows no such slice",
        "qwen3-0.6b --topology v6e:2x2 --tp 5": "tensor_parallel_size: got 5, there are 4 devices",
        "qwen3-0.6b --topology v5e:4x4 --tp 8": "got 8; the 4 hosts of v5e:4x4 have 16 devices, "
        "and all take part",
        f"qwen3-0.6b --topology v6e:1x1 --out {shared}": "out: .*shared must belong .* "
        "writable by "
        "no other",
        f"qwen3-0.6b --topology v6e:1x1 --out {file}": "out: cannot make the folder .*file: File "
        "exists",
        f"qwen3-0.6b --topology v6e:1x1 --aot-folder {shared}": "aot_folder: got .*shared, which "
        "a start reads",
    }
    commands = json.dumps([["aot", *arguments.split(), *SMALL] for arguments in expected])
    command = [sys.executable, "-c", REFUSED, commands]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["code 2"] * len(expected), done.stderr
    for line, why in zip(lines[::2], expected.values(), strict=True):
        assert re.search(why, line), line


@pytest.mark.slow
def test_the_step_of_qwen3_for_v6e(tmp_path):
    folder = str(tmp_path / "programs")
    code, report = aot(
        "qwen3-0.6b",
        "--topology",
        "v6e:2x2",
        "--tp",
        "2",
        "--num-pages",
        "64",
        "--out",
        folder,
        *SMALL,
    )
    assert code == 0
    check(report)
    assert report["kv_tokens"] == 64 * 128
    with open(os.path.join(folder, "manifest.json")) as file:
        manifest = json.load(file)
    assert set(manifest["sha256"]) == {p["name"] for p in report["programs"]}
    assert manifest["key"]["plan_hash"] == report["plan_hash"]


@pytest.mark.slow
def test_what_a_program_gives_lies_as_the_next_one_takes_it():
    command = [sys.executable, "-c", LAYOUTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"kv", "state.pages", "state.parameters", "last", "rows", "tokens"} <= set(found)
    assert {what: layouts for what, layouts in found.items() if len(layouts) > 1} == {}


@pytest.mark.slow
def test_the_ladder_of_llama3_8b_for_four_chips():
    sizes = [
        "--max-num-seqs",
        "64",
        "--max-num-batched-tokens",
        "512",
        "--max-model-len",
        "4096",
        "--page-size",
        "128",
    ]
    ladder = ["--decode-sizes", "8,16,64", "--mixed-sizes", "16,128,512"]
    code, report = aot(
        "llama3-8b", "--topology", "v6e:2x2", "--tp", "4", "--programs", "all", *sizes, *ladder
    )
    assert code == 0
    check(report, 6)
    assert len(report["programs"]) == report["ladder"]
    assert report["kv_tokens"] == report["num_pages"] * 128 > 64 * 4096
    # Nothing that was not asked for its size takes more than those that were.
    assert report["besides"]["temporaries of the largest program"] == max(
        p["temporaries"] for p in report["programs"]
    )
    assert all(p["seconds"] > 0 for p in report["programs"])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["phi4-mini", "granite3.3-8b", "olmo3-7b"])
def test_the_step_of_other_families(shape):
    """A part of each head rotated, fused tensors; streams that are multiplied, vocabularies that
    4 does not divide; norms over all heads.
    """
    options = ["--topology", "v6e:2x2", "--tp", "4", "--num-pages", "64", *SMALL]
    code, report = aot(shape, *options, program=("-c", BACKBONES))
    assert code == 0
    check(report, whole_embedding=shape != "phi4-mini", sums=3 if shape == "olmo3-7b" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama3-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("topology", CHIPS)
def test_the_step_for_every_chip(shape, topology):
    options = ["--topology", topology, "--tp", str(CHIPS[topology]), "--num-pages", "64", *SMALL]
    code, report = aot(shape, *options, program=("-c", BACKBONES))
    assert code == 0
    check(report)


@pytest.mark.slow
def test_layers_that_stand_for_themselves_do_not_copy_a_cache_of_narrow_heads(tmp_path):
    """Two heads of 64 share the lanes of a row, so the ops see the cache reshaped. It takes what
    is left here.
    """
    config = SHAPES["llama3.2-1b"] | {
        "num_hidden_layers": 2,
        "vocab_size": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--load-format", "dummy", "--topology", "v6e:1x1", "--no-scan-layers", *SMALL]
    code, report = aot(str(tmp_path), *options, program=("-c", BACKBONES))
    assert code == 0, report["too_large"]
    assert (report["num_pages"] + 1) * report["page_bytes"] > 24 << 30
    assert all(program["temporaries"] < 64 << 20 for program in report["programs"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "unrolled"), [("int4", False), ("int4", True), ("fp8", False), ("fp8_block", False)]
)
def test_narrow_weights_on_four_chips_are_not_widened_in_memory(tmp_path, scheme, unrolled):
    """Two layers of the 8B shape, of which each chip has a fourth. With int4 XLA alone has 237 MB
    of temporaries here: entries of gate and up in float32, twice. With fp8 it compiles for
    minutes, and with blocks it has no such product.
    """
    (tmp_path / "config.json").write_text(
        json.dumps(SHAPES["llama3-8b"] | {"num_hidden_layers": 2})
    )
    options = ["--load-format", "dummy", "--quantization", scheme, "--num-pages", "64", *SMALL]
    where = ["--topology", "v6e:2x2", "--tp", "4", *["--no-scan-layers"] * unrolled]
    # Where rows of tokens are quantised, their largest entry is found over all chips.
    sums = 2 + 2 * (scheme == "fp8")
    code, report = aot(str(tmp_path), *options, *where, program=("-c", BACKBONES))
    assert code == 0
    for program in report["programs"]:
        assert program["temporaries"] < 24 << 20, program
        inside, outside = program["collectives_per_layer"], program["collectives_per_step"]
        assert (inside, outside) == (
            ({}, {"all-reduce": 2 * sums + 1})
            if unrolled
            else ({"all-reduce": sums}, {"all-reduce": 1})
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen3-30b-a3b", ["--quantization", "fp8"]),
        ("qwen3-30b-a3b", ["--quantization", "int4"]),
        ("gpt-oss-20b", []),
    ],
)
def test_narrow_experts_on_four_chips_are_not_widened_in_memory(tmp_path, shape, options):
    """Four layers, of whose experts each chip has a fourth; sums stand behind attention and behind
    experts. XLA alone has 413 MB of temporaries on one chip, and 1.2 GB with gpt-oss, whose
    embedding is 2880 wide.
    """
    config = SHAPES[shape] | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    where = ["--topology", "v6e:2x2", "--tp", "4", "--num-pages", "64", "--load-format", "dummy"]
    code, report = aot(str(tmp_path), *options, *where, *SMALL, program=("-c", BACKBONES))
    assert code == 0
    # Where rows of tokens are quantised, their largest entry is found over all chips.
    sums = {"all-reduce": 2 + ("fp8" in options)}
    for program in report["programs"]:
        assert program["temporaries"] < 24 << 20, program
        assert program["collectives_per_layer"] == sums
        assert program["collectives_per_step"] == {"all-reduce": 1}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama3.1-8b", "llama3.2-1b"])
def test_a_step_takes_rows_of_the_rotary_table_and_not_all_of_it(tmp_path, shape):
    """Of 131 072 positions: XLA turned both tables round in vector memory, or brought them there
    before the program started. The rows of the second shape are half a register.
    """
    config = SHAPES[shape] | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--decode-sizes", "16"]
    sizes += ["--mixed-sizes", "64", "--num-pages", "1024", "--topology", "v6e:1x1", "--json"]
    options = ["--load-format", "dummy", "--max-model-len", "131072", *sizes]
    command = [sys.executable, "-c", OF_TABLES, "aot", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('["')]
    assert found == [["backbone_decode_16", []], ["backbone_mixed_64", []]]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_cache_of_latents_is_not_copied(tmp_path, shards):
    """XLA would put it in another order for each loop that reads it. It takes what is left here."""
    config = {
        "architectures": ["YoutuForCausalLM"], "vocab_size": 2048, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 16,
        "max_position_embeddings": 131072, "rope_theta": 1_600_000, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--load-format", "dummy", "--topology", "v6e:2x2", "--tp", str(shards), *SMALL]
    code, report = aot(str(tmp_path), *options, program=("-c", BACKBONES))
    assert code == 0, report["too_large"]
    assert (report["num_pages"] + 1) * report["page_bytes"] > 24 << 30
    assert all(program["temporaries"] < 256 << 20 for program in report["programs"])


@pytest.mark.slow
def test_float32_for_a_chip_that_multiplies_bfloat16(tmp_path):
    """TPUs have no products of float32, so that each is asked for as products of parts."""
    config = SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ["--max-num-seqs", "16", "--max-num-batched-tokens", "16", "--decode-sizes", "16"]
    sizes += ["--mixed-sizes", "16", "--max-model-len", "2048", "--num-pages", "64"]
    options = ["--load-format", "dummy", "--dtype", "float32", "--topology", "v5e:1x1", *sizes]
    code, report = aot(str(tmp_path), *options, program=("-c", BACKBONES))
    assert code == 0
    assert len(report["programs"]) == 2


@pytest.mark.slow
def test_a_model_at_its_defaults():
    """README's line: nothing is refused for want of a page size, and the programs that need most
    are sized.
    """
    code, report = aot("qwen3-0.6b", "--topology", "v6e:2x2", "--tp", "2")
    assert code == 0
    assert report["page_size"] == 128
    assert any(
        change.startswith("page_size: None -> 128 (the page table of 256 requests")
        for change in report["changes"]
    )
    assert (len(report["programs"]), report["ladder"]) == (5, 90)
    most = max(p["temporaries"] for p in report["programs"])
    assert report["besides"]["temporaries of the largest program"] == most
    taken = sum(report["besides"].values()) + (report["num_pages"] + 1) * report["page_bytes"]
    assert 0 <= int(0.9 * report["memory"]) - taken < report["page_bytes"]
    assert report["kv_tokens"] == report["num_pages"] * 128
