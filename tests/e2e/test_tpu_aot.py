"""Programs compiled by libtpu for slices that nobody has: what fits, what is sent between devices, what is refused.

Every figure is the compiler's; nothing runs on a TPU. The normal suite compiles a decode and a mixed step of Qwen3-0.6B
for one chip; `make test-tpu` compiles the 8B shape's ladder of six for v6e, and samples the rest: without samplers, a
decode program of 16 requests and a mixed one of 512 tokens for each chip, a slice of two hosts, and both shapes.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")

SMALL = ["--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--decode-sizes", "16", "--mixed-sizes", "512"]
SMALL += ["--max-model-len", "2048", "--page-size", "128"]
CHIPS = {"v4:2x2x1": 4, "v5e:2x2": 4, "v5p:2x2x1": 4, "v6e:2x2": 4, "tpu7x:2x2x1": 8, "v5e:4x4": 8}


BACKBONES = """
import sys
from twinfer.serving.cli import main
from twinfer.tpu import aot
every = aot.jobs
aot.jobs = lambda *given: {key: job for key, job in every(*given).items() if job.name.startswith("backbone")}
sys.exit(main(sys.argv[1:]))
"""
"""The command without the samplers, which take most of its time and are nearly the same for every chip."""


def aot(*arguments, program=("-m", "twinfer")):
    """(exit code, report) of `twinfer aot --json`, in a process of its own: libtpu is loaded once and for all."""
    command = [sys.executable, *program, "aot", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd="/")
    assert done.returncode in (0, 3), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def check(report, programs=2):
    layers = {"llama3-8b": 32, "qwen3-0.6b": 28}[report["model"]]
    backbones = [p for p in report["programs"] if p["name"].startswith("backbone")]
    assert len(backbones) == programs
    for program in backbones:
        if program["collectives_per_layer"]:
            assert program["collectives_per_layer"] == {"all-reduce": 2}
            assert program["collectives_per_step"] == {"all-reduce": 1}  # of the embedding
        else:  # layers unrolled, as on tpu7x by default
            assert report["topology"].startswith("tpu7x")
            assert program["collectives_per_step"] == {"all-reduce": 2 * layers + 1}
        # Nothing as large as the cache or a layer's weights is copied.
        assert program["temporaries"] < 64 << 20, program
        assert program["seconds"] > 0
        assert program["code"] > 0
        assert program["flops"] > 0
        assert program["arguments"] >= report["weights"]


def test_a_model_that_does_not_fit_says_what_is_too_large():
    code, report = aot("llama3-8b", "--topology", "v5e:1x1", *SMALL)
    assert code == 3
    assert not report["fits"]
    assert report["programs"] == []
    assert any("gate_up" in row["what"] for row in report["too_large"])


def test_the_step_of_qwen3_for_v6e(tmp_path):
    folder = str(tmp_path / "programs")
    code, report = aot("qwen3-0.6b", "--topology", "v6e:2x2", "--tp", "2", "--num-pages", "64", "--out", folder, *SMALL)
    assert code == 0
    check(report)
    assert report["kv_tokens"] == 64 * 128
    with open(os.path.join(folder, "manifest.json")) as file:
        manifest = json.load(file)
    assert set(manifest["sha256"]) == {p["name"] for p in report["programs"]}
    assert manifest["key"]["plan_hash"] == report["plan_hash"]


@pytest.mark.slow
def test_the_ladder_of_llama3_8b_for_four_chips():
    sizes = ["--max-num-seqs", "64", "--max-num-batched-tokens", "512", "--max-model-len", "4096", "--page-size", "128"]
    ladder = ["--decode-sizes", "8,16,64", "--mixed-sizes", "16,128,512"]
    code, report = aot("llama3-8b", "--topology", "v6e:2x2", "--tp", "4", *sizes, *ladder)
    assert code == 0
    check(report, 6)
    assert report["kv_tokens"] == report["num_pages"] * 128 == 64 * 4096
    assert all(p["seconds"] > 0 for p in report["programs"])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama3-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("topology", CHIPS)
def test_the_step_for_every_chip(shape, topology):
    options = ["--topology", topology, "--tp", str(CHIPS[topology]), "--num-pages", "64", *SMALL]
    code, report = aot(shape, *options, program=("-c", BACKBONES))
    assert code == 0
    check(report)
