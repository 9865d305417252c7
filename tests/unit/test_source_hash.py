"""What the hash of a plan and the keys of caches depend on: what is called, in this package and
in others.
"""

import dataclasses
import enum
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from twinfer.ops import resolve
from twinfer.ops.source_hash import source_hash
from twinfer.shared.config import DeviceInfo, EngineConfig
from twinfer.shared.config import resolve as resolve_config
from twinfer.shared.models import stages
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.models.spec import Attention, Experts, Mlp
from twinfer.shared.worker import backend_module

ROOT = Path(__file__).parents[2]
TINY = parse_config(SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 1})
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


def doubled(x):
    return x + x


def negated(x):
    return -x


def enclosing(value):
    return lambda x: (value, x)


def by_default(value):
    def inner(x, scale=value, *, shift=0):
        return x * scale + shift

    return enclosing(inner)


def by_keyword(value):
    def inner(x, *, scale=value):
        return x * scale

    return enclosing(inner)


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale


class Kind(enum.Enum):
    WIDE = 1
    NARROW = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    scale: float


BOUND = {
    "a function": (enclosing, doubled, negated),
    "functions in a tuple": (enclosing, (doubled, negated), (negated, doubled)),
    "a function in a dict": (enclosing, {"f": doubled}, {"f": negated}),
    "a bound function": (lambda value: functools.partial(Scaled.__call__, value), doubled, negated),
    "a default": (by_default, 1.0, 2.0),
    "a default by keyword": (by_keyword, 1.0, 2.0),
    "an object that is called": (Scaled, 1.0, 2.0),
    "an object whose method is called": (lambda value: Scaled(value).__call__, 1.0, 2.0),
    "an object": (lambda value: enclosing(Setting(value)), 1.0, 2.0),
    "an array": (enclosing, np.ones(3), np.zeros(3)),
    "a number of numpy": (enclosing, np.float32(1), np.float32(2)),
    "a tensor": (enclosing, torch.ones(3, dtype=torch.bfloat16), torch.zeros(3)),
    "a dtype": (enclosing, torch.float32, torch.bfloat16),
    "a name": (enclosing, Kind.WIDE, Kind.NARROW),
    "a set": (enclosing, {"a", "b"}, {"a", "c"}),
    "functions in a set": (enclosing, {doubled, negated, enclosing}, {doubled, negated}),
    "an operator of torch": (enclosing, torch.ops.aten.relu.default, torch.ops.aten.neg.default),
    "a builtin": (enclosing, torch.relu, torch.sigmoid),
    "a function of JAX": (enclosing, jnp.exp, jnp.log),
    "a function of numpy": (enclosing, np.exp, np.log),
    "a function of torch": (enclosing, torch.nn.functional.silu, torch.nn.functional.gelu),
    "a module": (enclosing, np, torch),
}


@pytest.mark.parametrize("what", BOUND)
def test_all_that_a_function_binds_counts(what):
    """A plug-in that makes its function of a setting gives another implementation for another
    setting, though no source has changed.
    """
    make, one, other = BOUND[what]
    assert source_hash(make(one), "torch") == source_hash(make(one), "torch")
    assert source_hash(make(one), "torch") != source_hash(make(other), "torch")


def test_the_places_of_bound_values_count():
    def ordered(a, b):
        return lambda x: (a, b, x)

    assert source_hash(ordered(1, 2), "torch") != source_hash(ordered(2, 1), "torch")


def test_a_function_that_binds_itself_has_a_hash():
    def again(x):
        return again(x - 1) if x else x

    assert source_hash(again, "torch") == source_hash(again, "torch")


EVERYWHERE = """
import importlib, sys
print(importlib.import_module(sys.argv[1]).of_all_that_is_bound())
"""


def of_all_that_is_bound():
    return [source_hash(make(one), "torch") for make, one, _ in BOUND.values()]


def test_what_is_bound_is_the_same_in_every_process():
    """Addresses, and the order of sets, are not: ranks would refuse one another, and nothing that
    was compiled would be used again.
    """

    # A seed that is not of this process.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", EVERYWHERE, __name__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(of_all_that_is_bound())


WITHOUT_FILE = """
from twinfer.ops.source_hash import source_hash

def scale(x):
    return x * {factor}

def rms_norm(x):
    return scale(x)

print(source_hash(rms_norm, "numpy"))
"""


def test_a_function_of_a_notebook_counts_by_what_it_does():
    """It has no file; what it calls there counts too."""

    def of(factor):
        command = [sys.executable, "-c", WITHOUT_FILE.format(factor=factor)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert of(2) == of(2) != of(3)


def keys_of_engines():
    """By backend, the hash of the plans and what compiled programs are kept by."""
    found = {}
    for backend in ("torch", "jax"):
        given = EngineConfig(model="m", backend=backend)
        config, _ = resolve_config(given, TINY, DeviceInfo("cpu", "cpu", 1 << 36))
        plans = backend_module(backend, "plans").make_plans(TINY, config)
        found[backend] = plans.hash, plans.cache_key
    return found


@pytest.mark.parametrize("mixer", [Mlp, Attention])
def test_a_stage_from_outside_counts(registries, mixer):
    """What it does between its ops is compiled into programs, and in no op of the plan."""

    def times(factor):
        def stage(ops, *args):
            y, cache = stages.STAGES[mixer](ops, *args)
            return y * factor, cache

        return stage

    def keys(stage):
        stages._replaced.clear()
        stages.replace_stage(mixer, stage)
        return keys_of_engines()

    plain, half, third = keys_of_engines(), keys(times(0.5)), keys(times(1 / 3))
    assert half == keys(times(0.5))
    for backend in ("torch", "jax"):
        assert len({plain[backend][0], half[backend][0], third[backend][0]}) == 3
        assert len({plain[backend][1], half[backend][1], third[backend][1]}) == 3


def test_a_stage_that_the_model_does_not_have_counts_nowhere(registries):
    plain = keys_of_engines()
    stages.replace_stage(Experts, lambda *args: None)
    assert keys_of_engines() == plain
