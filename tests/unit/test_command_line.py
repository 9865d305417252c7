"""The parser: every option has a flag, every flag says its default, and what is mistyped is
named.
"""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest

from twinfer.serving import other_flags, parser
from twinfer.serving.cli import _parser
from twinfer.serving.flags import (
    ENGINE,
    SAMPLING,
    destination,
    engine_options,
    read_prompts,
    sampling_options,
)
from twinfer.serving.parser import OneLineParser, join_values, nearest, size
from twinfer.serving.serve_flags import model_behind_list
from twinfer.shared.compilation_config import LEVELS, MODE_STEPS, MODES
from twinfer.shared.config import EngineConfig
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.arguments import settle_model
from twinfer.shared.option_kinds import Number, Whole
from twinfer.shared.sampling_params import SamplingParams


def leaves(parser, name=""):
    """Parsers of all commands, by name."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return {name: parser}
    choices = [pair for action in below for pair in action.choices.items()]
    return {
        full: one
        for word, p in choices
        for full, one in leaves(p, f"{name} {word}".strip()).items()
    }


LEAVES = leaves(_parser()[0])


def parse(*words):
    arguments, unknown = _parser()[0].parse_known_args(join_values(words))
    return arguments, unknown


def test_what_is_not_said_is_left_to_the_defaults():
    arguments, _ = parse("generate", "demo")
    assert sampling_options(arguments) == {}
    assert arguments.backend == EngineConfig(model="demo").backend
    said, default = (
        EngineConfig(model="demo", **engine_options(arguments)),
        EngineConfig(model="demo"),
    )
    assert said.compilation() == default.compilation()
    assert dataclasses.replace(said, compilation_config=default.compilation_config) == default


def test_every_sampling_flag_reaches_its_parameter():
    said = {
        "n": 2, "max_tokens": 7, "min_tokens": 0, "temperature": 0.5, "top_k": 3, "top_p": 0.9,
        "min_p": 0.1, "seed": 4,
        "presence_penalty": -0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5,
        "logit_bias": {4: -2.5, 5: 1.0},
        "allowed_token_ids": [4, 5, 6], "banned_token_ids": [6], "stop": ["a", "-b"],
        "bad_words": ["a", "-b"],
        "stop_token_ids": [9], "banned_sequences": [[7, 8], [9, 9, 9]],
        "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "logprobs": 2,
        "prompt_logprobs": 1, "structured_outputs": {"choice": ["a", "b"]},
    }  # fmt: skip
    assert set(said) == set(SAMPLING)
    words = []
    for name, value in said.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True or value is False:
            words.append(flag if value else f"--no-{flag[2:]}")
        elif name in ("stop", "bad_words"):
            words += [flag, "a", flag, "-b"]
        elif name in ("structured_outputs", "banned_sequences"):
            words += [flag, json.dumps(value)]
        elif isinstance(value, dict):
            words += [flag, ",".join(f"{token}:{bias}" for token, bias in value.items())]
        else:
            words += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    arguments, unknown = parse("generate", "demo", *words)
    assert not unknown
    assert sampling_options(arguments) == said
    SamplingParams(**said)


@pytest.mark.parametrize("command", LEAVES)
def test_every_flag_has_help_and_says_its_default(command):
    parser = LEAVES[command]
    formatter = parser._get_formatter()
    for action in parser._actions:
        assert action.help, f"{action.dest} has no help"
        takes_value = bool(action.option_strings) and action.nargs != 0
        required = action.required or action.dest in ("model", "prompts")
        if takes_value and not required:
            text = formatter._get_help_string(action)
            assert "default" in text, f"{command} {action.option_strings[0]}: {text}"
        numeric = (
            action.type in (int, float, size) or action.dest in NUMERIC
        ) and not action.choices
        if takes_value and numeric and action.dest not in NO_RANGE:
            text = action.help.partition("(default")[0]
            assert re.search(r"\d|from max-", text), (
                f"{command} {action.option_strings[0]} says no range: {text}"
            )
    assert "None" not in parser.format_help()


NUMERIC = {
    destination(option)
    for option in [*ENGINE.values(), *SAMPLING.values()]
    if isinstance(option.kind, Whole | Number)
}
NO_RANGE = {"seed", "engine_seed"}
"""Numbers that may be any."""


@pytest.mark.parametrize("command", ["generate", "plan", "bench offline"])
def test_help_says_in_a_line_what_each_level_and_mode_does(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = [line.strip() for line in LEAVES[command].format_help().splitlines()]
    for value, meaning in [*LEVELS.items(), *MODE_STEPS.items()]:
        assert f"{value}: {meaning}" in lines
    assert set(MODE_STEPS) == set(MODES)


def test_documents_say_the_same_of_levels():
    text = (Path(__file__).parents[2] / "docs" / "compilation.md").read_text()
    for level, meaning in LEVELS.items():
        assert f"| {level} | {meaning} |" in text


def test_help_has_prompts_before_the_engine():
    text = LEAVES["generate"].format_help()
    places = [text.index(f"\n{title}:") for title in ("prompts", "sampling", "output", "engine")]
    assert places == sorted(places)


def test_the_benchmarks_help_says_their_own_defaults():
    text = " ".join(LEAVES["bench offline"].format_help().split())
    assert "from max-num-seqs (default: 8192)" in text
    assert "share pages of equal beginnings (default: off)" in text
    arguments, _ = parse("bench", "offline", "demo")
    options = engine_options(arguments)
    assert "(default: what the model allows, 4096 at most)" in text
    assert (options["max_model_len"], options["enable_prefix_caching"]) == (None, False)


@pytest.mark.parametrize(
    ("unknown", "flag"),
    [
        ("--temp", "--temperature"),
        ("--temprature", "--temperature"),
        ("--gpu-mem", "--gpu-memory-utilization"),
        ("--mem-fraction-static", "--memory-utilization"),
        ("--max-running-requests", "--max-num-seqs"),
        ("--disable-radix-cache", "--no-enable-prefix-caching"),
        ("--disable-cuda-graph", "--enforce-eager"),
        ("--backed", "--backend"),
        ("--num-scheduler-steps", "--decode-steps"),
        ("--tokenizer", None),
        ("--enable-expert-parallel", None),
        ("--xyzzy", None),
    ],
)
def test_the_flag_that_was_meant(unknown, flag):
    assert nearest(unknown, LEAVES["generate"].flags) == flag


def test_the_servers_flag_that_was_meant():
    flags = LEAVES["serve"].flags
    assert "--tool-call-parser" in other_flags.ELSEWHERE["--reasoning-parser"]
    assert nearest("--uvicorn-log-level", flags) is None


def test_the_flags_of_a_nested_command_are_its_own():
    arguments, _ = parse("bench", "latency", "demo", "--batch", "2")
    leaf = _parser()[0].leaf(arguments)
    assert leaf.prog == "twinfer bench latency"
    assert nearest("--batch", leaf.flags) == "--batch-size"
    assert isinstance(leaf, OneLineParser)


def test_a_value_may_begin_with_a_minus_sign():
    arguments, unknown = parse(
        "generate", "demo", "--enable-ops", "-rms_norm", "--prompt", "-x", "-v", "--stop", "-y"
    )
    assert (arguments.enable_ops, arguments.prompts, arguments.stop) == (
        ("-rms_norm",),
        [("--prompt", "-x")],
        ["-y"],
    )
    assert arguments.verbose
    assert not unknown
    assert join_values(["--prompt", "--json"]) == ["--prompt", "--json"]
    assert join_values(["--top-k", "-1"]) == ["--top-k", "-1"]
    assert join_values(["--decode-sizes", "-1,2"]) == ["--decode-sizes=-1,2"]


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--seed", "1"],
        ["--model", "demo"],
        ["--seed", "1", "demo"],
        ["--seed", "1", "--model", "demo"],
        ["demo", "--model", "demo"],
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["generate"], ["numerics", "model"], ["numerics", "logits"], ["numerics", "invariants"],
        ["numerics", "bisect"],
        ["numerics", "capture", "--out", "x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_model_is_named_in_one_way_everywhere(command, words):
    arguments, unknown = parse(*command, *words)
    assert settle_model(arguments, unknown) == []
    assert arguments.model == "demo"


@pytest.mark.parametrize(
    "command", [["plan"], ["aot", "--topology", "v6e:1x1"], ["bench", "offline"]], ids=" ".join
)
def test_also_by_commands_without_a_seed(command):
    for words in (["demo"], ["--model", "demo"], ["--num-pages", "5", "demo"]):
        arguments, unknown = parse(*command, *words)
        assert settle_model(arguments, unknown) == []
        assert arguments.model == "demo"


def test_no_model_and_two_models():
    with pytest.raises(ConfigError, match="model: none given; name it first, or with --model"):
        settle_model(*parse("generate"))
    with pytest.raises(ConfigError, match="model: got a and --model b"):
        settle_model(*parse("generate", "a", "--model", "b"))
    assert settle_model(*parse("generate", "a", "b")) == ["b"]


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
def test_the_model_behind_a_flag_of_several_values(flag):
    for words in ([flag, "one", "demo"], [flag, "one", "--model", "demo"], ["demo", flag, "one"]):
        arguments, unknown = parse("serve", *words)
        assert settle_model(arguments, unknown or model_behind_list(arguments)) == []
        assert arguments.model == "demo"
        assert getattr(arguments, flag[2:].replace("-", "_")) == ["one"]
    for words in (["demo", flag, "one", "two"], ["--model", "demo", flag, "one", "two"]):
        assert model_behind_list(parse("serve", *words)[0]) == []
    arguments, _ = parse("serve", flag, "one")
    with pytest.raises(ConfigError, match="model: none given"):
        settle_model(arguments, model_behind_list(arguments))


def test_answers_name_flags_that_a_command_has(capsys):
    for command, known in (("serve", True), ("generate", False)):
        with pytest.raises(SystemExit):
            LEAVES[command].refuse("--log-level")
        assert ("see --verbose" in capsys.readouterr().err) == known


@pytest.mark.parametrize(
    ("prefix", "kept"),
    [("/llm/", "/llm"), ("/", ""), ("", ""), ("/v1", "/v1"), ("/v1/modelsx", "/v1/modelsx")],
)
def test_a_prefix_ends_without_a_slash(prefix, kept):
    assert parse("serve", "demo", "--root-path", prefix)[0].root_path == kept


@pytest.mark.parametrize("prefix", ["llm", "/v1/models", "/v1/models/", "/v1/models/x"])
def test_a_prefix_that_cannot_be_told_from_a_path_is_refused(prefix, capsys):
    with pytest.raises(SystemExit):
        parse("serve", "demo", "--root-path", prefix)
    assert f"--root-path: got {prefix}, allowed is " in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["generate", "demo", "--banned-sequences"],
        ["generate", "demo", "--structured-outputs"],
        ["generate", "demo", "--compilation-config"],
        ["serve", "demo", "--default-chat-template-kwargs"],
    ],
    ids=lambda flags: flags[-1],
)
def test_values_that_are_no_json(flags, capsys):
    for text, words in {
        "[1,": "[1, is not JSON: ",
        "[" * 100_000: "... is nested too deeply",
        '"' + "a" * 5000: "... is not JSON: ",
    }.items():
        with pytest.raises(SystemExit):
            parse(*flags, text)
        (line,) = capsys.readouterr().err.splitlines()
        assert f"argument {flags[-1]}: " in line
        assert words in line
        assert len(line) < 300


def test_lists_that_are_too_long_to_show(capsys):
    with pytest.raises(SystemExit):
        parse("serve", "demo", "--allowed-origins", "[" * 100_000)
    (line,) = capsys.readouterr().err.splitlines()
    assert "..., allowed is a JSON list such as " in line
    assert len(line) < 300


def test_values_that_are_nested_too_deeply(capsys):
    for flag, value in (
        ("--allowed-origins", "[" * 100_000),
        ("--default-chat-template-kwargs", '{"a":' * 20_000),
    ):
        with pytest.raises(SystemExit):
            parse("serve", "demo", flag, value)
        assert f"argument {flag}" in capsys.readouterr().err


def test_prompts_stay_in_the_order_in_which_they_were_typed(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("c\n\nd\x0c\n")
    words = [
        "--prompt-token-ids",
        "1,2",
        "--prompt",
        "b",
        "--prompt-file",
        str(file),
        "--prompt",
        "e",
    ]
    arguments, _ = parse("generate", *words, "--prompt-token-ids", "3")
    assert read_prompts(arguments.prompts) == [[1, 2], "b", "c", "", "d\x0c", "e", [3]]
    again, _ = parse("generate", "--prompt", "x")
    assert read_prompts(again.prompts) == ["x"]


ELSEWHERE = """
    --tokenizer --tokenizer-mode --revision --hf-token --download-dir --trust-remote-code --seed -q
    --limit-mm-per-prompt --enable-lora --speculative-model --swap-space --cpu-offload-gb
    --pipeline-parallel-size -pp --enable-expert-parallel --reasoning-parser --max-log-len
    --enable-auto-tool-choice --chat-template-content-format --trust-request-chat-template
    --response-role --middleware --ssl-ca-certs --uvicorn-log-level --disable-log-stats
    --enable-log-requests --disable-log-requests --disable-uvicorn-access-log --max-logprobs
    --enable-prompt-tokens-details --enable-force-include-usage --api-server-count --headless
    --data-parallel-address --nnodes --calculate-kv-scales --max-seq-len-to-capture --config
    --guided-decoding-backend --structured-outputs-config --num-scheduler-steps --task --runner
    --disable-custom-all-reduce --attention-backend --max-num-partial-prefills --h11-max-header-count
    --enable-request-id-headers --return-tokens-as-token-ids --kv-transfer-config -O
    --tool-parser-plugin --tool-server --hf-overrides --model-impl --mem-fraction-static --tp-size
    --context-length --chunked-prefill-size --disable-radix-cache --model-path --log-level
    --shutdown-timeout -cc -dpl --enable-dbo --ubatch-size --moe-backend --attention-config
    --linear-backend --mamba-block-size --lora-dtype --kv-cache-dtype-skip-layers --kv-cache-metrics
    --cudagraph-metrics --additional-config --cohere-format --mm-processor-cache-gb
    --safetensors-load-strategy --performance-mode --logprobs-mode --enable-sleep-mode
    --disable-sliding-window --reasoning-config --prefix-caching-hash-algo --renderer-num-workers
""".split()
"""Flags in command lines of vLLM and SGLang that are none of ours."""
HERE = """
    --host --port --uds --api-key --served-model-name --ssl-keyfile --ssl-certfile --root-path
    --allowed-origins --allowed-methods --allowed-headers --allow-credentials --chat-template
    --default-chat-template-kwargs --generation-config --override-generation-config
    --tool-call-parser --dtype --quantization --load-format --max-model-len --max-num-seqs
    --max-num-batched-tokens --gpu-memory-utilization --kv-cache-memory-bytes --kv-cache-dtype
    --block-size --num-gpu-blocks-override --enable-prefix-caching --no-enable-prefix-caching
    --enable-chunked-prefill --scheduling-policy --async-scheduling --enforce-eager
    --compilation-config --tensor-parallel-size -tp --data-parallel-size -dp --device
    --distributed-executor-backend --otlp-traces-endpoint --max-num-queued-reqs
    --enable-server-load-tracking --stream-interval
""".split()
"""Those that are."""


def test_flags_of_vllm_are_taken_or_answered(capsys):
    """No guess by letters, and nothing named that no command has."""
    serve = LEAVES["serve"]
    known = set(serve._option_string_actions)
    every = known.union(*(leaf._option_string_actions for leaf in LEAVES.values()))
    assert set(HERE) <= known
    for flag in ELSEWHERE:
        with pytest.raises(SystemExit):
            serve.refuse(flag)
        said = capsys.readouterr().err
        words = other_flags.ELSEWHERE.get(flag)
        answer = (
            f"; did you mean {parser.OTHER_NAMES.get(flag)}?" if words is None else f": {words}"
        )
        assert said == f"twinfer serve: error: unknown argument {flag}{answer}\n"
    for flag, words in other_flags.ELSEWHERE.items():
        assert flag not in known
        named = set(re.findall(r"--[a-z][a-z-]+", words)) - {"--revision", "--local-dir"}
        assert named <= every, flag
    assert set(other_flags.OTHER_NAMES.values()) <= known


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("-O3", "-O3; did you mean --compile-level?"),
        ("-O.level=3", "-O.level=3; did you mean --compile-level?"),
        ("-cc.mode=3", "-cc.mode=3; did you mean --compilation-config?"),
        ("--no-enable-lora", "--no-enable-lora: it is so without it; leave it out"),
        ("--no-enable-log-requests", "--no-enable-log-requests: it is off unless it is asked for; leave it out"),
        ("--no-enable-prompt-tokens-details", "--no-enable-prompt-tokens-details: it is always so; leave it out"),
        ("--no-such-flag", "--no-such-flag"),
    ],
)  # fmt: skip
def test_other_forms_of_vllms_flags_are_answered(word, answer, capsys):
    with pytest.raises(SystemExit):
        LEAVES["serve"].refuse(word)
    assert capsys.readouterr().err == f"twinfer serve: error: unknown argument {answer}\n"


def test_values_of_vllm_are_answered(capsys):
    for (flag, value), words in other_flags.OTHER_VALUES.items():
        with pytest.raises(SystemExit):
            parse("serve", "demo", flag, value)
        assert f"got {value}; {words}" in capsys.readouterr().err
        if words.startswith("say "):
            parse("serve", "demo", flag, words.removeprefix("say "))
