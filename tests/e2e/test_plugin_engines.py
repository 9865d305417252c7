"""What a plug-in provides runs in the engines, whoever asks for it, and whatever the platform
prefers.
"""

import functools
import os
import subprocess
import sys

import pytest
import torch

from twinfer import LLM, SamplingParams
from twinfer.ops import REGISTRY, define, implement, priority, set_default
from twinfer.ops.namespaces import namespace
from twinfer.ops.reference import dense
from twinfer.shared.errors import ConfigError
from twinfer.shared.models import stages
from twinfer.shared.models.spec import Attention, Mlp

from .conftest import GREEDY_ONLY

BACKENDS = ("torch", "jax")
VOICES = ("scoped", "user", "default")
ASKED = pytest.mark.parametrize(
    ("backend", "voice"),
    [
        # What a voice asks for becomes a plan before any framework sees it: JAX compiles one.
        pytest.param(backend, voice, marks=pytest.mark.slow if slow else ())
        for backend in BACKENDS
        for voice in VOICES
        for slow in [backend == "jax" and voice != "user"]
    ],
)
COARSE = ("fused_add_rms_norm", "norm_rope_write_kv")
OPTIONS = dict(
    dtype="float32",
    max_model_len=32,
    max_num_seqs=2,
    max_num_batched_tokens=16,
    num_pages=8,
    progress=False,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
CALLS = []


@pytest.fixture(autouse=True)
def providers(registries):
    """`acme` for rms_norm, which notes its calls."""
    for backend in BACKENDS:
        provide("rms_norm", "acme", backend, functools.partial(dense.rms_norm, namespace(backend)))
    CALLS.clear()


def provide(op, provider, backend, function, **properties):
    # or the list's length would be a guard, and each call a new compilation
    @torch.compiler.assume_constant_result
    def note():
        CALLS.append((op, provider))

    def noted(*args, **kwargs):
        note()
        return function(*args, **kwargs)

    noted.__signature__ = REGISTRY[op].signature
    implement(op, provider=provider, framework=backend, **properties)(noted)


def never(*args, **kwargs):
    raise AssertionError("this must not run")


def tokens(backend, **options):
    few = {"decode_sizes": (2,)} if backend == "jax" else {}
    with LLM("demo", backend=backend, demand=GREEDY_ONLY, **OPTIONS | few | options) as llm:
        plans = llm.engine.worker.plans()
        out = llm.generate([[1, 2, 3], [4]], GREEDY, progress=False)
        return [o.outputs[0].token_ids for o in out], plans


@functools.cache
def plain(backend):
    """Of an engine of which nothing is asked; the provider of the tests is there, and idle."""
    found = tokens(backend)
    assert not CALLS
    return found


def asked_by(voice, op, provider, backend, run):
    """Run with a provider asked for by a voice."""
    if voice == "default":
        set_default(op, backend, provider)
        return run()
    if voice == "user":
        return run(op_priority={op: (provider,)})
    with priority(op, provider):
        return run()


def prefer(backend, *ops):
    """A platform that prefers kernels `chip` for `ops`: played on the CPU."""
    for op in ops:
        provide(op, "chip", backend, never, preferred_on=("cpu",))


@ASKED
def test_a_plugin_runs_in_the_engine_whoever_asks_for_it(backend, voice):
    want, _ = plain(backend)
    got, plans = asked_by(voice, "rms_norm", "acme", backend, functools.partial(tokens, backend))
    assert got == want
    assert ("rms_norm", "acme") in CALLS
    assert plans["decode"]["rms_norm"].chosen_by == voice


@ASKED
def test_a_plugin_runs_on_a_platform_that_prefers_its_own_kernels(backend, voice):
    """The kernels of the platform, for the op and for the coarse ops that would swallow it, must
    not run at all.
    """
    prefer(backend, "rms_norm", *COARSE)
    got, plans = asked_by(voice, "rms_norm", "acme", backend, functools.partial(tokens, backend))
    assert all(len(out) == 4 for out in got)
    assert set(CALLS) == {("rms_norm", "acme")}
    for op in COARSE:
        assert plans["decode"][op].provider == "composition"
        why = f"its finer op rms_norm is acme ({voice})"
        assert ("chip", why) in plans["decode"][op].passed_over


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_disabled_op_runs_natively_inside_of_the_platforms_coarse_kernels_too(backend):
    prefer(backend, "rms_norm", *COARSE)
    tokens(backend, enable_ops=("all", "-rms_norm"))
    assert not CALLS


@pytest.mark.parametrize("voice", VOICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plugin_runs_on_a_gpu(cuda, backend, voice):
    """Before, Triton's kernels ran whatever a plug-in set."""
    run = functools.partial(tokens, backend, device="cuda", dtype="bfloat16")
    got, plans = asked_by(voice, "rms_norm", "acme", backend, run)
    assert all(len(out) == 4 for out in got)
    assert ("rms_norm", "acme") in CALLS
    assert plans["decode"]["rms_norm"].provider == "acme"
    assert [plans["decode"][op].provider for op in COARSE] == ["composition"] * 2
    kernels = {"torch": "triton", "jax": "pallas_triton"}[backend]
    assert plans["decode"]["paged_attention"].provider == kernels


def outside_ops(backend):
    """Ops from outside that no model calls: one that this backend cannot run, and one with a
    default provider.
    """
    other = "jax" if backend == "torch" else "torch"

    @define(native="per framework")
    def elsewhere(xp, x: "Array") -> "Array":  # noqa: F821
        return x

    @define()
    def unused(xp, x: "Array") -> "Array":  # noqa: F821
        return x

    provide("elsewhere", "native", other, never)
    provide("unused", "acme", backend, never)
    set_default("unused", backend, "acme")


@pytest.mark.parametrize("backend", BACKENDS)
def test_ops_that_no_model_calls_stop_nothing_and_change_no_hash(backend):
    want, before = plain(backend)
    outside_ops(backend)
    got, after = tokens(backend)
    assert got == want
    assert (before.hash, before.cache_key) == (after.hash, after.cache_key)
    assert not {"elsewhere", "unused"} & set(after["decode"].choices)


ON_TWO_SHARDS = """
from twinfer import LLM, SamplingParams
from twinfer.ops import define, implement, set_default
from twinfer.ops.declare import Array

@define()
def unused(xp, x: Array) -> Array:
    return x

@implement("unused", provider="acme", framework="jax")
def unused_acme(x: Array) -> Array:
    return x

set_default("unused", "jax", "acme")
options = dict(dtype="float32", max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16, num_pages=8)
with LLM("demo", backend="jax", tensor_parallel_size=2, progress=False, **options) as llm:
    out = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=3), progress=False)
    print(len(out[0].outputs[0].token_ids))
"""


@pytest.mark.slow
def test_an_op_that_no_model_calls_does_not_stop_two_shards(tmp_path):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", ON_TWO_SHARDS]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "3"


def multiples_of_four(x: "Array") -> bool:  # noqa: F821
    return x.shape[0] % 4 == 0


def up_to_eight(x: "Array") -> bool:  # noqa: F821
    return x.shape[0] <= 8


@pytest.mark.parametrize("takes", [multiples_of_four, up_to_eight])
def test_an_engine_does_not_start_with_a_provider_that_takes_some_programs_only(takes):
    """Among the decode programs are those of 1, 2, 8 and 16 tokens."""
    provide("silu_and_mul", "picky", "torch", never, supports_args=takes)
    with pytest.raises(ConfigError) as error:
        tokens("torch", op_priority={"silu_and_mul": ("picky",)}, max_num_seqs=16)
    said = str(error.value)
    assert not CALLS
    assert all(
        part in said
        for part in ("'silu_and_mul'", "'picky'", "[", "x=(", "op_priority silu_and_mul=native")
    )


def test_the_predicate_of_an_engine_on_jax_is_asked_for_every_program():
    provide("silu_and_mul", "picky", "jax", never, supports_args=up_to_eight)
    with pytest.raises(
        ConfigError, match=r"'silu_and_mul': 'picky' takes decode\[8\] but refuses decode\[16\]"
    ):
        tokens(
            "jax",
            op_priority={"silu_and_mul": ("picky",)},
            max_num_seqs=16,
            decode_sizes=(1, 8, 16),
        )


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_stage_from_outside_is_planned_by_what_it_calls(backend):
    """An op of a plug-in in a stage of a plug-in: it is in the plan, and its provider runs."""

    @define()
    def halved(xp, x: "Array") -> "Array":  # noqa: F821
        return x * 0.5

    provide("halved", "acme", backend, lambda x: x * 0.5)
    set_default("halved", backend, "acme")

    def stage(ops, *args):
        y, cache = stages.mlp_stage(ops, *args)
        return ops.halved(y), cache

    want, _ = plain(backend)
    stages.replace_stage(Mlp, stage)
    got, plans = tokens(backend)
    assert got != want
    assert ("halved", "acme") in CALLS
    assert plans["decode"]["halved"].provider == "acme"
    assert "halved" not in plans["sample"]


def test_only_a_mixer_has_a_stage_to_replace():
    with pytest.raises(
        ConfigError, match=r"mixer: got 'int', allowed are Attention, LatentAttention, Mlp"
    ):
        stages.replace_stage(int, stages.mlp_stage)


def test_two_plugins_cannot_replace_the_same_stage():
    def first(*args):
        return stages.mlp_stage(*args)

    def second(*args):
        return stages.mlp_stage(*args)

    stages.replace_stage(Mlp, first)
    stages.replace_stage(Mlp, first)
    stages.replace_stage(Attention, second)
    with pytest.raises(
        ConfigError, match=r"stage of Mlp is replaced by .*\.first and by .*\.second, one"
    ):
        stages.replace_stage(Mlp, second)
