"""The one command: a right model is equal in every part, and the deepest cause comes first."""

import json

import pytest

from twinfer.gpu import regional
from twinfer.numerics.questions import check as questions_check
from twinfer.numerics.questions import ops_check
from twinfer.numerics.questions import served as questions_served
from twinfer.numerics.questions.check import (
    Cause,
    CheckReport,
    Part,
    _ask_ops,
    _ask_served,
    _Asked,
    check,
    render,
)
from twinfer.numerics.questions.ops_check import check_ops
from twinfer.numerics.sides.subject import open_subject, parse_target
from twinfer.ops.reference import activations
from twinfer.serving.cli import main
from twinfer.shared import config
from twinfer.shared.errors import ConfigError, InternalError


def test_the_command(small_model, tmp_path, capsys):
    result = tmp_path / "r.json"
    words = ["numerics", "check", small_model, "--load-format", "dummy", "--mode", "S"]
    words += ["--a", "torch:cpu", "--b", "torch:cpu", "--definition", "off"]
    assert main([*words, "--json", str(result), "--junit", str(tmp_path / "r.xml")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("EQUAL: ")
    record = json.loads(result.read_text())
    assert [part["name"] for part in record["parts"]] == ["served", "ops", "model", "repeat"]
    assert not record["first_cause"]
    assert "numerics check" in record["environment"]["command"]
    assert main([*words, "--seconds", "0"]) == 2
    assert "seconds: got 0.0" in capsys.readouterr().err


def test_what_the_time_did_not_reach_is_missing(small_model):
    subject = open_subject(small_model, load_format="dummy")
    found = check(
        subject, [parse_target("torch:cpu")], modes=("S",), definition="off", seconds=1e-9
    )
    assert [part.name for part in found.parts] == ["served"]
    assert [text.partition(":")[0] for text in found.missing] == ["ops", "model", "repeat"]
    assert found.exit_code == 3


def test_why_a_case_was_not_compared_is_in_its_line(small_model, monkeypatch):
    """Which is cut: the name of a side that has all implementations of a plan would fill it."""

    def run_op(*arguments):
        raise RuntimeError("the reason")

    monkeypatch.setattr(ops_check, "run_op", run_op)
    subject = open_subject(small_model, load_format="dummy")
    asked = _Asked(subject, [parse_target("torch:cpu")], ("S",), None, "off", lambda text: None)
    (report,), _, _ = _ask_ops(asked)
    assert report.missing
    assert report.sides == ("a torch:cpu",)
    whole = CheckReport(("a torch:cpu",))
    whole.missing += [f"ops: {text}" for text in report.missing]
    lines = [line for line in render(whole).splitlines() if line.startswith("not compared: ")]
    assert lines[:4]
    assert all("the reason" in line for line in lines[:4])


@pytest.mark.parametrize("refuses", [False, True])
def test_caches_that_no_engine_has_are_no_gap(small_model, refuses, monkeypatch):
    """As those in fp8 on torch-xla, which cannot compute with them."""
    run_op, fp8 = ops_check.run_op, set()

    def without_fp8(backend, op, provider, arguments, *others):
        if str(getattr(arguments.get("kv"), "dtype", "")) == "float8_e4m3fn":
            fp8.add(op)
            raise RuntimeError("cannot read the bits")
        return run_op(backend, op, provider, arguments, *others)

    def check_config(config, *others):
        if refuses and config.kv_cache_dtype == "fp8_e4m3":
            raise ConfigError("kv_cache_dtype: got fp8_e4m3")

    monkeypatch.setattr(ops_check, "run_op", without_fp8)
    monkeypatch.setattr(config, "check_ladders", check_config)
    plan = {"write_kv": ("native",), "paged_attention": ("native",)}
    monkeypatch.setattr(questions_check, "_planned", lambda *asked: plan)
    subject = open_subject(small_model, load_format="dummy", dtype="float32")
    asked = _Asked(subject, [parse_target("torch:cpu")], ("S",), None, "off", lambda text: None)
    (report,), _, _ = _ask_ops(asked)
    written = next(r for r in report.results if r.name == "write_kv=native")
    if refuses:
        assert not fp8
        assert report.exit_code == 0
        assert written.compared > written.refused >= 3
    else:
        assert {"write_kv", "paged_attention"} <= fp8
        assert report.exit_code == 3


def test_a_time_must_be_a_time(small_model):
    with pytest.raises(ConfigError, match="seconds: got nan"):
        check(open_subject(small_model, load_format="dummy"), [], seconds=float("nan"))


def test_a_part_that_fails_is_missing_and_the_others_are_asked(small_model, monkeypatch):
    """An exception is no verdict."""

    def fail(asked):
        raise InternalError("books disagree")

    monkeypatch.setattr(
        questions_check, "PARTS", {"served": fail, "repeat": questions_check._ask_repeat}
    )
    subject = open_subject(small_model, load_format="dummy")
    found = check(subject, [parse_target("torch:cpu")], modes=("S",), definition="off")
    assert [(part.name, part.exit_code) for part in found.parts] == [("served", 3), ("repeat", 0)]
    assert found.missing == ["served: ended with InternalError: books disagree"]
    assert found.exit_code == 3
    assert json.loads(found.dumps())["exit_code"] == 3
    assert render(found).startswith("NOT (fully) COMPARED")


def test_an_engine_that_fails_is_a_cause_with_its_side(small_model, monkeypatch):
    def serve(*args, **options):
        raise InternalError("page 15")

    monkeypatch.setattr(questions_served, "serve", serve)
    subject = open_subject(small_model, load_format="dummy")
    asked = _Asked(subject, [parse_target("torch:cpu")], ("S",), None, "off", lambda text: None)
    (diff,), _, causes = _ask_served(asked)
    assert diff.exit_code == 3
    assert causes[0].text == (
        "a torch:cpu, steps, mode S: the engine failed with InternalError: page 15"
    )
    assert "served" in causes[0].again


def test_layers_that_fail_go_before_requests_that_ended_by_it(small_model, monkeypatch):
    """A layer that makes NaN ends requests by error."""
    right = regional.RegionalPass.layers

    def layers(self, block, stream, *others):
        if self._descriptor.kind == "decode":
            stream = stream._replace(residual=stream.residual * float("nan"))
        return right(self, block, stream, *others)

    monkeypatch.setattr(regional.RegionalPass, "layers", layers)
    subject = open_subject(small_model, load_format="dummy")
    asked = _Asked(subject, [parse_target("torch:cpu")], ("S",), None, "off", lambda text: None)
    _, _, causes = _ask_served(asked)
    causes.sort(key=lambda cause: cause.depth)
    assert "layer.0, in step" in causes[0].text
    assert sum("steps: " in cause.text and "ended by error" in cause.text for cause in causes) == 1


def test_the_deepest_cause_is_the_first():
    causes = [Cause(0, "a wrong op", "ops"), Cause(5, "a wrong layer", "served")]
    report = CheckReport(("a x",), [Part("served", 1, 1.0, "it")], causes)
    assert report.exit_code == 1
    assert report.first_cause == "a wrong op"
    lines = render(report).splitlines()
    assert lines[-3:] == ["first cause: a wrong op", "see it again: ops", "also: a wrong layer"]


def test_a_wrong_definition_of_an_op_is_ours(monkeypatch):
    right = activations.swish
    monkeypatch.setattr(
        activations, "swish", lambda xp, gate, up, steepness=1.702: right(xp, gate, up, steepness)
    )
    report = check_ops([parse_target("torch:cpu")], ["silu_and_mul"])
    assert report.exit_code == 1
    assert "our definition" in {result.side for result in report.failures}


def test_definitions_that_nothing_else_states_are_named():
    report = check_ops([parse_target("torch:cpu")], ["silu_and_mul", "add"])
    assert report.undefined == ["add"]
    assert "our definition" in {result.side for result in report.results}


def test_a_printed_command_names_what_is_not_the_default(small_model):
    """Or what it shows again is another run."""
    asked = {"load_format": "dummy", "dtype": "float32", "tokens": 32, "max_model_len": 96}
    words = open_subject(small_model, **asked).flags()
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--dtype": "float32", "--load-format": "dummy", "--tokens": "32", "--max-model-len": "96",
    }  # fmt: skip
