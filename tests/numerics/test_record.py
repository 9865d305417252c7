"""Results as JSON: one header with a version, whatever was asked, and a page of each."""

import argparse
import json
import shlex

import pytest

from twinfer.numerics.cli import add_parsers
from twinfer.numerics.commands import command
from twinfer.numerics.errors import FAILED, NOT_COMPARED, NotComparable
from twinfer.numerics.judging import record as records
from twinfer.numerics.judging.diff import Diff
from twinfer.numerics.questions.bisect import BisectReport, Culprit
from twinfer.numerics.questions.check import Cause, CheckReport, Part
from twinfer.numerics.questions.invariants import InvariantsReport, Result
from twinfer.numerics.questions.ops_check import OpsReport
from twinfer.numerics.questions.quantization import LayerCost, QuantizationReport
from twinfer.numerics.questions.rollout import RolloutReport
from twinfer.numerics.questions.selftest import FaultResult, SelfTest
from twinfer.numerics.showing.junit import suite_xml
from twinfer.numerics.showing.report import page, read_record
from twinfer.serving.cli import main
from twinfer.shared.models.arguments import settle_model

CULPRIT = Culprit(3, "layer", "rms_norm", "rms_norm", "native", "sigma 1.4")
REPORTS = {
    "diff": Diff(("a", "b"), problems=["unequal weights"]),
    "ops": OpsReport(("a", "b"), {}, missing=["a: rms_norm"]),
    "invariants": InvariantsReport(
        "jax:cpu", results=[Result("batch", "S", "bitwise", complaints=["row 2 differs"])]
    ),
    "bisect": BisectReport("jax:cpu", culprits=[CULPRIT], compared=True),
    "selftest": SelfTest(("jax:cpu",), ("S",), [FaultResult("rope-off", "what", "layer")]),
    "check": CheckReport(
        ("jax:cpu",), [Part("ops", 1, 1.0, "9 cases")], [Cause(1, "rms_norm is wrong", "twinfer")]
    ),
    "rollout": RolloutReport(
        ("a", "b"),
        {
            "growth": 0.0, "growth_limit": 0.1, "sigma": 2.0, "limit": 1.2,
            "ratios": {
                "tokens": 9, "mean": 1.0, "mean_error": 0.1, "quantiles": {"0.5": 1.0},
                "smallest": 0.9, "largest": 1.1, "clipped": 0.0, "effective": 1.0, "kl": 1e-4,
            },
            "drift": [
                {"first": 16, "last": 31, "tokens": 9, "mean": 0.0, "rms": 0.1, "largest": 0.2}
            ],
            "perplexity": {"tokens": 9, "a": 5.0, "b": 5.1, "difference": 0.0, "error": 0.1},
        },
        problems=["ratios are off"],
    ),
    "quantization": QuantizationReport("int8", layers=[LayerCost(2, 1e-3, 1e-2, 0.25)]),
}  # fmt: skip
SAID = {
    "diff": "unequal weights",
    "ops": "a: rms_norm",
    "invariants": "row 2 differs",
    "bisect": "layer.3.rms_norm",
    "selftest": "not seen on jax:cpu",
    "check": "rms_norm is wrong",
    "rollout": "ratios are off",
    "quantization": "2.50e-01 nats alone",
}


@pytest.mark.parametrize("kind", records.KINDS)
def test_every_result_has_the_header_and_a_page(kind, tmp_path):
    report = REPORTS[kind]
    path = tmp_path / "result.json"
    path.write_text(report.dumps())
    record = read_record(str(path))
    assert tuple(record)[: len(records.HEADER)] == records.HEADER
    assert (record["schema"], record["version"], record["kind"]) == ("twinfer-numerics", 2, kind)
    if kind == "quantization":  # which is not judged
        assert (record["exit_code"], record["verdict"]) == (0, "measured")
    else:
        assert record["exit_code"] == report.exit_code
        assert record["verdict"] == records.VERDICTS[report.exit_code]
    assert isinstance(record["environment"], dict)
    assert SAID[kind] in page(record)
    assert main(["numerics", "report", str(path)]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 3}, "version is 3, this twinfer reads 2"),
        ({"schema": "other"}, "schema is 'other'"),
        ({"kind": "novel"}, "kind is 'novel'"),
    ],
)
def test_another_version_is_refused_by_name(change, said, tmp_path, capsys):
    record = json.loads(REPORTS["bisect"].dumps()) | change
    path = tmp_path / "result.json"
    path.write_text(json.dumps(record))
    with pytest.raises(NotComparable, match=said):
        page(record)
    assert main(["numerics", "report", str(path)]) == 3
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("field", records.HEADER[3:])
def test_a_header_that_lacks_a_field_is_refused(field):
    record = json.loads(REPORTS["check"].dumps())
    del record[field]
    with pytest.raises(NotComparable, match=f"has no {field}"):
        page(record)


def test_compare_takes_comparisons_only(tmp_path, capsys):
    path = tmp_path / "result.json"
    path.write_text(REPORTS["check"].dumps())
    assert main(["numerics", "compare", str(path), str(path)]) == 3
    assert "kind is 'check'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["ops", "--a", "jax:cpu", "--b", "torch:cpu", "--mode", "S,P", "--op", "rms_norm"],
        ["invariants", "--model", "demo", "--on", "torch:cpu", "--plant", "slots-stale"],
        ["replay", "folder", "--on", "torch:cpu"],
        ["rollout", "--model", "demo", "--rollout-tokens", "9", "--text", "README.md"],
        ["logits", "--model", "demo", "--b", "http://host:1", "--server-logits", "float32"],
    ],
)
def test_the_command_asks_for_the_same_again(words):
    parser = argparse.ArgumentParser()
    add_parsers(parser)
    text = command(parser.parse_args(words))
    again = parser.parse_args(shlex.split(text)[2:])
    assert vars(again) == vars(parser.parse_args(words))


def test_a_model_is_named_once():
    parser = argparse.ArgumentParser()
    add_parsers(parser)
    arguments = parser.parse_args(["check", "demo", "--a", "torch:cpu", "--b", "jax:cpu"])
    settle_model(arguments, [])
    wanted = "twinfer numerics check --model demo --a torch:cpu --b jax:cpu"
    assert command(arguments) == wanted


@pytest.mark.parametrize("kind", [kind for kind in records.KINDS if kind != "quantization"])
def test_every_verdict_can_be_written_as_junit(kind):
    report = REPORTS[kind]
    text = suite_xml(report)
    assert ("<failure" in text, "<error" in text) == (
        report.exit_code == FAILED,
        report.exit_code == NOT_COMPARED,
    )


def test_a_search_that_compared_nothing_does_not_pass():
    report = BisectReport("jax:cpu")
    assert report.exit_code == NOT_COMPARED
    assert "<error" in suite_xml(report)
