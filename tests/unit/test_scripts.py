"""What scripts/ say to wrong input: one line, and exit code 2."""

import argparse
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from twinfer.serving.parser import whole_numbers
from twinfer.serving.program import run_program
from twinfer.shared.errors import BackendUnavailable, ConfigError
from twinfer.shared.models.locate import model_folder

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NO_PROGRAMS = {
    "bench_front.py": "the server that it starts says it",
    "bench_host.py": "imports the package of other checkouts",
    "check_docs.py": "has no arguments",
    "compare_commits.py": "the benchmark that it starts says it",
    "selftest.py": "is the command line",
    "soak.py": "the server that it starts says it",
    "train_demo_model.py": "imports nothing of the package",
    "write_options.py": "has one switch",
}
"""Scripts that do not end by `run_program`, and why."""
WRONG = {
    "aot_table.py": (["--models", "nosuch"], "argument --models: got nosuch, allowed are "),
    "bench_decode.py": (["--model", "/nowhere"], "model: no such folder: /nowhere"),
    "bench_forms.py": (["--json", "/nowhere/x"], "argument --json: cannot write /nowhere/x"),
    "bench_front.py": (["--dtype", "foo"], "argument --dtype: invalid choice: 'foo'"),
    "bench_guesses.py": (["--guesses", "0"], "argument --guesses: got 0, allowed are whole "),
    "bench_host.py": (["--against", "a=/nowhere"], "/nowhere is no checkout"),
    "bench_load.py": (["--folder", "/nowhere"], "--folder: /nowhere has no weights, and no --shape"),
    "bench_ops.py": (["--ops", "nosuch"], "--ops: got nosuch, allowed are add, "),
    "bench_ranks.py": (["--ranks", "x"], "argument --ranks: 'x' is not a number"),
    "bench_scheduler.py": (["--requests", "0"], "argument --requests: got 0, allowed is 1 to "),
    "bench_tp.py": (["--parts", "x"], "argument --parts: got x, allowed are limits, "),
    "calibrate_gates.py": (["--out", "/nowhere/x"], "argument --out: cannot write /nowhere/x"),
    "compare_commits.py": (
        ["--against", "a=/nowhere", "--models", "demo"], "/nowhere is no checkout",
    ),
    "compare_gates.py": (["--only", "nosuch"], "--only: got nosuch, allowed are "),
    "compare_kernels.py": (["--chips", "v9"], "argument --chips: got v9, allowed are v4, "),
    "compare_transformers.py": (["--model", "/nowhere"], "model: no such folder: /nowhere"),
    "compile_blocks.py": (["--layers", "0"], "argument --layers: got 0"),
    "cost_tp.py": (["--measured", "/nowhere"], "argument --measured: cannot read /nowhere"),
    "plant_faults.py": (["--mode", "Z"], "argument --mode: got Z, allowed are S, P"),
    "profile_step.py": (["--shape", "nosuch", "--steps", "24"], "model: no such folder: nosuch"),
    "rank_blocks.py": (["--heads", "x"], "argument --heads: 'x' is not a number"),
    "selftest.py": (["--model", "x"], "unknown argument --model"),
    "soak.py": (["--", "--dtype", "foo"], "argument --dtype: invalid choice: 'foo'"),
    "train_demo_model.py": (["--out", "/proc/x"], "--out: cannot make /proc/x"),
    "tune_attention.py": (["--prompts", "5"], "argument --prompts: '5' is not prompts such as "),
    "tune_experts.py": (["--routing", "x"], "argument --routing: got x, allowed are even, zipf"),
    "tune_kernels.py": (["--kernels", "nosuch"], "argument --kernels: got nosuch, allowed are "),
    "tune_narrow.py": (["--shapes", "x"], "argument --shapes: 'x' is not shapes such as "),
    "tune_products.py": (["--rows", "x"], "argument --rows: 'x' is not a number"),
    "tune_steps.py": (["--try", "decode=x"], "argument --try: 'decode=x': expected ENTRY="),
}  # fmt: skip
"""By script, arguments that are wrong, and what is said."""
QUICK = {"aot_table.py", "bench_scheduler.py", "cost_tp.py"}
"""Those that import no framework."""


def complaint(name, *arguments):
    """What a script ends with where its input is wrong."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_every_script_ends_as_a_program():
    for path in SCRIPTS.glob("*.py"):
        assert ("run_program(main)" in path.read_text()) == (path.name not in NO_PROGRAMS), path


def test_every_script_with_arguments_is_tried():
    names = {path.name for path in SCRIPTS.glob("*.py")}
    assert names - set(WRONG) == {"check_docs.py", "write_options.py"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in sorted(WRONG)],
)
def test_wrong_input_is_said(name):
    arguments, words = WRONG[name]
    assert words in complaint(name, *arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model": "demo", "sums_us": {}}', "argument --measured: it has no 'engines'; "),
        ('{"model": "demo", "engines": {}}', "argument --measured: it has no 'tp 1'; "),
        ("[]", "argument --measured: [] is not a JSON object"),
    ],
)
def test_results_of_another_kind_are_said(text, words, tmp_path):
    """As of bench_tp.py that ran other parts than the engines."""
    measured = tmp_path / "out.json"
    measured.write_text(text)
    assert words in complaint("cost_tp.py", "--measured", str(measured))


@pytest.mark.parametrize(
    ("shape", "at", "words"),
    [
        ("qwen3-0.6b", "config.json", "--folder: cannot make "),
        ("qwen3-0.6b", "", "--shape: got qwen3-0.6b, and "),
        ("gpt-oss-20b", "new", "--shape: got gpt-oss-20b, all experts of which are one tensor"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_said_at_once(shape, at, words, tmp_path):
    """A file in the folder's place, one of another model, and nothing is begun to be written."""
    shutil.copy(Path(model_folder("demo")) / "config.json", tmp_path)
    (tmp_path / "model.safetensors").touch()
    said = complaint("bench_load.py", "--shape", shape, "--folder", str(tmp_path / at))
    assert words in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("times", ["5", "0:1", "-1:1", "1:nan", "1:-3", "x:1", ","])
def test_times_that_are_none_are_said(times):
    said = complaint("cost_tp.py", f"--one={times}")
    assert f"argument --one: {times!r} is not times such as 1:3.8,64:5.3" in said


@pytest.mark.parametrize("text", [",", "", "0,4", "-4", "4,x"])
def test_numbers_that_are_too_few_or_too_low_are_said(text):
    with pytest.raises(argparse.ArgumentTypeError):
        whole_numbers(1)(text)
    assert whole_numbers(0)("0,4,4k") == [0, 4, 4000]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a: got 1,\n allowed is 2"), 2, "x: error: a: got 1, allowed is 2\n"),
        (BackendUnavailable("device: none"), 4, "x: error: device: none\n"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "No space left on device", "f"), 1, "x: error: cannot write f: No space left"),
    ],
    ids=str,
)
def test_the_end_of_a_program(error, code, said, capsys, monkeypatch):
    def work():
        raise error

    monkeypatch.setattr("twinfer.serving.program._drop_output", lambda: None)
    assert run_program(work, "x") == code
    assert capsys.readouterr().err.startswith(said)


def test_what_nobody_foresaw_is_not_hidden():
    def work():
        raise FileNotFoundError(2, "No such file or directory", "f")

    with pytest.raises(FileNotFoundError):
        run_program(work, "x")
    assert run_program(lambda: None, "x") == 0
    assert run_program(lambda: 3, "x") == 3


def test_a_figure_that_a_run_left_out_is_not_compared(tmp_path, monkeypatch, capsys):
    (tmp_path / "__init__.py").touch()  # a checkout
    monkeypatch.syspath_prepend(str(SCRIPTS))
    compare = importlib.import_module("compare_commits")
    left_out = {"left_out": "...", "requests": 8, "pages": 1}
    figures = {"decode": {"1": {"ms_per_step": 2.0, "tok_s": 500.0}, "8": {"ms_per_step": 4.0}}}
    there = dict(compare.seconds_of(figures))
    here = dict(compare.seconds_of({"decode": {**figures["decode"], "8": left_out}}))
    for before, after in ((there, here), (here, there)):
        runs = iter((before, after))
        monkeypatch.setattr(compare, "run", lambda *_, runs=runs: next(runs))
        argv = ["compare", "--against", f"before={tmp_path}", "--models", "demo"]
        monkeypatch.setattr(sys, "argv", argv)
        assert compare.main() == 0
        _, one, eight, _ = capsys.readouterr().out.splitlines()
        assert one.endswith("+0.00%")
        assert "decode 8" in eight
        assert eight.endswith("not in every run: a cache was too small")


def test_a_checkout_may_be_compared_with_itself(monkeypatch, capsys):
    """That tells how far two runs of one thing differ."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    compare = importlib.import_module("compare_commits")
    runs = iter(({"decode 1": 2.0}, {"decode 1": 3.0}))
    monkeypatch.setattr(compare, "run", lambda *_: next(runs))
    argv = ["compare", "--against", f"same={compare.HERE}", "--models", "demo"]
    monkeypatch.setattr(sys, "argv", argv)
    assert compare.main() == 1
    assert capsys.readouterr().out.splitlines()[1].endswith("+50.00%")
