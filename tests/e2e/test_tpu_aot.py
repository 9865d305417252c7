"""Programs compiled by libtpu for slices that nobody has: what fits, what is sent between devices, what is refused.

Every figure is the compiler's; nothing runs on a TPU. The normal suite compiles the 8B step for one chip; `make
test-tpu` samples: of each chip's ladder the smallest decode and one mixed program, for both shapes.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")

SMALL = ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--decode-sizes", "16", "--mixed-sizes", "64"]
SMALL += ["--max-model-len", "2048", "--page-size", "128"]
CHIPS = {"v4:2x2x1": 4, "v5e:2x2": 4, "v5p:2x2x1": 4, "v6e:2x2": 4, "tpu7x:2x2x1": 8, "v5e:4x4": 8}


def aot(*arguments):
    """(exit code, report) of `twinfer aot --json`, in a process of its own: libtpu is loaded once and for all."""
    command = [sys.executable, "-m", "twinfer", "aot", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd="/")
    assert done.returncode in (0, 3), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def check(report):
    backbones = [p for p in report["programs"] if p["name"].startswith("backbone")]
    assert len(backbones) == 2
    for program in backbones:
        assert program["collectives_per_layer"] == ({"all-reduce": 2} if report["tensor_parallel_size"] > 1 else {})
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
@pytest.mark.parametrize("shape", ["llama3-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("topology", CHIPS)
def test_the_step_for_every_chip(shape, topology):
    code, report = aot(shape, "--topology", topology, "--tp", str(CHIPS[topology]), "--num-pages", "64", *SMALL)
    assert code == 0
    check(report)
