"""The Python API and the pytest fixture."""

import pytest

import twinfer.numerics as numerics
from twinfer.numerics.errors import NotComparable
from twinfer.numerics.judging.gates import Gate

pytest_plugins = "pytester"
PROMPTS = [[*range(3, 20)], [7, 8, 9, 10, 11]]


def test_public_names_are_there():
    for name in numerics.__all__:
        assert callable(getattr(numerics, name)), name
    with pytest.raises(AttributeError, match="nothing"):
        _ = numerics.nothing


def test_capture_compare_and_assert(small_model, tmp_path):
    options = {"prompts": PROMPTS, "load_format": "dummy"}
    numerics.capture(small_model, "torch:cpu", out=tmp_path / "a", **options)
    diff = numerics.compare(
        tmp_path / "a", numerics.capture(small_model, "torch:cpu:compile_level=0", **options)
    )
    diff.assert_ok()
    assert diff.first_divergence() is None
    wrong = numerics.compare_targets(
        small_model, "torch:cpu", "torch:cpu", modes=("P",),
        plant=["a=softmax-bf16@1", "attention-scale-1e-2@1"],
        **options,
    )  # fmt: skip
    assert wrong.first_divergence().layer == 1
    with pytest.raises(AssertionError, match=r"layer\.1\.paged_attention"):
        wrong.assert_ok()


def test_prompts_may_be_text(tmp_path):
    diff = numerics.compare_targets(
        "demo", "torch:cpu", "torch:cpu", modes=("S",), layers=[0], prompts=["def f(x):"]
    )
    diff.assert_ok()


def test_a_gate_names_what_passed_it(small_model):
    diff = numerics.compare_targets(
        small_model, "torch:cpu", "torch:cpu", modes=("P",), prompts=PROMPTS, load_format="dummy"
    )
    for f in diff.findings:
        assert all(share <= 1.0 for share in f.shares.values()), f
    m = next(f.metrics for f in diff.findings if f.metrics.sigma)
    assert Gate(sigma=m.sigma / 2).shares(m) == pytest.approx({"sigma": 2.0})
    assert list(Gate(sigma=m.sigma / 2).complaints(m))


TEST = """
import pytest

def test_op(numerics):
    numerics.assert_op("rms_norm", "torch:cpu")

def test_model(numerics):
    diff = numerics.compare_targets({model!r}, "torch:cpu", "torch:cpu", modes=("S",), prompts=[[3, 4, 5, 6, 7]],
                                    load_format="dummy", plant=["attention-scale-1e-3@1"])
    diff.assert_ok()
"""


def test_the_fixture(pytester, monkeypatch, small_model):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TEST.format(model=small_model))
    result = pytester.runpytest_subprocess(
        "-p", "twinfer.numerics.pytest_plugin", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*layer.1.paged_attention*", "*- twinfer numerics -*", "DIFFERENT*"]
    )


def test_an_op_that_cannot_be_judged_does_not_pass():
    from twinfer.numerics.pytest_plugin import Numerics

    with pytest.raises(NotComparable, match="not compared"):
        Numerics().assert_op("rms_norm", "torch:cpu:rms_norm=triton")
