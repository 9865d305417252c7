"""The commands capture, replay, invariants and bisect from the command line: exit codes, JSON,
JUnit.
"""

import json
from pathlib import Path

import pytest

from twinfer.serving.cli import main


@pytest.fixture
def model(small_model):
    return ["--model", small_model, "--load-format", "dummy"]


def run(*words):
    return main(["numerics", *map(str, words)])


def test_capture_and_replay(model, tmp_path, capsys):
    folder, result = tmp_path / "bundle", tmp_path / "result.json"
    assert run("capture", *model, "--on", "torch:cpu", "--steps", 1, "--out", folder) == 0
    assert "twinfer numerics replay" in capsys.readouterr().out
    assert (
        run("replay", folder, "--on", "torch:cpu", "--json", result, "--junit", tmp_path / "x.xml")
        == 0
    )
    assert json.loads(result.read_text())["environment"]["bundle"]["steps"] == 1
    assert run("replay", folder, "--on", "torch:cpu", "--plant", "rope-sign@1") == 1
    assert "layer.1" in capsys.readouterr().out
    assert run("capture", *model, "--on", "torch:cpu", "--out", folder) == 2
    steps = folder / "steps.jsonl"
    steps.write_bytes(steps.read_bytes()[:-1])
    assert run("replay", folder) == 3
    assert "truncated" in capsys.readouterr().err
    assert run("bisect", *model, "--bundle", folder, "--on", "torch:cpu", "--over", "knobs") == 2
    assert "bundle: --over knobs runs prompts" in capsys.readouterr().err


def test_invariants(model, tmp_path, capsys):
    result = tmp_path / "result.json"
    words = [
        "invariants",
        *model,
        "--on",
        "torch:cpu",
        "--mode",
        "S",
        "--relation",
        "repeat",
        "--relation",
        "page-permutation",
    ]
    assert run(*words, "--json", result) == 0
    assert {r["relation"] for r in json.loads(result.read_text())["results"]} == {
        "repeat",
        "page-permutation",
    }
    assert run(*words, "--plant", "slots-stale") == 1
    assert "page-permutation bitwise  BROKEN" in capsys.readouterr().out
    assert (
        run("invariants", *model, "--on", "torch:cpu", "--mode", "S", "--relation", "graphs") == 3
    )
    assert run("invariants", *model, "--on", "torch:cpu", "--relation", "nope") == 2
    assert run("invariants", *model, "--on", "torch:cpu", "--mode", "Q") == 2
    assert run("invariants", *model, "--on", "torch:tpu") == 4


def test_bisect(model, tmp_path, capsys):
    result, words = (
        tmp_path / "result.json",
        ["bisect", *model, "--on", "torch:cpu", "--mode", "S", "--steps", 1],
    )
    assert run(*words) == 0
    assert (
        run(*words, "--plant", "rope-sign@1", "--json", result, "--junit", tmp_path / "x.xml") == 1
    )
    record = json.loads(result.read_text())
    assert record["culprits"][0]["name"] == "layer.1.norm_rope_write_kv[q_norm]"
    assert record["runs"] <= record["bound"]
    assert "--plant b=rope-sign@1" in record["commands"][0]
    assert "<failure" in (tmp_path / "x.xml").read_text()
    assert run(*words[:-1], 0) == 2
    assert run(*words, "--json", tmp_path / "no" / "such" / "folder") == 2
    capsys.readouterr()


def test_bisect_takes_the_steps_of_a_bundle(model, tmp_path, capsys):
    folder = tmp_path / "bundle"
    words = ["--on", "torch:cpu", "--steps", 2]
    assert (
        run("capture", *model, *words, "--dtype", "float32", "--taps", "none", "--out", folder) == 0
    )
    assert (
        run("bisect", *model, *words, "--bundle", folder, "--mode", "S", "--plant", "kv-row-lost@0")
        == 1
    )
    assert "layer.0.norm_rope_write_kv" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--json", "--junit"])
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/no/such/file", "cannot write /no/such/file: No such file or directory"),
        ("/", "cannot write /: Is a directory"),
        ("", "cannot write '': No such file or directory"),
        ("\0", "cannot write '\\x00': embedded null byte"),
    ],
)
def test_a_file_that_cannot_be_written_is_found_out_before_the_work(flag, place, why, capsys):
    assert run("ops", "--op", "nobody_asks", flag, place) == 2
    assert capsys.readouterr().err == f"twinfer: error: {flag[2:]}: {why}\n"


@pytest.mark.parametrize(
    "words",
    [
        "model demo", "ops", "replay NONE", "invariants demo", "bisect demo", "served demo",
        "check demo", "quantization demo --scheme int8", "rollout demo", "logits demo",
        "compare NONE NONE", "selftest",
    ],
)  # fmt: skip
def test_no_command_works_for_a_result_that_it_cannot_write(words, capsys):
    assert run(*words.split(), "--json", "/no/such/file") == 2
    assert "error: json: cannot write /no/such/file: No such" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "model demo --a torch:cpu --b torch:tpu", "ops --op add --a torch:cpu --b torch:tpu",
        "served demo --on torch:cpu --on torch:tpu", "check demo --a torch:cpu --b torch:tpu",
        "rollout demo --a torch:cpu --b torch:tpu", "logits demo --a torch:cpu --b torch:tpu",
        "replay NONE --on torch:cpu --on torch:tpu",
        "selftest --backend torch:cpu --backend torch:tpu",
    ],
)  # fmt: skip
def test_no_side_works_before_all_devices_are_found(words, capsys):
    assert run(*words.split()) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("twinfer: error: device: torch has no tpu device here")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/dev/null/a", "out: cannot make the folder /dev/null/a: Not a directory"),
        ("a\0b", "out: cannot make the folder 'a\\x00b': embedded null byte"),
        ("/proc/none", "out: cannot make the folder /proc/none: No such file"),
        ("/", "is there already"),
    ],
)
def test_a_bundle_is_captured_only_where_it_can_be_written(place, why, model, capsys):
    assert run("capture", *model, "--on", "torch:cpu", "--out", place) == 2
    said = capsys.readouterr().err
    assert why in said
    assert "step" not in said


def test_what_was_not_there_is_not_there_after_a_refusal(tmp_path):
    old, new, link = (tmp_path / name for name in ("old.json", "new.json", "link.json"))
    old.write_text("kept")
    link.symlink_to("new.json")
    for place in (old, new, link):
        assert run("ops", "--op", "nobody_asks", "--json", place) == 2
    assert old.read_text() == "kept"
    assert not new.exists()
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seed", "-1"], "seed: got -1, allowed is 0 to 18446744073709551615"),
        (["--seed", 2**64], "seed: got 18446744073709551616, allowed is 0 to"),
        (["--tokens", 7], "tokens: got 7, allowed is 8 to 65536"),
        (["--tokens", 10**11], "tokens: got 100000000000, allowed is 8 to 65536"),
        (["--layers", ""], "layers: got '', allowed is such as 0-3,last below 2"),
    ],
)
def test_a_number_out_of_range_is_one_line(model, words, says, capsys):
    assert run("model", *model, "--a", "torch:cpu", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"twinfer: error: {says}")


@pytest.mark.parametrize("taps", ["", "paged_atention"])
def test_taps_that_nothing_matches_are_refused(model, tmp_path, taps, capsys):
    folder = tmp_path / "bundle"
    words = ["--on", "torch:cpu", "--steps", 1, "--out", folder, "--taps", taps]
    assert run("capture", *model, *words) == 2
    assert f"taps: got {taps!r}, which is the name of no op call" in capsys.readouterr().err
    assert not folder.exists()


def test_weights_that_no_machine_has_room_for_are_one_line(small_model, tmp_path, capsys):
    """15 TiB of them: before a worker begins to load."""
    config = json.loads((Path(small_model) / "config.json").read_text())
    wide = config | {"hidden_size": 2**15, "intermediate_size": 2**24}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    words = ["--model", tmp_path, "--load-format", "dummy", "--on", "torch:cpu"]
    assert run("capture", *words, "--out", tmp_path / "bundle") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "in which the weights take" in line
