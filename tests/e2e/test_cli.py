"""The command line: JSON lines, several prompts, one-line errors with exit code 2, and the demo."""

import json
import os
import re
import subprocess
import sys

import pytest

from twinfer import LLM
from twinfer.serving.cli import main, size
from twinfer.serving.demo import Result, compare

SMALL = "--dtype float32 --max-model-len 128 --max-num-seqs 4 --max-num-batched-tokens 32".split()
GENERATE = ["generate", "--model", "demo", "--backend", "torch", *SMALL]


def test_json_lines(capsys, device):
    argv = [
        *GENERATE,
        "--device",
        device,
        "--prompt",
        "def f(x):",
        "--prompt-token-ids",
        "305, 288",
        "--max-tokens",
        "5",
    ]
    assert main([*argv, "--temperature", "0", "--seed", "1", "--ignore-eos", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    records.sort(key=lambda record: record["index"])
    assert len(records) == 2
    for record in records:
        assert set(record) == {
            "index", "request_id", "completion", "prompt_token_ids", "token_ids", "text",
            "finish_reason",
            "stop_reason", "backend", "device", "dtype",
        } | ({"prompt"} if record["index"] == 0 else set())  # fmt: skip
        assert len(record["token_ids"]) == 5
        assert (record["backend"], record["device"], record["dtype"]) == (
            "torch",
            device,
            "float32",
        )
        assert record["finish_reason"] == "length"
    assert records[1]["prompt_token_ids"] == [305, 288]


def test_a_prompt_file_and_one_bad_prompt_among_good_ones(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("import os\n\nclass A:\n")
    assert main([*GENERATE, "--prompt-file", str(file), "--max-tokens", "3", "--json"]) == 2
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert sorted((record["index"], "error" in record) for record in records) == [
        (0, False),
        (1, True),
        (2, False),
    ]
    complaints = [line for line in captured.err.splitlines() if "error" in line]
    assert complaints == [
        "twinfer: error: prompt 1: prompt: is empty: at least one token is needed"
    ]


def test_a_chat_is_rendered_by_the_template_that_is_given(capsys, device, tmp_path):
    file = tmp_path / "a.jinja"
    file.write_text("<{{ messages[0].role }}>{{ messages[0].content }}")
    for given in (str(file), file.read_text()):
        argv = [*GENERATE, "--device", device, "--prompt", "x", "--max-tokens", "1", "--json"]
        assert main([*argv, "--chat", "--chat-template", given]) == 0
        assert json.loads(capsys.readouterr().out)["prompt"] == "<user>x"


BAD = {
    "missing folder": (["--model", "/no/such", "--prompt", "x"], "/no/such"),
    "no prompt": (["--model", "demo"], "prompt"),
    "missing prompt file": (["--model", "demo", "--prompt-file", "/no/such"], "/no/such"),
    "negative temperature": (
        ["--model", "demo", "--prompt", "x", "--temperature", "-0.5"],
        "temperature",
    ),
    "no tokens": (["--model", "demo", "--prompt", "x", "--max-tokens", "0"], "max_tokens"),
    "not a number": (["--model", "demo", "--prompt", "x", "--max-tokens", "many"], "max-tokens"),
    "token ids": (["--model", "demo", "--prompt-token-ids", "1,b"], "1,b"),
    "stop list": (
        ["--model", "demo", "--prompt", "x", *[a for i in range(17) for a in ("--stop", str(i))]],
        "stop",
    ),
    "short flag": (
        ["--model", "demo", "--prompt", "x", "--temp", "1"],
        "did you mean --temperature?",
    ),
    "a chat template that is no file": (
        ["demo", "--chat", "--prompt", "x", "--chat-template", "/nowhere.jinja"],
        "chat-template: cannot read /nowhere.jinja: No such file or directory; allowed is a file",
    ),
    "a broken chat template": (
        ["demo", "--chat", "--prompt", "x", "--chat-template", "{% for %}"],
        "chat-template: the text: line 1",
    ),
    "a chat template without a chat": (
        ["demo", "--prompt", "x", "--chat-template", "{{ messages }}"],
        "chat-template: is for --chat",
    ),
    "no model": (["--prompt", "x"], "model: none given"),
    "two models": (["demo", "--model", "other", "--prompt", "x"], "got demo and --model other"),
    "two words": (["demo", "other", "--prompt", "x"], "unknown argument other"),
    "no such number": (
        ["demo", "--prompt", "x", "--backend", "torch", "--device", "cpu:7"],
        "cpu:7",
    ),
    "no such number on any backend": (["demo", "--prompt", "x", "--device", "cpu:7"], "cpu:7"),
    "scales that float32 has not": (
        ["demo", "--prompt", "x", "--kv-cache-dtype", "int8", "--kv-cache-scales", "1e-300,1"],
        "kv_cache_scales: got (1e-300, 1.0), allowed are scales from 2**-126 to 2**126",
    ),
    "a list that begins with a minus sign": (
        ["demo", "--prompt", "x", "--kv-cache-scales", "-1,1"],
        "kv_cache_scales: got (-1.0, 1.0), allowed",
    ),
    "odd device": (["demo", "--prompt", "x", "--device", "gpu0"], "gpu0"),
    "bias": (["demo", "--prompt", "x", "--logit-bias", "5"], "'5' is not a list such as 42:5"),
    "two cache sizes": (
        ["demo", "--prompt", "x", "--num-pages", "8", "--kv-cache-memory", "1G"],
        "kv_cache_memory",
    ),
    "unknown flag": (["--model", "demo", "--prompt", "x", "--temprature", "1"], "--temperature"),
    "infinite size": (["--model", "demo", "--prompt", "x", "--max-model-len", "infk"], "infk"),
    "a hole in token ids": (["--model", "demo", "--prompt-token-ids", "1,,2"], "1,,2"),
    "too many pages": (
        ["--model", "demo", "--backend", "torch", "--prompt", "x", "--num-pages", "100G"],
        "num_pages",
    ),
    "a very long name": (["--model", "a" * 5000, "--prompt", "x"], "model"),
    "unknown backend": (["--model", "demo", "--prompt", "x", "--backend", "mxnet"], "mxnet"),
    "no such device": (
        ["--model", "demo", "--prompt", "x", "--backend", "torch", "--device", "tpu"],
        "tpu",
    ),
    "level for jax": (
        ["--model", "demo", "--backend", "jax", "--prompt", "x", "--compile-level", "2"],
        "compile_level",
    ),
    "too long a limit": (
        ["--model", "demo", "--prompt", "x", "--max-model-len", "32K"],
        "max_model_len",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name, capsys):
    argv, named = BAD[name]
    try:
        code = main(["generate", *argv])
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    assert code == (4 if name.startswith("no such") else 2)
    assert captured.out == ""
    line = captured.err.splitlines()[-1]
    assert line.startswith("twinfer")
    assert named in line
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--hosts", "0"], "hosts, host_index: got 0, 0, without --coordinator allowed are 1, 0"),
        (["--host-index", "5"], "hosts, host_index: got 1, 5, without --coordinator"),
    ],
)
def test_hosts_without_a_coordinator_are_refused(words, named, capsys):
    assert main([*words, "generate", "demo", "--backend", "torch", "--prompt", "x"]) == 2
    assert named in capsys.readouterr().err


def test_a_flag_of_all_commands_behind_the_command_is_told_where_it_stands(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "demo", "--hosts=2", "--prompt", "x"])
    line = capsys.readouterr().err
    assert (
        line == "twinfer: error: --hosts stands before the command: twinfer --hosts ... generate\n"
    )


@pytest.mark.parametrize(
    "flag",
    ["host", "uds", "admin-uds", "served-model-name", "ssl-certfile", "otlp-traces-endpoint"],
)
def test_a_server_takes_no_empty_text(flag, capsys):
    """An empty host would be all addresses of the machine, an empty path of a socket none."""
    with pytest.raises(SystemExit) as left:
        main(["serve", "demo", "--backend", "torch", "--port", "0", f"--{flag}", ""])
    assert left.value.code == 2
    line = capsys.readouterr().err
    assert line == (
        f"twinfer serve: error: argument --{flag}: got '', allowed is a text that is not empty\n"
    )


@pytest.mark.parametrize("key", ["secret\n", " secret", "schl\u00fcssel", "a\tb"])
def test_a_server_takes_no_key_that_nobody_can_send(key, monkeypatch, capsys):
    monkeypatch.setenv("TWINFER_API_KEY", key)
    assert main(["serve", "demo", "--backend", "torch", "--port", "0"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("twinfer: error: api-key, TWINFER_API_KEY: got one that no client can")
    assert "secret" not in line


def test_a_server_takes_no_empty_key(monkeypatch, capsys):
    """A secret that is empty by mistake would let everybody in."""
    monkeypatch.setenv("TWINFER_API_KEY", "")
    assert main(["serve", "demo", "--backend", "torch", "--uds", "/no/such/folder/x"]) == 2
    assert "api-key, TWINFER_API_KEY: got an empty one" in capsys.readouterr().err


@pytest.mark.parametrize("ours", ["", "k"])
def test_a_secret_for_another_server_lets_nobody_in_in_silence(ours, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    if ours:
        monkeypatch.setenv("TWINFER_API_KEY", ours)
    assert main(["serve", "demo", "--backend", "torch", "--uds", "/no/such/folder/x"]) == 2
    said = "VLLM_API_KEY is not read, so all may enter; TWINFER_API_KEY is"
    assert (said in caplog.text) == (not ours)
    assert "secret" not in caplog.text


def test_a_server_starts_no_thousands_of_engines(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "demo", "--backend", "torch", "--dp", "100000"])
    assert (
        "--data-parallel-size/--dp/-dp: got 100000, allowed is 1 to 256" in capsys.readouterr().err
    )


def test_an_output_that_is_closed_is_said_at_once():
    command = f"exec {sys.executable} -P -m twinfer generate demo --prompt x >&-"
    told = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    line = "twinfer: error: cannot write the output: it is closed\n"
    assert (told.returncode, told.stderr) == (1, line)


def test_errors_that_nobody_reads_are_no_results():
    command = f"exec {sys.executable} -P -m twinfer generate /nowhere --prompt x 2>&-"
    told = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout) == (2, "")


@pytest.fixture
def broken_folder(tmp_path):
    """A copy of the bundled model for a test to break."""
    import shutil

    from twinfer.shared.models.locate import model_folder

    folder = tmp_path / "model"
    shutil.copytree(model_folder("demo"), folder)
    return folder


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_weights_that_no_machine_has_room_for_are_one_line(broken_folder, backend, capsys):
    """15 TiB of them. A system that lets a process ask for more than there is would kill it later."""
    rewrite_config(broken_folder, hidden_size=2**15, intermediate_size=2**24)
    words = ["--load-format", "dummy", "--backend", backend, "--device", "cpu"]
    assert main(["generate", str(broken_folder), *words, "--prompt", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"error: dtype: got bfloat16, in which the weights take 15\d+\.\d GiB; this machine has",
        line,
    )


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").write_text("{"), ["config.json"]),
        (lambda f: (f / "config.json").unlink(), ["config.json"]),
        (lambda f: rewrite_config(f, architectures=["MambaForCausalLM"]), ["MambaForCausalLM"]),
        (lambda f: rewrite_config(f, hidden_act="gelu"), ["hidden_act", "gelu"]),
        (lambda f: rewrite_config(f, attention_sink=True), ["attention_sink"]),
        (lambda f: rewrite_config(f, intermediate_size=512), ["mlp", "512", "608"]),
        (lambda f: (f / "model.safetensors").unlink(), ["safetensors"]),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x08"), ["model.safetensors"]),
        (lambda f: truncate(f / "model.safetensors"), ["model.safetensors"]),
        (lambda f: (f / "tokenizer.json").write_text("[]"), ["tokenizer.json"]),
    ],
)
def test_a_broken_model_folder_is_named(broken_folder, damage, words, backend, capsys):
    damage(broken_folder)
    before = sorted(p.name for p in broken_folder.iterdir())
    assert (
        main(["generate", "--model", str(broken_folder), "--backend", backend, "--prompt", "x"])
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.splitlines()[-1]
    assert line.startswith("twinfer: error: ")
    for word in words:
        assert word in line
    assert sorted(p.name for p in broken_folder.iterdir()) == before


def truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def test_sizes():
    assert [size(text) for text in ("7", "32K", "32k", "1.5G")] == [7, 32768, 32000, 3 * 2**29]


def test_plan_prints_a_provider_for_every_op_and_kind(capsys):
    for backend in ("jax", "torch"):
        assert main(["plan", "--model", "demo", "--backend", backend, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        rows = {(row["op"], row["kind"]): row for row in record["ops"]}
        assert {op for op, _ in rows} >= {"fused_add_rms_norm", "paged_attention", "sample"}
        assert {kind for _, kind in rows} == {"decode", "mixed", "sample"}
        assert all(row["provider"] and len(row["uuid"]) == 16 for row in record["ops"])
        assert all(
            row["contract"]["rounds"] == row["rounds"] and "dot" in row["contract"]
            for row in record["ops"]
        )
        assert len(record["cache_key"]) == 64
        assert list(record)[-1] == "plan_hash"
        assert len(record["plan_hash"]) == 16


def test_the_plan_of_shards_that_are_given_heads_of_zeros(capsys):
    """Its layers are planned with those heads, the report names the model's own."""
    assert main(["plan", "demo", "--backend", "jax", "--tp", "3", "--json"]) == 0
    (kind,) = json.loads(capsys.readouterr().out)["layer_kinds"]
    assert kind["attention"] == "4 heads of 64, all tokens"
    assert kind["chosen"] == {"decode": "native", "mixed": "native"}


def test_the_plan_of_several_ranks_is_that_of_each(capsys):
    """With the sums over ranks, and the embedding of a rank's own words."""
    words = [*SMALL, "--tp", "2", "--device", "cpu"]
    assert main(["plan", "demo", "--backend", "torch", "--json", *words]) == 0
    record = json.loads(capsys.readouterr().out)
    layers = {row["op"] for row in record["ops"] if row["kind"] == "decode"}
    assert {"all_reduce", "reduce_add_rms_norm", "vocab_parallel_embedding"} <= layers
    assert "embedding" not in layers
    (kind,) = record["layer_kinds"]
    assert kind["attention"] == "4 heads of 64, all tokens"


def test_the_plan_of_quantised_weights_is_that_of_the_engine(capsys):
    words = [*SMALL, "--quantization", "int4_g32", "--device", "cpu"]
    assert main(["plan", "demo", "--backend", "torch", "--json", *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "linear_grouped" in {row["op"] for row in record["ops"]}
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_seqs": 4}
    with LLM("demo", backend="torch", quantization="int4_g32", **options) as llm:
        assert llm.engine.worker.plan_hash() == record["plan_hash"]


def test_the_plan_as_a_table_says_why_a_provider_was_passed_over(capsys):
    flags = ["--op-priority", "rms_norm=triton", "--enable-ops", "all,-rms_norm"]
    assert main(["plan", "--model", "demo", "--backend", "torch", *flags]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("plan hash ")
    op, kind, provider, by, uuid, *rest = next(
        line.split() for line in lines if line.startswith("rms_norm ")
    )
    assert (op, kind, provider, by, len(uuid)) == ("rms_norm", "decode", "native", "native", 16)
    assert " ".join(rest) == (
        "deterministic rounds once, at the output passed over: triton: the op is disabled; "
        "c: the op is disabled"
    )


def test_the_plan_shows_what_the_model_calls_and_the_rest_when_asked(capsys):
    def ops(*flags):
        assert main(["plan", "--model", "demo", "--backend", "torch", "--json", *flags]) == 0
        record = json.loads(capsys.readouterr().out)
        return {(row["op"], row["kind"]) for row in record["ops"]}, record["plan_hash"]

    (called, plan_hash), (everything, same_hash) = ops(), ops("--all")
    names = {op for op, _ in called}
    assert {"fused_add_rms_norm", "gated_mlp", "silu_and_mul", "sample"} <= names
    assert not names & {"lora_shrink", "moe_experts", "layer_norm", "column_linear"}
    assert ("sample", "decode") not in called
    assert ("paged_attention", "sample") not in called
    assert called < everything
    assert {kind for op, kind in everything if op == "lora_shrink"} == {"-"}
    assert plan_hash == same_hash


def test_the_plan_is_the_same_compiled_and_eager(capsys):
    hashes = set()
    for level in ("0", "2"):
        assert (
            main(["plan", "--model", "demo", "--backend", "torch", "--compile-level", level]) == 0
        )
        hashes.add(capsys.readouterr().out.splitlines()[-1])
    assert len(hashes) == 1
    assert hashes.pop().startswith("plan hash ")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--op-priority", "rms_norm=cutlass"], "cutlass"),
        (["--op-priority", "rms_norm"], "rms_norm"),
        (["--enable-ops", "all,none"], "none"),
        (["--enable-ops", "all,-rms"], "-rms"),
    ],
)
def test_a_bad_plan_is_refused(argv, named, capsys):
    try:
        code = main(["plan", "--model", "demo", *argv])
    except SystemExit as left:
        code = left.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_the_demo_compares_all_tokens(xla_flags):
    done = subprocess.run(
        [sys.executable, "-m", "twinfer", "demo", "--max-tokens", "16"],
        env=os.environ | xla_flags,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    equal, total = last.removeprefix("tokens equal: ").split("/")
    assert equal == total
    assert int(total) > 100
    assert "jax on" in done.stdout
    assert "torch on" in done.stdout


def result(tokens, margin, shift=0.0):
    """A completion whose best two tokens at each place are its own and token 99, `margin` apart."""
    return Result("", tokens, [{str(t): -0.5 + shift, "99": -0.5 + shift - margin} for t in tokens])


def test_a_difference_is_real_unless_it_is_a_proven_tie():
    same = compare([result([1, 2, 3], 1.0)], [result([1, 2, 3], 1.0, 1e-6)])
    assert (same.equal, same.total, same.real) == (3, 3, 0)
    real = compare([result([1, 2, 3], 1.0)], [result([1, 99, 3], 1.0, 1e-6)])
    assert (real.equal, real.total, real.real) == (1, 3, 1)
    left = Result("", [1, 2], [{"1": -0.1, "9": -3.0}, {"2": -0.7, "3": -0.7 - 1e-6}])
    right = Result("", [1, 3], [{"1": -0.1 - 1e-6, "9": -3.0}, {"3": -0.7, "2": -0.7 - 1e-6}])
    tie = compare([left], [right])
    assert (tie.equal, tie.total, tie.real) == (1, 2, 0)
    shorter = compare([result([1, 2, 3], 1.0)], [result([1, 2], 1.0, 1e-6)])
    assert shorter.real == 1
