"""`twinfer bench` on the bundled model, with small sizes."""

import json

import pytest

from twinfer.serving import bench_cli
from twinfer.serving.cli import main

ENGINE = (
    "--model demo --backend torch --dtype float32 --max-model-len 64 --max-num-seqs 2 "
    "--max-num-batched-tokens 16"
)
SIZES = """--batch-sizes 1,2 --input-len 8 --output-len 5 --prefill-prompts 2 --prefill-len 16 --mixed-requests 3
    --mixed-input 4,12 --mixed-output 2,6 --repeats 1 --ttft-repeats 1"""
FEW = "--batch-size 2 --input-len 8 --output-len 5 --iterations 2".split()
SKEWED = "--only skewed --skewed 40,3,1 --output-len 20 --page-size 4 --num-pages 16".split()
OFFLINE = ["bench", "offline", *ENGINE.split(), *SIZES.split()]


def bench(argv, tmp_path, device):
    file = tmp_path / "result.json"
    assert main([*argv, "--device", device, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_offline_figures(tmp_path, device, capsys):
    result = bench([*OFFLINE, "--only", "decode,prefill,ttft,mixed"], tmp_path, device)
    assert len(result["plan_hash"]) == 16
    assert result["versions"]["torch"]
    assert result["device"]["platform"] == device
    assert result["config"]["enable_prefix_caching"] is False
    assert not result["workload"]["standard"]
    assert result["compilations_after_ready"] == 0
    figures = result["figures"]
    assert list(figures) == ["decode", "prefill", "ttft", "mixed"]
    assert list(figures["decode"]) == ["1", "2"]
    for size, row in figures["decode"].items():
        assert row["tok_s"] == pytest.approx(int(size) / row["ms_per_step"] * 1e3)
        assert (row["share_of_limit"] is None) == (device == "cpu")
    assert figures["mixed"]["out_tokens"] >= 6
    out = capsys.readouterr().out
    for words in (
        "decode b=2",
        "prefill 2 x 16",
        "ttft 16",
        "requests/s",
        result["plan_hash"],
        "not the standard",
    ):
        assert words in out
    if device == "cpu":
        assert result["limits"]["note"].startswith("not measured on a CPU")


def test_where_tokens_are_guessed_a_step_is_no_token(tmp_path, device, capsys):
    """Figures are of a token then, with the tokens that come together."""
    guesses = ["--speculative-config", '{"num_speculative_tokens": 3}', "--max-num-seqs", "8"]
    sizes = ["--only", "decode,skewed", "--output-len", "40", "--skewed", "20,3,1"]
    figures = bench([*OFFLINE, *sizes, *guesses], tmp_path, device)["figures"]
    for size, row in figures["decode"].items():
        assert row["tok_s"] == pytest.approx(int(size) / row["ms_per_token"] * 1e3)
        assert 1 < row["tokens_per_step"] <= 4
        assert "ms_per_step" not in row
    assert 1 <= figures["skewed"]["tokens_per_full_step"] <= 4
    latency = ["bench", "latency", *ENGINE.split(), *FEW, "--output-len", "40", *guesses]
    figures = bench(latency, tmp_path, device)["figures"]
    assert figures["per_token_ms"]["count"] == figures["request_ms"]["count"] == 4
    assert 1 < figures["tokens_per_step"] <= 4
    out = capsys.readouterr().out
    assert "ms a token" in out
    assert "ms a step" not in out
    assert out.count(" tokens a step") == 3
    assert "tokens that a request keeps of a step" in out
    assert "mean per token, b=2" in out


def test_a_batch_that_the_cache_does_not_hold_is_left_out(tmp_path, device, capsys):
    argv = [*OFFLINE, "--only", "decode", "--page-size", "4", "--num-pages", "5"]
    decode = bench(argv, tmp_path, device)["figures"]["decode"]
    assert "ms_per_step" in decode["1"]
    assert "ms_per_step" not in decode["2"]
    needed = "2 requests of 13 tokens need 6 pages at once, the KV cache has 5"
    assert decode["2"]["left_out"] == needed
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "decode b=2" in line)
    assert "left out" in line
    assert "13 tokens each: 6 pages, there are 5" in line


def test_a_length_that_no_part_runs_needs_no_room(tmp_path, device):
    argv = [*OFFLINE, "--only", "prefill", "--input-len", "128"]
    assert bench(argv, tmp_path, device)["figures"]["prefill"]["tok_s"] > 0
    argv = [*OFFLINE, "--only", "decode", "--input-len", "128", "--contexts", "8"]
    assert list(bench(argv, tmp_path, device)["figures"]["decode"]) == ["1 of 8", "2 of 8"]


def test_the_usual_length_is_not_above_the_models(monkeypatch):
    """The bundled model has 1 024 positions; nobody typed 4 096."""
    lengths = []

    def note(arguments, folder, options):
        lengths.append(options["max_model_len"])
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_cli, "_offline", note)
    for typed in ([], ["--max-model-len", "64"]):
        main(["bench", "offline", "demo", "--backend", "torch", *typed])
    assert lengths == [1024, 64]


def test_long_contexts(tmp_path, device, capsys):
    """One long request among short ones, and a chat whose past is cached."""
    argv = [*OFFLINE, "--only", "skewed,turns", "--skewed", "40,3,1", "--turns", "20,3,2"]
    argv += ["--output-len", "20", "--max-num-batched-tokens", "8", "--page-size", "4"]
    assert main([*argv, "--device", device]) == 2
    assert "enable_prefix_caching: got False, turns need it" in capsys.readouterr().err
    result = bench([*argv, "--enable-prefix-caching"], tmp_path, device)
    assert result["figures"]["skewed"]["full_steps"] >= 8
    assert len(result["figures"]["turns"]["runs_ms"]) == 3
    out = capsys.readouterr().out
    assert "one of 40 among 1 of 3" in out
    assert "3 turns of 2 after 20" in out


@pytest.mark.slow
def test_start_is_measured_in_processes_of_their_own(tmp_path, device):
    start = bench([*OFFLINE, "--only", "start"], tmp_path, device)["figures"]["start"]
    for row in start.values():
        assert set(row["phases"]) >= {"load", "programs"}
        parts = row["interpreter_s"] + row["import_s"] + row["init_s"]
        assert row["ready_s"] == pytest.approx(parts)
        assert sum(row["phases"].values()) <= row["init_s"]
    assert list(start) == ["cold", "warm"]


def test_latency_percentiles(tmp_path, device, capsys):
    argv = [
        "bench",
        "latency",
        *ENGINE.split(),
        *FEW,
    ]
    figures = bench(argv, tmp_path, device)["figures"]
    assert figures["ttft_ms"]["count"] == figures["request_ms"]["count"] == 4
    assert figures["per_token_ms"]["count"] == 4 * 4
    assert figures["ttft_ms"]["p50"] < figures["request_ms"]["p50"]
    assert figures["per_token_ms"]["p50"] <= figures["per_token_ms"]["p99"]
    assert "p99" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([*OFFLINE, "--only", "decode,speed"], "speed"),
        ([*OFFLINE, "--batch-sizes", "1,4"], "max_num_seqs"),
        ([*OFFLINE, "--batch-sizes", "one"], "one"),
        ([*OFFLINE, "--prefill-len", "64"], "max_model_len"),
        ([*OFFLINE, "--json", "/no/such/folder/file.json"], "/no/such/folder"),
        ([*OFFLINE, "--model", "qwen3-0.6b"], "load_format"),
        ([*OFFLINE, "--only", "start", "--op-priority", "rms_norm=cutlass"], "cutlass"),
        (["bench", "latency", *ENGINE.split(), "--batch-size", "3"], "batch_size"),
        (
            ["bench", "latency", *ENGINE.split(), *FEW, "--num-pages", "1"],
            "batch_size: got 2, 2 requests of 13 tokens need 2 pages at once, the KV cache has 1:",
        ),
        (
            [*OFFLINE, "--only", "decode", "--batch-sizes", "2", "--num-pages", "1"],
            "batch_sizes: got (2,), 2 requests of 13 tokens need 2 pages at once",
        ),
        ([*OFFLINE, *SKEWED], "skewed: got (40, 3, 1), 2 requests of 64 tokens need 23 pages"),
        (["bench", "offline"], "--model"),
        (["bench"], "WORKLOAD"),
        ([*OFFLINE, "--json", ""], "--json: cannot write '': No such file"),
        (["bench", "serve", "--base-url", "host:8000"], "allowed is a URL such as http://"),
        (["bench", "serve", "--base-url", ""], "--base-url: got '', allowed is a URL"),
        (["bench", "serve", "--base-url", "http://host:99999"], "--base-url: got 'http://host:9"),
        (["bench", "serve", "--num-prompts", "0"], "--num-prompts: got 0, allowed is 1 to"),
        (["bench", "serve", "--num-prefixes", "0"], "--num-prefixes: got 0, allowed is 1 to"),
        (["bench", "serve", "--max-concurrency", "0"], "--max-concurrency: got 0, allowed is 1 to"),
        (["bench", "serve", "--goodput", "ttft:-5"], "goodput: got ttft:-5, must be"),
        (["bench", "serve", "--burstiness", "x"], "--burstiness: got 'x', must be a number"),
        (["bench", "serve", "--metric-percentiles", ""], "got '', must be a number"),
        (["bench", "serve", "--json", "/no/such/file"], "json: cannot write /no/such/file"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(argv, named, capsys):
    try:
        code = main(argv)
    except SystemExit as left:
        code = left.code
    assert code == 2
    captured = capsys.readouterr()
    assert named in captured.err.splitlines()[-1]
    assert "Traceback" not in captured.err
