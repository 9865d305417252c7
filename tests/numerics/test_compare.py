"""`twinfer numerics compare`: results and bundles of several runs, side by side."""

import json
import re
from dataclasses import replace

import pytest

from twinfer.numerics import compare, compare_targets
from twinfer.numerics.api import capture
from twinfer.numerics.commands import command
from twinfer.numerics.errors import NotComparable
from twinfer.numerics.judging.diff import load
from twinfer.numerics.showing.report import page
from twinfer.serving.cli import _parser, main

FAULT = "attention-scale-1e-2@1"
TORCH = "torch:cpu:compile_level=0"
PROMPTS = [[*range(3, 30)], [7, 8, 9, 10, 11]]


def run(model, **options):
    return compare_targets(
        model, TORCH, "torch:cpu", modes=("P",), load_format="dummy", prompts=PROMPTS, **options
    )


@pytest.fixture(scope="module")
def clean(small_model):
    return run(small_model)


def test_a_result_is_read_as_it_was_written(clean):
    text = clean.dumps()
    assert load(json.loads(text)).dumps() == text


def test_results_stand_side_by_side(clean, small_model, tmp_path, capsys):
    for name, diff in (("monday", clean), ("tuesday", run(small_model, plant=[FAULT]))):
        (tmp_path / f"{name}.json").write_text(diff.dumps())
    monday, tuesday = (str(tmp_path / f"{name}.json") for name in ("monday", "tuesday"))
    assert main(["numerics", "compare", monday, monday]) == 0
    out = str(tmp_path / "both.json")
    assert main(["numerics", "compare", monday, tuesday, "--json", out]) == 1
    assert "d torch:cpu in tuesday" in capsys.readouterr().out
    record = json.loads((tmp_path / "both.json").read_text())
    assert len(record["sides"]) == 4
    assert record["first_divergence"]["side"] == "d torch:cpu in tuesday"
    assert record["first_divergence"]["layer"] == 1
    assert "d torch:cpu in tuesday" in page(record)


def test_a_drift_within_the_gates_is_named(clean):
    def worse(f):
        metrics = replace(f.metrics, error_power=f.metrics.error_power * 1.12**2)
        return replace(f, metrics=metrics) if (f.scope, f.layer) == ("layer", 1) else f

    later = replace(clean, findings=[worse(f) for f in clean.findings])
    diff = compare(clean, later)
    assert diff.exit_code == 1
    assert len(diff.problems) == 2  # both sides
    pattern = re.compile(r"layer\.1 sigma ([\d.]+), it was ([\d.]+)")
    for problem in diff.problems:
        sigma, was = (float(number) for number in pattern.search(problem).groups())
        assert was == pytest.approx(1.0, abs=0.05)
        assert sigma == pytest.approx(1.12 * was, abs=0.002)


@pytest.mark.parametrize("key", ["model_hash", "steps_hash", "dtype"])
def test_results_of_other_things_are_not_compared(clean, key):
    other = replace(clean, environment=clean.environment | {key: "other"})
    with pytest.raises(NotComparable, match=key):
        compare(clean, other)


def test_damaged_results_are_refused(clean, tmp_path):
    record = json.loads(clean.dumps())
    del record["findings"][0]["metrics"]["sigma"]
    for name, content in (("whole", clean.dumps()), ("damaged", json.dumps(record))):
        (tmp_path / f"{name}.json").write_text(content)
    assert (
        main(["numerics", "compare", str(tmp_path / "whole.json"), str(tmp_path / "damaged.json")])
        == 3
    )
    assert (
        main(["numerics", "compare", str(tmp_path / "whole.json"), str(tmp_path / "none.json")])
        == 3
    )
    assert main(["numerics", "compare", str(tmp_path / "whole.json")]) == 2


def test_bundles_are_judged_and_their_ends_compared(small_model, tmp_path):
    good = capture(small_model, TORCH, prompts=PROMPTS, load_format="dummy", out=tmp_path / "good")
    diff = compare(tmp_path / "good", good)
    assert diff.exit_code == 0
    assert sum(entry.rows for entry in diff.logits) == sum(len(ids) - 1 for ids in PROMPTS)
    assert {f.scope for f in diff.findings} == {"op", "layer", "inherited", "logits"}
    good.steps[0].arrays["layer.1/paged_attention>0"] = good.steps[0].arrays[
        "layer.1/paged_attention>0"
    ][:, ::-1]
    first = compare(tmp_path / "good", good).first_divergence()
    assert (first.layer, first.tap, first.side[0]) == (1, "paged_attention", "b")


def test_bundles_of_other_steps_are_not_compared(small_model):
    one, other = (
        capture(small_model, TORCH, prompts=p, taps=(), load_format="dummy")
        for p in (PROMPTS, PROMPTS[:1])
    )
    with pytest.raises(NotComparable, match="other steps"):
        compare(one, other)


def test_a_result_says_how_to_ask_again():
    text = "numerics model --model /a b --a jax:cpu --b torch:cpu --seed 3 --plant a=x@1 --plant y --json F".split(
        " "
    )
    text[3:5] = ["/a b"]
    arguments = _parser()[0].parse_args(text)
    wanted = (
        "twinfer numerics model --model '/a b' --a jax:cpu --b torch:cpu --seed 3 --plant "
        "a=x@1 --plant y"
    )
    assert command(arguments) == wanted
