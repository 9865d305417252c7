"""`twinfer generate`: records that name their prompts and survive an interrupt, streams,
sampling defaults.
"""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from twinfer.serving.cli import main
from twinfer.serving.generate import TextLines
from twinfer.serving.outputs import CompletionOutput, RequestOutput, StreamUpdate
from twinfer.shared.models.locate import model_folder
from twinfer.shared.scheduler import Scheduler

SIZES = "--dtype float32 --max-model-len 128 --max-num-seqs 16 --max-num-batched-tokens 64".split()
ENGINE = ["--backend", "torch", *SIZES]
COUNT = 1000
REFUSED = (3, 500, 998)


def generate(*words, model="demo"):
    return main(["generate", model, *ENGINE, *words])


def lines(capsys):
    """The records on standard output. NaN and its kin are no JSON."""
    out = capsys.readouterr().out
    return [
        json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in out.splitlines()
    ]


@pytest.fixture
def prompts(tmp_path):
    """A file of 1000 prompts, three of them empty, and what stands in it."""
    texts = ["" if index in REFUSED else f"x{index} = " for index in range(COUNT)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(texts) + "\n")
    return file, texts


def check_records(records, texts):
    """Every record names its prompt, none comes twice, and those that were refused say why."""
    assert len({record["index"] for record in records}) == len(records)
    for record in records:
        assert record["prompt"] == texts[record["index"]]
        if record["index"] in REFUSED:
            assert "is empty" in record["error"]
            assert "completion" not in record
        else:
            assert (record["completion"], record["finish_reason"], len(record["token_ids"])) == (
                0,
                "length",
                3,
            )
    assert [record["index"] for record in records[:3]] == list(REFUSED)


class Output(io.StringIO):
    """Standard output; `safe` is what was flushed."""

    safe = ""

    def flush(self):
        self.safe = self.getvalue()


def test_an_interrupt_loses_nothing_that_was_finished(prompts, monkeypatch):
    """It comes while the engine reads a step that ends requests, the worst moment."""
    file, texts = prompts
    output = Output()
    monkeypatch.setattr(sys, "stdout", output)
    finished = []
    update = Scheduler.update

    def interrupted(self, step, tokens):
        events = update(self, step, tokens)
        before = len(finished)
        finished.extend(request.request_id for request in events.finished)
        if before < 400 <= len(finished):
            os.kill(os.getpid(), signal.SIGINT)
        return events

    monkeypatch.setattr(Scheduler, "update", interrupted)
    assert (
        generate("--prompt-file", str(file), "--max-tokens", "3", "--json", "--ignore-eos") == 130
    )
    records = [json.loads(line) for line in output.safe.splitlines()]
    check_records(records, texts)
    done = [
        f"{record['request_id']}/{record['completion']}"
        for record in records
        if "error" not in record
    ]
    assert len(done) >= 400
    assert sorted(done) == sorted(finished)


def drain(terminal):
    """Read what a process says to its terminal, so that it can go on, until it ends."""
    with suppress(OSError):
        while os.read(terminal, 4096):
            pass
    os.close(terminal)


def test_records_are_written_as_they_end_and_a_bar_takes_none_of_them(prompts):
    """A process with a terminal for its errors and a pipe for its records, interrupted after
    fifty.
    """
    file, texts = prompts
    terminal, slave = pty.openpty()
    argv = [
        sys.executable,
        "-m",
        "twinfer",
        "generate",
        "demo",
        *ENGINE,
        "--prompt-file",
        str(file),
        "--json",
    ]
    process = subprocess.Popen(
        [*argv, "--max-tokens", "3", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    threading.Thread(target=drain, args=(terminal,), daemon=True).start()
    patience = threading.Timer(120, process.kill)
    patience.start()
    with process:
        first = [process.stdout.readline() for _ in range(50)]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait() == 130
    patience.cancel()
    records = [json.loads(line) for line in [*first, *rest.splitlines()]]
    check_records(records, texts)
    assert 50 <= len(records) < COUNT


def test_records_name_their_completion_in_the_order_of_the_prompts(capsys):
    words = [
        "--prompt-token-ids",
        "305,288",
        "--prompt",
        "def f(x):",
        "--prompt-token-ids",
        "5,9999",
    ]
    assert generate(*words, "--n", "2", "--max-tokens", "4", "--seed", "1", "--json") == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(
        "twinfer: error: prompt 2: prompt: token id 9999 "
    )
    records = sorted(
        map(json.loads, captured.out.splitlines()),
        key=lambda r: (r["index"], r.get("completion", 0)),
    )
    assert [(r["index"], r.get("completion")) for r in records] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, None),
    ]
    assert "prompt" not in records[0]
    assert records[0]["prompt_token_ids"] == [305, 288]
    assert records[2]["prompt"] == "def f(x):"
    assert len({record["request_id"] for record in records}) == 3
    assert records[0]["token_ids"] != records[1]["token_ids"]


def test_text_stands_in_the_order_of_the_prompts(capsys):
    words = ["--prompt", "import os", "--prompt", "", "--prompt", "class A", "--prompt", "x ="]
    assert generate(*words, "--temperature", "0", "--max-tokens", "3") == 2
    plain = capsys.readouterr().out
    starts = [plain.index(text) for text in ("import os", "class A", "x =")]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert generate(*words, "--temperature", "0", "--max-tokens", "3", "--stream") == 2
    assert capsys.readouterr().out == plain


class Script:
    """Updates as a stream of several prompts could have them, written to a `TextLines`."""

    def __init__(self, prompts, n, pieces):
        self.outputs = [
            RequestOutput(str(i), text, [5], [CompletionOutput(c) for c in range(n)])
            for i, text in enumerate(prompts)
        ]
        self.writer = TextLines(len(prompts), n, pieces=pieces, as_ids=False)

    def __call__(self, index, number, text, end=False):
        completion = self.outputs[index].outputs[number]
        completion.text += text
        completion.token_ids.append(7)
        if end:
            completion.finish_reason = "length"
        reason = completion.finish_reason
        self.writer.write(
            StreamUpdate(index, number, self.outputs[index], text, [7], finish_reason=reason)
        )

    def refuse(self, index):
        self.writer.write(StreamUpdate(index, 0, self.outputs[index], error=ValueError("no")))


@pytest.mark.parametrize("pieces", [False, True])
def test_what_ends_early_waits_for_its_turn(capsys, pieces):
    script = Script(["A", "B", "C", "D"], 2, pieces)
    script.refuse(1)
    script(2, 0, "c0", end=True)
    script(0, 1, "a1", end=True)
    script(0, 0, "a")
    assert capsys.readouterr().out == ("Aa" if pieces else "")
    script(0, 0, "0", end=True)
    assert capsys.readouterr().out == ("0\nAa1\nCc0\n" if pieces else "Aa0\nAa1\nCc0\n")
    script(3, 1, "d1", end=True)
    script(2, 1, "c1")
    assert capsys.readouterr().out == ("Cc1" if pieces else "")
    # An interrupt: what has ended is printed although a completion before it has not.
    script.writer.close()
    assert capsys.readouterr().out == ("\nDd1\n" if pieces else "Dd1\n")


def test_streamed_records_add_up_to_the_whole(capsys):
    words = [
        "--prompt",
        "def f(x):",
        "--prompt",
        "import",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "--logprobs",
        "1",
    ]
    words += ["--stop", "return", "--prompt-logprobs", "0", "--json"]
    assert generate(*words) == 0
    whole = {record["index"]: record for record in lines(capsys)}
    assert generate(*words, "--stream") == 0
    pieces = lines(capsys)
    assert len(pieces) > 10
    for index, record in whole.items():
        own = [piece for piece in pieces if piece["index"] == index]
        assert "".join(piece["text"] for piece in own) == record["text"]
        for name in ("token_ids", "logprobs"):
            assert [item for piece in own for item in piece[name]] == record[name]
        *before, last = own
        assert all("finish_reason" not in piece for piece in before)
        assert {
            name: last[name] for name in ("finish_reason", "stop_reason", "prompt_logprobs")
        } == {name: record[name] for name in ("finish_reason", "stop_reason", "prompt_logprobs")}
    assert whole[0]["stop_reason"] == "return"


def test_log_probabilities_of_the_best_and_of_the_token(capsys):
    words = [
        "--prompt",
        "def f(x):",
        "--max-tokens",
        "6",
        "--seed",
        "3",
        "--temperature",
        "2",
        "--json",
    ]
    assert generate(*words, "--logprobs", "3", "--prompt-logprobs", "2") == 0
    (record,) = lines(capsys)
    assert len(record["logprobs"]) == 6
    ranks = []
    for token, scored in zip(record["token_ids"], record["logprobs"], strict=True):
        assert scored["token_id"] == token
        assert [entry["rank"] for entry in scored["top"]] == [1, 2, 3]
        best = [entry["logprob"] for entry in scored["top"]]
        assert best == sorted(best, reverse=True)
        ranks.append(scored["rank"])
        if scored["rank"] <= 3:
            top = scored["top"][scored["rank"] - 1]
            assert (top["token_id"], top["logprob"]) == (token, scored["logprob"])
        else:
            assert scored["logprob"] < best[-1]
    assert max(ranks) > 3, "no token outside of the best: the case is not seen"
    first, *rest = record["prompt_logprobs"]
    assert first is None
    assert [scored["token_id"] for scored in rest] == record["prompt_token_ids"][1:]
    assert all(len(scored["top"]) == 2 for scored in rest)
    assert main(["generate", "demo", *ENGINE, *words[:-1], "--logprobs", "3"]) == 2
    assert "logprobs: is printed with --json only" in capsys.readouterr().err


def test_it_is_quiet_unless_asked(capsys):
    words = ["--prompt", "def f(x):", "--max-tokens", "2"]
    assert generate(*words) == 0
    assert capsys.readouterr().err == ""
    assert generate(*words, "-v") == 0
    report = capsys.readouterr().err
    assert "compile_level: None -> 0 (default on cpu)" in report
    assert "KV cache for 2048 tokens" in report


def test_chat_renders_what_a_user_says(capsys):
    assert (
        generate(
            "--prompt",
            "what is a list?",
            "--prompt",
            "\ud800",
            "--chat",
            "--max-tokens",
            "2",
            "--json",
        )
        == 2
    )
    refused, record = lines(capsys)
    assert refused["index"] == 1
    assert record["prompt"] == "# user: what is a list?\n# assistant:"
    assert generate("--prompt", "x", "--prompt-token-ids", "5", "--chat") == 2
    assert "chat: renders texts" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled model, and a function that writes its generation_config.json."""
    copy = tmp_path / "model"
    shutil.copytree(model_folder("demo"), copy)

    def write(**fields):
        (copy / "generation_config.json").write_text(json.dumps(fields))
        return str(copy)

    return write


def test_sampling_defaults_of_the_model(folder, capsys):
    model = folder(temperature=0.0, max_new_tokens=5, eos_token_id=0)
    words = ["--prompt", "def f(x):", "--json", "--seed", "1"]
    assert generate(*words, "-v", model=model) == 0
    captured = capsys.readouterr()
    assert "temperature: 1.0 -> 0.0 (generation_config.json)" in captured.err
    assert "max_tokens: 16 -> 5 (generation_config.json)" in captured.err
    greedy = json.loads(captured.out)["token_ids"]
    assert len(greedy) == 5
    assert generate(*words, "--max-tokens", "3", model=model) == 0
    assert lines(capsys)[0]["token_ids"] == greedy[:3]
    assert generate(*words, "--generation-config", "none", model=model) == 0
    dice = lines(capsys)[0]["token_ids"]
    assert len(dice) == 16
    assert dice[:5] != greedy


def test_a_default_that_cannot_be_had_is_named(folder, capsys):
    model = folder(temperature=-1.0)
    assert generate("--prompt", "x", model=model) == 2
    assert "generation_config.json: temperature: got -1.0" in capsys.readouterr().err
    assert (
        generate("--prompt", "x", "--max-tokens", "1", "--generation-config", "none", model=model)
        == 0
    )


def test_a_shape_needs_dummy_weights(capsys):
    words = ["--prompt-token-ids", "1,2", "--max-tokens", "1"]
    assert generate(*words, model="qwen3-0.6b") == 2
    assert "qwen3-0.6b is a shape without weights" in capsys.readouterr().err
    assert main(["plan", "qwen3-0.6b", "--backend", "torch"]) == 0
    assert "plan hash" in capsys.readouterr().out


def test_an_empty_folder_is_told_from_one_without_a_tokenizer(capsys, tmp_path):
    assert generate("--prompt", "x", model=str(tmp_path)) == 2
    assert "config.json: no such file" in capsys.readouterr().err


def test_a_shape_refuses_text_before_it_makes_its_weights(capsys, monkeypatch):
    monkeypatch.setattr("twinfer.serving.generate.LLM", None)  # a minute for a shape of 0.6B
    assert generate("--prompt", "x", "--load-format", "dummy", model="qwen3-0.6b") == 2
    words = "prompt: the model folder has no tokenizer.json, so text needs token ids"
    assert capsys.readouterr().err == f"twinfer: error: {words}\n"


def test_an_op_is_disabled_by_a_word_with_a_minus_sign(capsys):
    hashes = []
    for words in (
        ["--op-priority", "fused_add_rms_norm=triton"],
        ["--op-priority", "fused_add_rms_norm=triton", "--enable-ops", "-fused_add_rms_norm"],
    ):
        assert main(["plan", "demo", "--backend", "torch", *words, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["ops"]
        hashes.append(next(row for row in rows if row["op"] == "fused_add_rms_norm")["passed_over"])
    assert hashes[1][0] == "triton: the op is disabled" != hashes[0][0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "demo"],
        pytest.param(
            ["generate", "demo", *SIZES, "--prompt", "x", "--json"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_full_disk_is_one_line(command):
    argv = [sys.executable, "-m", "twinfer", *command, "--backend", "torch"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "twinfer: error: cannot write the output: No space left on device\n"
