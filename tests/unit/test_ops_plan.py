"""Plans: priorities, predicates, enable lists, content hashes, packages from outside, recorded
traces.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from twinfer.ops import OpError, Recorder, implement, priority, resolve, set_default
from twinfer.ops.recording import Call
from twinfer.ops.source_hash import closure

SAMPLE = Path(__file__).parents[1] / "sample_plugin"


def silu_and_mul(x: "Array") -> "Array":  # noqa: F821
    return x[..., : x.shape[-1] // 2]


def even_rows(x: "Array") -> bool:  # noqa: F821
    return x.shape[0] % 2 == 0


@pytest.fixture(autouse=True)
def registry(registries):
    """Providers `mine` (any rows) and `even` (an even number of rows) for torch."""
    implement("silu_and_mul", provider="mine", framework="torch")(silu_and_mul)
    implement("silu_and_mul", provider="even", framework="torch", supports_args=even_rows)(
        silu_and_mul
    )


def calls(*rows, programs=("one",)):
    """Calls of silu_and_mul with so many rows each, in one program or in one of its own."""
    names = programs * len(rows) if len(programs) == 1 else programs
    arguments = [{"x": np.zeros((n, 8))} for n in rows]
    return [Call("silu_and_mul", 0, i, x, (), program=names[i]) for i, x in enumerate(arguments)]


def test_a_predicate_must_take_every_call():
    order = {"silu_and_mul": ("even", "mine")}
    assert resolve("torch", order, calls=calls(2, 4))["silu_and_mul"].provider == "even"
    choice = resolve("torch", order, calls=calls(2, 5))["silu_and_mul"]
    assert choice.provider == "mine"
    assert choice.passed_over == (("even", "does not take x=(5, 8)"),)


def test_native_is_last_and_takes_everything():
    choice = resolve("torch", {"silu_and_mul": ("even",)}, calls=calls(3))["silu_and_mul"]
    assert choice.provider == "native"


def test_scoped_goes_before_user_goes_before_default():
    set_default("silu_and_mul", "torch", "even")
    assert resolve("torch")["silu_and_mul"].provider == "even"
    assert resolve("torch", {"silu_and_mul": ("mine",)})["silu_and_mul"].provider == "mine"
    with priority("silu_and_mul", "native"):
        assert resolve("torch", {"silu_and_mul": ("mine",)})["silu_and_mul"].provider == "native"
        with priority("silu_and_mul", "mine"):
            assert resolve("torch")["silu_and_mul"].provider == "mine"
    assert resolve("torch")["silu_and_mul"].provider == "even"
    with pytest.raises(OpError, match="unknown op"), priority("silu", "mine"):
        pass


def test_enable_lists():
    order = {"silu_and_mul": ("mine",)}
    for enable, provider in [
        (("all",), "mine"),
        (("none",), "native"),
        (("none", "+silu_and_mul"), "mine"),
        (("all", "-silu_and_mul"), "native"),
        (("-silu_and_mul", "+silu_and_mul"), "mine"),
    ]:
        choice = resolve("torch", order, enable=enable)["silu_and_mul"]
        assert choice.provider == provider, enable
        if provider == "native":
            assert choice.passed_over == (("mine", "the op is disabled"),)
    for wrong in (("all", "none"), ("silu_and_mul",), ("+silu",)):
        with pytest.raises(OpError, match="enable list"):
            resolve("torch", enable=wrong)


KERNELS = {
    "__init__": "",
    "impl": """
from functools import partial
from twinfer.ops import Plans, implement, resolve
from twinfer.ops.declare import Array
from .helper import scale

def make(block):
    def silu_and_mul(x: "Array") -> "Array":
        return x[..., ::2] * scale() * block
    return silu_and_mul

def general(block: int, x: "Array") -> "Array":
    return x[..., ::2] * scale() * block

for n in (64, 128):
    implement("silu_and_mul", provider=f"made{n}", framework="numpy")(make(n))
    implement("silu_and_mul", provider=f"bound{n}", framework="numpy")(partial(general, n))
""",
    "helper": "from . import deep\n\ndef scale():\n    return deep.VALUE\n",
    "deep": "VALUE = 2\n",
    "unrelated": "# nothing\n",
}
KEYS = """
import json, sys; sys.path.insert(0, sys.argv[1])
import kernels.impl
from twinfer.ops import Plans, resolve

def plans(provider):
    return Plans({"decode": resolve("numpy", {"silu_and_mul": (provider,)}), "sample": resolve("numpy")})

made = [plans(name) for name in ("native", "made64", "made128", "bound64", "bound128")]
print(json.dumps({"keys": [p.cache_key for p in made], "hashes": [p.hash for p in made],
                  "factors": made[1].factors}))
"""


def test_a_compile_cache_key_covers_what_is_imported_and_enclosed_and_nothing_else(tmp_path):
    """An edit in a helper's helper changes the key, and so does an enclosed or bound value; one in
    a file that is not imported does not.
    """
    package = tmp_path / "kernels"
    package.mkdir()
    for name, text in KERNELS.items():
        (package / f"{name}.py").write_text(text)

    def keys():
        command = [sys.executable, "-c", KEYS, str(tmp_path)]
        return json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )

    first = keys()
    assert len(set(first["keys"])) == len(set(first["hashes"])) == 5, (
        "64 is not 128, whichever way it was given"
    )
    assert all(len(key) == 64 for key in first["keys"])
    assert first["factors"]["decode/silu_and_mul"].startswith("numpy:made64:")
    assert first["factors"]["sample/silu_and_mul"].startswith("numpy:native:")
    assert {name.split("/")[0] for name in first["factors"]} == {"decode", "sample"}
    (package / "unrelated.py").write_text("# a comment\n")
    assert keys() == first
    (package / "deep.py").write_text("VALUE = 3\n")
    second = keys()
    assert second["keys"][0] == first["keys"][0], "native does not import it"
    assert not set(second["keys"][1:]) & set(first["keys"])
    changed = [
        name for name in first["factors"] if first["factors"][name] != second["factors"][name]
    ]
    assert changed == ["decode/silu_and_mul"]
    (package / "kernel.cu").write_text("__global__ void k() {}\n")
    assert not set(keys()["keys"][1:]) & set(second["keys"])


def test_the_closure_of_a_reference_stays_inside_ops():
    files = {path.name for path in closure(frozenset({"twinfer.ops.reference.dense"})).files()}
    assert {"dense.py", "declare.py"} <= files
    assert "scheduler.py" not in files


def test_a_package_from_outside_adds_and_replaces(tmp_path):
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    source, site = copy(SAMPLE, tmp_path / "source"), tmp_path / "site"
    subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", str(site), str(source)], check=True
    )
    program = """
import json, sys
sys.path.insert(0, sys.argv[1])
from twinfer import LLM, SamplingParams
from twinfer.ops import REGISTRY, resolve
import twinfer_sample
options = dict(dtype="float32", max_model_len=32, max_num_seqs=1, max_num_batched_tokens=16, progress=False)
with LLM("demo", backend="torch", **options) as llm:
    out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4), progress=False)
plan = resolve("torch")
print(json.dumps([
    "doubled" in [op.name for op in REGISTRY], plan["rms_norm"].provider, sorted(set(twinfer_sample.CALLS)),
    float(plan.bind().doubled(21.0)), out[0].outputs[0].token_ids,
]))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    added, provider, seen, doubled, tokens = json.loads(done.stdout)
    assert (added, provider, seen, doubled) == (True, "sample", ["attention", "rms_norm"], 42.0)
    assert len(tokens) == 4


def copy(source, target):
    import shutil

    shutil.copytree(
        source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    )
    return target


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_traces_of_both_frameworks_align(framework):
    """The same calls in the same order, with the same values, eager in torch and under a jit in
    JAX.
    """
    rng = np.random.default_rng(0)
    x, gate_up, down = (rng.normal(size=s).astype(np.float32) for s in ((3, 8), (12, 8), (8, 6)))
    recorder = Recorder()
    ops = resolve(framework).bind(recorder.wrap)
    if framework == "jax":
        import jax

        def traced(*arrays):
            ops.gated_mlp(arrays[0], arrays[1], None, arrays[2], None)
            return [call.outputs for call in recorder.calls]

        outputs = jax.jit(traced)(x, gate_up, down)
    else:
        import torch

        ops.gated_mlp(
            torch.from_numpy(x), torch.from_numpy(gate_up), None, torch.from_numpy(down), None
        )
        outputs = [call.outputs for call in recorder.calls]
    assert [(c.op, c.index) for c in recorder.calls] == [
        ("linear", 0), ("silu_and_mul", 0), ("linear", 1), ("gated_mlp", 0)
    ]  # fmt: skip
    y = x.astype(np.float64) @ gate_up.T
    want = [y, y[:, :6] / (1 + np.exp(-y[:, :6])) * y[:, 6:]]
    want += [want[-1] @ down.T] * 2
    for got, expected in zip(outputs, want, strict=True):
        np.testing.assert_allclose(np.asarray(got[0]), expected, rtol=1e-4, atol=1e-5)
