"""What the hash of a plan and the keys of caches depend on: what is called, in this package and
in others.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from twinfer.ops import resolve

ROOT = Path(__file__).parents[2]
ROOMS = ("ops", "bucketing", "shared", "gpu", "tpu")

UNCALLED = """
import json, sys
from importlib.machinery import PathFinder
from pathlib import Path
sys.meta_path.insert(0, PathFinder)  # before the one of an editable install
import jax
import twinfer
from twinfer.gpu import plans as torch_plans
from twinfer.gpu.backend import key_factors
from twinfer.ops import source_hash
from twinfer.shared.cache_folder import fingerprint
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.tpu import executables
from twinfer.tpu import plans as jax_plans
from twinfer.tpu.sharding import make_mesh

folder = Path(sys.argv[1])
assert Path(twinfer.__file__).is_relative_to(folder)
model = parse_config(SHAPES["llama3-8b"])

def keys():
    source_hash._hash.cache_clear()
    found = {}
    for backend, room in (("torch", torch_plans), ("jax", jax_plans)):
        config, _ = resolve(EngineConfig(model="m", backend=backend), model, DeviceInfo("cpu", "cpu", 1 << 36))
        plans = room.make_plans(model, config)
        found |= {f"{backend} hash": plans.hash, f"{backend} key": plans.cache_key}
        if backend == "torch":
            found["torch folder"] = fingerprint(key_factors(plans.hash, config.compilation, {}))
        else:
            found["jax files"] = executables.key(model, config, plans.hash, make_mesh(jax.devices()[:1], 1), 8)
    return found

states = [keys()]
for name in ("lora", "dense"):
    with open(folder / f"twinfer/ops/reference/{name}.py", "a") as file:
        file.write("# a comment\\n")
    states.append(keys())
print(json.dumps(states))
"""


def test_a_comment_in_an_op_that_the_model_does_not_call_changes_no_key(tmp_path):
    copy = tmp_path / "twinfer"
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", copy)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", UNCALLED, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    first, uncalled, called = json.loads(done.stdout)
    assert len(first) == 6
    assert uncalled == first
    assert all(called[name] != first[name] for name in first), (
        "dense.py holds what every model calls"
    )


PROVIDER = """
from twinfer.ops import implement
from twinfer.ops.declare import Array
from twinfer.ops.reference.activations import swish
import beside
import acme_helpers

def later():
    from apart.deep import VALUE
    return VALUE

@implement("silu_and_mul", provider="acme", framework="numpy")
def silu_and_mul(x: Array) -> Array:
    return x[..., ::2] * beside.scale() * acme_helpers.SCALE * later()
"""
FILES = {
    "acme/__init__.py": "",
    "acme/provider.py": PROVIDER,
    "acme_helpers.py": "SCALE = 1\n",
    "acme_ops-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme-ops\nVersion: 1.0\n",
    "acme_ops-1.0.dist-info/top_level.txt": "acme\nacme_helpers\n",
    "beside/__init__.py": "from .deep import scale\n",
    "beside/deep.py": "def scale():\n    return 1\n",
    "beside/unused.py": "nothing = 0\n",
    "apart/__init__.py": "",
    "apart/deep.py": "VALUE = 1\n",
    "far_apart-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: far-apart\nVersion: 1.0\n",
    "far_apart-1.0.dist-info/top_level.txt": "apart\n",
}
HASHES = """
import json
import acme.provider
from twinfer.ops import resolve
plan = resolve("numpy", {"silu_and_mul": ("acme",)})
print(json.dumps([plan["silu_and_mul"].uuid, plan.hash, resolve("numpy").hash]))
"""


@pytest.mark.slow
def test_the_helpers_of_a_provider_from_outside_count(tmp_path):
    """Its own, in its package, in its distribution or in none, by source; those of other
    distributions by version.
    """

    def write(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def hashes():
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", HASHES]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    for name, text in FILES.items():
        write(name, text)
    uuid, plan, native = hashes()
    edits = {
        "beside/deep.py": "def scale():\n    return 2\n",
        "acme_helpers.py": "SCALE = 2\n",
        "far_apart-1.0.dist-info/METADATA": FILES["far_apart-1.0.dist-info/METADATA"].replace(
            "n: 1.0", "n: 1.1"
        ),
    }
    for name, text in edits.items():
        write(name, text)
        changed = hashes()
        assert changed[0] != uuid, name
        assert changed[1] != plan, name
        assert changed[2] == native, "a plan without the provider"
        uuid, plan, _ = changed
    for name in ("apart/deep.py", "beside/unused.py"):
        write(name, FILES[name] + "# a comment\n")
        assert hashes() == [uuid, plan, native], name


def test_what_a_provider_takes_from_this_package_counts():
    from twinfer.ops.source_hash import closure

    found = closure(frozenset({__name__}))
    names = {path.name for path in found.files()}
    assert "plan.py" in names, "twinfer.ops hands on `resolve` from there"
    assert not names & {"lora.py", "moe.py"}, "and is followed for the name alone"


def test_what_the_array_api_is_on_torch_and_numpy_is_among_the_versions(monkeypatch):
    from twinfer.ops import source_hash

    def hashes():
        source_hash._hash.cache_clear()
        return [
            source_hash.source_hash(resolve(name)["rms_norm"].implementation.function, name)
            for name in ("numpy", "torch", "jax")
        ]

    before, right = hashes(), source_hash._version
    monkeypatch.setattr(
        source_hash, "_version", lambda name: "0.0" if name == "array-api-compat" else right(name)
    )
    after = hashes()
    source_hash._hash.cache_clear()
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, False, True]
