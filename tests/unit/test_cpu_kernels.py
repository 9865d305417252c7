"""The C kernels for CPUs: how they are built and found missing, threads, sizes, and where they
run. `test_ops_contracts.py` judges their contracts.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from twinfer.gpu.cpu_kernels import attention, build, call, rows
from twinfer.gpu.fit import without_kernels
from twinfer.gpu.plans import make_plans
from twinfer.ops import OpError, resolve
from twinfer.ops.cases.attention import paged
from twinfer.ops.implement import Refusal
from twinfer.ops.namespaces import namespace
from twinfer.ops.reference import sampling
from twinfer.ops.testing import judge, run
from twinfer.shared.config import DeviceInfo, EngineConfig
from twinfer.shared.config import resolve as resolve_config
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES

DTYPES = ("float32", "bfloat16")


@pytest.fixture
def built():
    found = build.library()
    if isinstance(found, Refusal):
        pytest.skip(str(found))


@pytest.fixture
def built_anew(monkeypatch, tmp_path):
    """Nothing is kept, and what this process has loaded is forgotten meanwhile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


def choice(op="rms_norm", platform="cpu"):
    return resolve("torch", platform=platform)[op]


def test_a_machine_without_a_compiler_keeps_the_natives(built_anew, monkeypatch):
    monkeypatch.setenv("PATH", str(built_anew))
    monkeypatch.delenv("CC", raising=False)
    found = choice()
    assert found.provider == "native"
    assert found.passed_over == (("c", "there is no C compiler (cc, gcc, clang or CC)"),)
    with pytest.raises(OpError, match="no C compiler"):
        call.kernel.__wrapped__("rms_norm", torch.float32)


def test_a_start_without_a_compiler_says_so(built_anew, monkeypatch):
    monkeypatch.setenv("PATH", str(built_anew))
    monkeypatch.delenv("CC", raising=False)
    model, cpu = parse_config(SHAPES["qwen3-0.6b"]), DeviceInfo("cpu", "cpu", 8 << 30)
    config, _ = resolve_config(EngineConfig(model="m", backend="torch"), model, cpu)
    (change,) = without_kernels(make_plans(model, config))
    assert str(change) == (
        "op_priority: c -> native (there is no C compiler (cc, gcc, clang or CC))"
    )


def test_a_compiler_that_fails_is_named_with_what_it_said(built_anew, monkeypatch):
    wrong = built_anew / "wrong"
    wrong.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 1.0 && exit\necho no space >&2; exit 1\n"
    )
    wrong.chmod(0o755)
    monkeypatch.setenv("CC", str(wrong))
    ((_, why),) = choice().passed_over
    assert why == f"{wrong} made no kernels: no space"


def test_what_was_built_is_kept_for_its_compiler_and_options(built_anew, monkeypatch):
    if isinstance(build.library(), Refusal):
        pytest.skip(str(build.library()))
    assert len(list(built_anew.rglob(build.LIBRARY))) == 1

    def compiles(*_):
        raise OSError("compiles again")

    monkeypatch.setattr(build, "_compile", compiles)
    build.library.cache_clear()
    assert not isinstance(build.library(), Refusal)
    monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "-DANOTHER"))
    build.library.cache_clear()
    assert "compiles again" in str(build.library())


def test_kernels_share_the_threads_of_torch(built):
    """A second OpenMP in the process would let idle threads of the one wait on the cores of the
    other.
    """
    script = (
        "from twinfer.gpu.cpu_kernels import build; build.library();"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'omp.' in line})"
    )
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("no /proc/self/maps here")
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(found) == 1


def test_they_run_on_cpus_only(built):
    assert choice().provider == "c"
    assert choice(platform="cuda").provider == "native"
    plan = resolve("torch", {"rms_norm": ("c",)}, platform="cuda")
    assert plan["rms_norm"].passed_over[0] == ("c", "runs on cpu only")
    with pytest.raises(OpError, match="a kernel for CPUs got a tensor on meta"):
        rows.rms_norm(torch.empty(2, 8, device="meta"), torch.ones(8), 1e-6)


def test_a_cache_of_another_dtype_is_left_to_the_natives():
    kv = np.zeros((2, 16, 4, 8), np.int8)
    q = np.zeros((1, 2, 8), np.float32)
    given = q, kv, None, None, None, None, 1.0, 0, 0.0, 1
    assert not attention._takes_attention(*given)
    assert attention._takes_attention(q, kv.astype(np.float32), *given[2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "size"), [((4, 2), 64), ((6, 6), 128), ((8, 1), 80), ((2, 2), 256)]
)
@pytest.mark.parametrize("settings", [{}, {"window": 37}, {"chunk": 32, "soft_cap": 5.0}])
def test_attention_of_all_sizes(built, dtype, heads, size, settings):
    """The sizes that have code of their own, and others; requests longer than a block."""
    case = paged(
        np.random.default_rng(0), dtype, [130, 7, 200, 64], [1, 1, 75, 18], heads, size, 16
    )
    case |= settings
    found = run("paged_attention", "torch", "c", case)
    verdict = judge("paged_attention", case, list(found))
    assert verdict.passed, f"{verdict.error} at {verdict.where}"


def sampled_rows(rng, rows, vocab):
    """Arguments of `sample` with every extreme of its parameters."""
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0, 1e-4, 1, 5, 50, 1e4], (rows, 1))
    logits = np.round(logits * 4) / 4 if rng.random() < 0.3 else logits
    logits = logits.astype(np.float32)
    if rng.random() < 0.2:
        logits[rng.integers(rows), rng.integers(vocab)] = rng.choice([np.nan, np.inf, -np.inf])
    scores = sampling.quantize_logits(namespace("numpy"), logits)
    if rng.random() < 0.4:
        some = rng.random((rows, vocab)) < rng.choice([0.1, 0.9, 1.0])
        scores = np.where(some, sampling.MASKED, scores).astype(np.int32)

    def each(*values):
        return rng.choice(values, rows).astype(np.int32)

    seeds = rng.integers(-(2**31), 2**31, (2, rows)).astype(np.int32)
    return {
        "logits": logits, "scores": scores, "position": each(0, 7, 2**31 - 1), "seed_lo": seeds[0],
        "seed_hi": seeds[1], "greedy": each(0, 0, 0, 1),
        "scale": rng.choice([0, 1e-6, 0.1, 1.4427, 1000], rows).astype(np.float32),
        "top_k": each(0, -1, 1, 2, 50, vocab - 1, vocab, vocab + 5),
        "top_p": each(0, 1, 6553, 58982, 65535, 65536, 70000),
        "min_p": each(0, 1, 1000, 100_000, sampling.FAR, 1 << 30),
    }  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 2, 17, 300, 5000, sampling.FULL_WEIGHTS + 9])
def test_words_are_those_of_the_definition(built, vocab):
    """Whatever the parameters: limits are searched for in another way."""
    rng = np.random.default_rng(vocab)
    for filtered in [True, False, True] * (1 if vocab > 5000 else 30):
        given = sampled_rows(rng, 4, vocab)
        want = sampling.sample(namespace("numpy"), **given, filtered=filtered)
        found = rows.sample(**{k: torch.from_numpy(x) for k, x in given.items()}, filtered=filtered)
        assert found.tolist() == want.tolist()
        scores = rows.quantize_logits(torch.from_numpy(given["logits"]))
        want = sampling.quantize_logits(namespace("numpy"), given["logits"])
        np.testing.assert_array_equal(scores.numpy(), want)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def large_calls(dtype):
    """Arguments that are shared among threads."""
    rng = np.random.default_rng(1)
    make = lambda *shape: torch.from_numpy(rng.normal(size=shape)).to(dtype)  # noqa: E731
    angles = torch.from_numpy(rng.normal(size=(300, 32))).float()
    slots = torch.randperm(319)[:300].to(torch.int32)
    wide = make(300, 8 * 64), make(20, 16, 4, 64), make(64), make(64)
    yield rows.rms_norm, (make(300, 256), make(256), 1e-6)
    yield rows.fused_add_rms_norm, (make(300, 256), make(300, 256), make(256), 1e-6)
    yield rows.silu_and_mul, (make(300, 512),)
    yield attention.norm_rope_write_kv, (*wide, angles.cos(), angles.sin(), slots, 1e-6)
    yield rows.greedy_sample, (make(40, 1000).float(),)
    yield rows.quantize_logits, (make(40, 1000).float(),)
    drawn = sampled_rows(rng, 40, 1000)
    yield rows.sample, (*(torch.from_numpy(x) for x in drawn.values()), True)
    if dtype is torch.bfloat16:
        yield rows.logits, (make(13, 100), make(1001, 100))
    lengths = torch.tensor([[0, 1, 2, 180], [150, 90, 178, 0]], dtype=torch.int32)
    table = torch.arange(60).view(3, 20).to(torch.int32)
    counts = torch.tensor([2, 3], dtype=torch.int32)
    yield attention.paged_attention, (
        make(180, 4, 64), make(61, 10, 4, 64), table, lengths[0], lengths[1, :3].contiguous(),
        counts, 0.125, 0, 0.0, 178,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(built, threads, dtype):
    dtype = getattr(torch, dtype)
    for function, arguments in large_calls(dtype):
        results = []
        for count in (1, 3):
            threads(count)
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
            made = function(*copies)
            results.append(made if isinstance(made, tuple) else (made,))
        for one, three in zip(*results, strict=True):
            assert torch.equal(one, three), function.__name__
            assert one.float().std() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_a_chunk_and_alone(built, dtype):
    """What later tokens of its request left in the cache does not matter either, NaN too."""
    dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(90, 6, 64, generator=generator).to(dtype)
    kv = torch.randn(9, 16, 4, 64, generator=generator).to(dtype)
    table = torch.arange(8, dtype=torch.int32)[None]
    integers = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731

    def attend(queries, length, single):
        batch = table, integers(0, len(queries)), integers(length), integers(single, 1)
        return attention.paged_attention(queries, kv, *batch, 0.125, 0, 0.0, len(queries))

    whole = attend(q, 110, 0)
    kv.view(-1, 4, 64)[80:] = torch.nan
    for token in (0, 15, 16, 59):
        alone = attend(q[token : token + 1].contiguous(), 21 + token, 1)
        assert torch.equal(whole[token], alone[0])
