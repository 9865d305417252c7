"""The words of `twinfer aot`: its flags, its progress, its table. What it compiles is in
tests/e2e/test_tpu_aot.py.
"""

import io

import pytest
from rich.console import Console

from twinfer.serving.cli import main
from twinfer.serving.progress import print_progress
from twinfer.shared.step_cost import Estimate
from twinfer.tpu import aot_cli
from twinfer.tpu.aot_report import AotReport, ProgramCost

TORCH_ONLY = ("--compile-level", "--cudagraph-mode", "--enforce-eager", "--compilation-config")


def help_of(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_the_help_has_no_flags_of_the_other_backend(capsys):
    words = help_of("aot", capsys)
    assert not [flag for flag in TORCH_ONLY if flag in words]
    assert all(
        flag in words for flag in ("--memory-utilization", "--gpu-memory-utilization", "--programs")
    )
    words = help_of("generate", capsys)
    assert all(flag in words for flag in (*TORCH_ONLY, "--memory-utilization"))


def test_a_device_that_is_no_tpu_is_refused(capsys):
    assert main(["aot", "demo", "--topology", "v6e:1x1", "--device", "cpu"]) == 2
    assert "device: got cpu, allowed are auto and tpu" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--memory-utilization", "--gpu-memory-utilization"])
def test_the_share_of_memory_is_a_flag_and_is_checked(flag, capsys):
    assert main(["plan", "--model", "demo", "--backend", "torch", flag, "1.5"]) == 2
    assert (
        "memory_utilization: got 1.5, allowed is a number from 0.05 to 1" in capsys.readouterr().err
    )


def test_progress_is_lines_where_there_is_no_terminal(capsys):
    print_progress("programs; backbone_decode_256 15 s", 1, 5)
    print_progress("load", 2, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "programs: 1 of 5 backbone_decode_256 15 s",
        "load: 2 of 2",
    ]


def test_the_report_says_what_was_chosen_and_what_was_left_out():
    report = AotReport(
        "m", "v6e:2x2", 4, 1, 2, "hash", 31 << 30, 1 << 30, 128, 7 << 20, ["page_size: None -> "
                                                                           "128 "
                                                                           "(why [not])"],
        num_pages=10, kv_tokens=1280, fits=True, ladder=83,
        besides={"code of all programs": 3 << 20},
        programs=[ProgramCost("backbone_decode_8", 1.0, 2 << 20, 0, 0, 0, {"all-reduce": 2}, {})],
        estimates=[Estimate("decode", 64, 1024, 3 << 30, 1e12, 65, 2 << 20, 4.0, 1.0, 0.5)],
        step_message=17 << 10,
    )  # fmt: skip
    console = Console(width=160, record=True, file=io.StringIO())
    aot_cli.show(report, console)
    text = console.export_text()
    assert "page_size: None -> 128 (why [not])" in text
    (line,) = [line for line in text.splitlines() if "decode, 64 of 1024 tokens" in line]
    assert [cell.strip() for cell in line.split("│")[2:-1]] == [
        "3.00 GiB",
        "4.00 ms",
        "1.00 ms",
        "0.50 ms: 65 of 2048 KiB",
        "4.50 ms",
    ]
    assert "each other host gets" not in text  # there is one
    assert report.as_dict()["estimates"][0]["ms"] == 4.5
    assert "1 of 83 programs: the largest of each kind" in text
    assert "besides the cache: code of all programs 3.00 MiB" in text
    assert "KV cache for 1280 tokens (10 pages of 7.00 MiB)" in text
    assert not {"GFLOP", "GB"} & set(text.split())
