"""`twinfer numerics selftest`: faults are seen where they are, and what is missed or alarms for
nothing fails.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from twinfer.numerics.faults.catalogue import CATALOGUE, plant
from twinfer.numerics.faults.making import changed
from twinfer.numerics.questions.selftest import render, selftest
from twinfer.numerics.showing.junit import suite_xml
from twinfer.numerics.sides import side
from twinfer.numerics.sides.fault import Fault
from twinfer.numerics.sides.subject import parse_target
from twinfer.serving.cli import main
from twinfer.shared.errors import ConfigError

TORCH, JAX = parse_target("torch:cpu"), parse_target("jax:cpu")
SAMPLE = "attention-scale-1e-3", "rope-base", "split-k-rounded", "logits-rounded", "int8-wrapped"
SCRIPT = Path(__file__).parents[2] / "scripts" / "selftest.py"
ENGINE_SAMPLE = "lengths-stale", "table-of-another-group", "window-page-freed-early"


def test_a_sample_is_seen_on_torch_and_clean_runs_do_not_alarm():
    report = selftest([TORCH], names=[*SAMPLE, *ENGINE_SAMPLE], seeds=1)
    assert report.exit_code == 0, render(report)
    seen = {fault.name: "".join(fault.modes("a torch:cpu")) for fault in report.faults}
    assert seen == {
        "attention-scale-1e-3": "S", "rope-base": "SXP", "split-k-rounded": "XP",
        "logits-rounded": "SXP",
        "int8-wrapped": "X",
    } | dict.fromkeys(ENGINE_SAMPLE, "I")  # fmt: skip
    assert report.clean == 4
    record = json.loads(report.dumps())
    assert record["exit_code"] == 0
    assert record["faults"][0]["seen"] == {"a torch:cpu": ["S"]}
    assert "<failure" not in suite_xml(report)


def test_a_sample_is_seen_on_both_backends():
    """Of single ops: JAX takes long to compile a model (`test_model.py` has one fault there, the
    slow test all).
    """
    report = selftest([JAX, TORCH], names=["token-off-by-one", "adapter-off-by-one"], seeds=0)
    assert report.exit_code == 0, render(report)
    for fault in report.faults:
        assert fault.modes("a jax:cpu")
        assert fault.modes("b torch:cpu")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["jax:cpu", "torch:cpu"])
def test_everything_is_seen(backend, tmp_path):
    """By the script that the docs name."""
    path = tmp_path / "found.json"
    command = [sys.executable, SCRIPT, "--backend", backend, "--json", path]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {fault["name"] for fault in found["faults"]} == CATALOGUE.keys()
    assert found["clean_runs"] == 20 * 4
    assert found["problems"] == []


def test_what_takes_no_case_of_a_fault_need_not_show_it():
    """Attention in C takes no cache with scales; all other implementations do."""
    report = selftest([TORCH], names=["kv-scales-swapped"], modes=("S",), seeds=0)
    assert report.exit_code == 0, render(report)
    assert report.faults[0].modes("a torch:cpu") == ["S"]


def test_a_fault_that_nothing_sees_fails(monkeypatch):
    same = dict([changed("linear", bias=lambda xp, a: a["bias"])])
    monkeypatch.setitem(CATALOGUE, "nothing", Fault("nothing", ops=same, what="nothing is wrong"))
    report = selftest([TORCH], names=["nothing"], modes=("S",), seeds=0)
    assert report.exit_code == 1
    assert report.missed == ["a torch:cpu: nothing"]
    assert "MISSED a torch:cpu: nothing" in render(report)
    assert "<failure" in suite_xml(report)


def test_a_fault_that_is_blamed_on_another_op_fails(monkeypatch):
    loaded = CATALOGUE["gate-up-loaded-swapped"].weights  # shows in the MLP
    entry = Fault("elsewhere", {"add": lambda xp, f: f}, loaded, what="not where it says")
    monkeypatch.setitem(CATALOGUE, "elsewhere", entry)
    report = selftest([TORCH], names=["elsewhere"], modes=("S",), seeds=0)
    assert report.exit_code == 1
    assert report.misplaced[0].startswith("a torch:cpu: elsewhere in mode S at layer.1.gated_mlp")
    assert "<failure" in suite_xml(report)


def test_a_false_alarm_fails(monkeypatch):
    create = side.WorkerSide
    monkeypatch.setattr(side, "WorkerSide", lambda *given: create(*given[:3], plant("norm-eps@1")))
    report = selftest([TORCH], names=["vocab-tail-lost"], modes=("S",), seeds=1)
    assert report.exit_code == 1
    assert any("seed 1" in alarm for alarm in report.alarms)
    assert "FALSE ALARM" in render(report)


@pytest.mark.parametrize("arguments", [{"names": ["nope"]}, {"seeds": -1}])
def test_arguments_are_checked(arguments):
    with pytest.raises(ConfigError, match=r"nope|seeds"):
        selftest([TORCH], **arguments)


def test_the_command_lists_the_catalogue(capsys):
    assert main(["numerics", "selftest", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CATALOGUE)


def test_a_fault_that_no_mode_looks_for_is_no_pass():
    assert selftest([TORCH], names=["lengths-stale"], modes=("S",), seeds=0).exit_code == 3


def test_the_docs_name_every_fault():
    """Those that the package itself has, in bold."""
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (\**)`([a-z0-9-]+)`\** \| ", text)
    assert CATALOGUE.keys() - {name for _, name in rows} == set()
    code = "from twinfer.numerics.faults.catalogue import CATALOGUE; print(*CATALOGUE)"
    own = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name for bold, name in rows if bold} == set(own.stdout.split())
