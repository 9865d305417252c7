"""The command line: `twinfer generate | demo | plan | bench | aot | numerics`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..numerics.cli import add_parsers as add_numerics_parsers
from ..shared.compilation_config import MODES
from ..shared.config import BACKEND_CHOICES, COMPILE_LEVELS, DEVICES, DTYPES, LOAD_FORMATS, POLICIES
from ..shared.errors import ConfigError, RequestError, TwinferError
from ..shared.kv_config import KV_DTYPES
from ..shared.sampling_params import SamplingParams
from .aot import add_flags as add_aot_flags
from .bench_cli import add_parsers as add_bench_parsers
from .outputs import CompletionOutput, RequestOutput

UNITS = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


class OneLineParser(argparse.ArgumentParser):
    """Complains in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the complaint and leave with exit code 2."""
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)

    def refuse(self, unknown: str) -> NoReturn:
        """Complain about an argument that this command does not know, naming the nearest flag."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        near = difflib.get_close_matches(unknown.split("=")[0], flags, 1)
        self.error(f"unknown argument {unknown}" + (f"; did you mean {near[0]}?" if near else ""))


def size(text: str) -> int:
    """A whole number, with a unit if one likes: 4096, 32k (thousands), 32K (1024)."""
    unit = UNITS.get(text[-1:], 1)
    digits = text if unit == 1 else text[:-1]
    try:
        return int(float(digits) * unit) if unit > 1 else int(digits)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096 or 32K") from None


def token_ids(text: str) -> list[int]:
    """Token ids separated by commas."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def sizes(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    return tuple(size(part) for part in words(text))


def scales(text: str) -> tuple[float, ...]:
    """Numbers with fractions, separated by commas."""
    try:
        return tuple(float(part) for part in words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers such as 0.05,0.02") from None


def words(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def op_priority(text: str) -> tuple[str, tuple[str, ...]]:
    """An op and the providers to try for it."""
    op, sign, providers = text.partition("=")
    if not sign or not words(providers):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form rms_norm=triton,native")
    return op.strip(), words(providers)


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point. Returns the exit code: 0 done, 1 failed, 2 wrong input, 4 backend unavailable."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets its escape, not an error after all the work.
        sys.stdout.reconfigure(errors="backslashreplace")
    parser, commands = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.get(arguments.command, parser).refuse(unknown[0])
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        if arguments.coordinator is not None:
            from ..shared.worker import backend_module

            backend_module("jax", "hosts").join(arguments.coordinator, arguments.hosts, arguments.host_index)
            if getattr(arguments, "backend", "jax") == "auto":
                arguments.backend = "jax"  # the only one that spans hosts
        elif arguments.hosts > 1:
            raise ConfigError(f"hosts: got {arguments.hosts}, needs --coordinator")
        return int(arguments.run(arguments))
    except TwinferError as error:
        print(f"twinfer: error: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has left; a second complaint when Python flushes would help nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _parser() -> tuple[OneLineParser, dict[str, OneLineParser]]:
    """The parser, and those of the commands by name."""
    parser = OneLineParser(prog="twinfer", description="One LLM engine for TPUs and GPUs; both compute the same thing.")
    from .. import __version__

    parser.add_argument("--version", action="version", version=f"twinfer {__version__}")
    g = parser.add_argument_group("several hosts", "the same command on each; the first has the results")
    g.add_argument("--coordinator", metavar="HOST:PORT", help="JAX: the first host; the next port is used too")
    g.add_argument("--hosts", type=size, default=1)
    g.add_argument("--host-index", type=size, default=0)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=OneLineParser)
    generate = commands.add_parser("generate", help="complete prompts and leave")
    generate.set_defaults(run=run_generate)
    _engine_flags(generate)
    _prompt_flags(generate)
    demo = commands.add_parser("demo", help="the bundled model on both workers, tokens compared")
    demo.set_defaults(run=run_demo)
    demo.add_argument("--dtype", choices=DTYPES[1:], default="float32")
    demo.add_argument("--max-tokens", type=size, default=48)
    plan = commands.add_parser("plan", help="which implementation of each op a backend runs, and why")
    plan.set_defaults(run=run_plan)
    _engine_flags(plan)
    plan.add_argument("--json", action="store_true", help="one JSON object")
    plan.add_argument("--all", action="store_true", help="also the ops that the model does not call")
    bench = commands.add_parser("bench", help="measure speed: offline workloads, or latency by percentile")
    bench.set_defaults(run=run_bench)
    add_bench_parsers(bench, _engine_flags)
    aot = commands.add_parser("aot", help="compile for a TPU slice without one: does it fit, what does it cost")
    aot.set_defaults(run=run_aot)
    _engine_flags(aot, need_model=False, torch=False)
    add_aot_flags(aot)
    numerics = commands.add_parser("numerics", help="compare backends numerically: which op, in which layer, and why")
    numerics.set_defaults(run=run_numerics)
    add_numerics_parsers(numerics)
    return parser, commands.choices


def _engine_flags(parser: argparse.ArgumentParser, need_model: bool = True, torch: bool = True) -> None:
    """The flags of an engine; without `torch` those of that backend have their defaults and no flag."""
    g = parser.add_argument_group("engine")
    g.add_argument("--model", required=need_model, help="a Hugging Face checkpoint folder, or the word demo")
    g.add_argument("--backend", choices=BACKEND_CHOICES, default="auto", help="auto: jax on TPUs, torch elsewhere")
    g.add_argument("--device", choices=DEVICES, default="auto")
    g.add_argument("--dtype", choices=DTYPES, default="auto")
    g.add_argument("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: seeded random weights")
    g.add_argument("--engine-seed", type=int, default=0, help="seeds dummy weights and requests without a seed")
    g.add_argument("--max-model-len", type=size)
    g.add_argument("--max-num-seqs", type=size)
    g.add_argument("--max-num-batched-tokens", type=size)
    g.add_argument("--page-size", "--block-size", type=size, help="tokens of a KV page: 16, on TPUs 128 or 256")
    g.add_argument("--kv-cache-memory", type=size, help="bytes of KV cache, such as 4G")
    g.add_argument("--num-pages", type=size, help="pages of KV cache, instead of bytes")
    g.add_argument(
        "--memory-utilization", "--gpu-memory-utilization", type=float, default=0.9, help="share of a device's memory"
    )
    g.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="narrow ones hold x / scale in a byte")
    g.add_argument(
        "--kv-cache-scales", type=scales, metavar="K,V", help="of a narrow cache: what K and V are divided by"
    )
    g.add_argument("--decode-steps", type=size, default=1, help="tokens to decode while the host does not look")
    g.add_argument("--scheduling-policy", choices=POLICIES, default="fcfs")
    if torch:
        _torch_flags(g)
    else:
        parser.set_defaults(compile_level=None, cudagraph_mode=None, enforce_eager=None, compilation_config={})
    for flag in ("enable-prefix-caching", "enable-chunked-prefill", "async-scheduling"):
        g.add_argument(f"--{flag}", action=argparse.BooleanOptionalAction, default=True)
    g.add_argument("--op-priority", action="append", default=[], type=op_priority, metavar="OP=PROVIDER,...")
    g.add_argument(
        "--enable-ops", type=words, default=("all",), metavar="all,-OP,...", help="disabled ops run natively"
    )
    g.add_argument("--scan-layers", action=argparse.BooleanOptionalAction, default=None, help="JAX: loop or unroll")
    g.add_argument("--tensor-parallel-size", "--tp", type=size, default=1, help="devices that share each layer")
    g.add_argument("--decode-sizes", type=sizes, metavar="8,16,...", help="JAX: requests of the decode programs")
    g.add_argument("--mixed-sizes", type=sizes, metavar="16,32,...", help="JAX: tokens of the mixed programs")
    g.add_argument("--compilation-cache-dir", metavar="FOLDER", help="JAX: keep compiled programs there")
    g.add_argument("--aot-folder", metavar="FOLDER", help="JAX: programs that `twinfer aot` compiled")
    g.add_argument("--capture", metavar="DIR,...", help="keep steps as bundles: DIR,request=ID,step=N,nan,mismatch=T:D")


def _torch_flags(g: Any) -> None:
    g.add_argument("--compile-level", type=int, choices=COMPILE_LEVELS, help="torch: 0 eager, 3 compiled and captured")
    g.add_argument("--cudagraph-mode", type=str.upper, choices=MODES, help="torch: which steps are CUDA graphs")
    g.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=None, help="torch: level 0")
    g.add_argument("--compilation-config", type=json_object, default={}, metavar="JSON", help="for torch")


ENGINE_OPTIONS = (
    "device", "enable_ops", "dtype", "load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "page_size", "kv_cache_memory", "num_pages", "memory_utilization",
    "scheduling_policy", "compile_level", "enable_prefix_caching",
    "enable_chunked_prefill", "async_scheduling", "scan_layers", "tensor_parallel_size", "decode_sizes", "mixed_sizes",
    "compilation_cache_dir", "aot_folder", "cudagraph_mode", "enforce_eager", "compilation_config",
    "decode_steps", "kv_cache_dtype", "kv_cache_scales", "capture",
)  # fmt: skip


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(arguments, name) for name in ENGINE_OPTIONS}
    return options | {"seed": arguments.engine_seed, "op_priority": dict(arguments.op_priority)}


def _prompt_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("prompts (each may be given several times)")
    g.add_argument("--prompt", action="append", default=[], metavar="TEXT")
    g.add_argument("--prompt-token-ids", action="append", default=[], type=token_ids, metavar="1,2,3")
    g.add_argument("--prompt-file", action="append", default=[], metavar="FILE", help="a prompt a line")
    s = parser.add_argument_group("sampling")
    s.add_argument("--max-tokens", type=size, default=16)
    s.add_argument("--min-tokens", type=size, default=0)
    s.add_argument("--temperature", type=float, default=1.0)
    s.add_argument("--top-k", type=int, default=0)
    s.add_argument("--top-p", type=float, default=1.0)
    s.add_argument("--min-p", type=float, default=0.0)
    s.add_argument("--presence-penalty", type=float, default=0.0)
    s.add_argument("--frequency-penalty", type=float, default=0.0)
    s.add_argument("--repetition-penalty", type=float, default=1.0)
    s.add_argument("--seed", type=int, help="the same seed gives the same tokens on every backend")
    s.add_argument("--n", type=int, default=1, help="completions of each prompt")
    s.add_argument("--stop", action="append", default=[], metavar="TEXT")
    s.add_argument("--stop-token-ids", type=token_ids, default=[], metavar="1,2,3")
    s.add_argument("--logprobs", type=int)
    s.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


SAMPLING_OPTIONS = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "n", "stop", "stop_token_ids", "logprobs", "ignore_eos",
)  # fmt: skip


def run_generate(arguments: argparse.Namespace) -> int:
    """`twinfer generate`."""
    prompts = _prompts(arguments)
    params = SamplingParams(**{name: getattr(arguments, name) for name in SAMPLING_OPTIONS})
    from .llm import LLM

    with LLM(arguments.model, backend=arguments.backend, **_engine_options(arguments)) as llm:
        if not arguments.json:
            for change in llm.engine.report.changes:
                print(f"{change}", file=sys.stderr)
        outputs = llm.generate(prompts, params, return_errors=True)
        where = {
            "backend": llm.engine.config.backend,
            "device": llm.engine.device.platform,
            "dtype": llm.engine.config.dtype,
        }
    failed = False
    for index, output in enumerate(outputs):
        if output.error is not None:
            print(f"twinfer: error: prompt {index}: {_one_line(output.error)}", file=sys.stderr)
        for completion in output.outputs:
            record = _record(output, completion) | where
            print(json.dumps(record, allow_nan=False) if arguments.json else _text(output, completion))
            if completion.finish_reason == "error":
                failed = True
                print(f"twinfer: error: prompt {index}: {completion.stop_reason}", file=sys.stderr)
    if any(output.error for output in outputs):
        return 2
    return 1 if failed else 0


def _prompts(arguments: argparse.Namespace) -> list[Any]:
    prompts: list[Any] = [*arguments.prompt, *arguments.prompt_token_ids]
    for name in arguments.prompt_file:
        try:
            with open(name, encoding="utf-8-sig") as file:
                text = file.read()
            # Not splitlines(): a form feed or a line separator belongs to a prompt.
            prompts += text.removesuffix("\n").split("\n") if text else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt-file: cannot read {name}: {error}") from error
    if not prompts:
        raise RequestError("prompt", "none given; use --prompt, --prompt-token-ids or --prompt-file")
    return prompts


def _record(output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        tokens = zip(completion.token_ids, completion.logprobs, strict=True)
        record["logprobs"] = [best[token].logprob for token, best in tokens]
    return record


def _text(output: RequestOutput, completion: CompletionOutput) -> str:
    if output.prompt is not None:
        return output.prompt + completion.text
    return completion.text or ",".join(map(str, completion.token_ids))


def run_demo(arguments: argparse.Namespace) -> int:
    """`twinfer demo`."""
    from .demo import run

    return run(arguments.dtype, arguments.max_tokens)


def run_bench(arguments: argparse.Namespace) -> int:
    """`twinfer bench`."""
    from .bench_cli import run

    return run(arguments, _engine_options(arguments))


def run_numerics(arguments: argparse.Namespace) -> int:
    """`twinfer numerics`: both backends in one process."""
    from ..numerics.cli import run

    return run(arguments)


def run_aot(arguments: argparse.Namespace) -> int:
    """`twinfer aot`: needs libtpu and no TPU."""
    from .aot import run

    return run(arguments, _engine_options)


def run_plan(arguments: argparse.Namespace) -> int:
    """`twinfer plan`: loads no weights and compiles nothing."""
    from ..ops import OpError
    from ..shared.backends import find_backend
    from ..shared.config import EngineConfig, resolve
    from ..shared.models.config import load_config
    from ..shared.models.locate import model_folder
    from ..shared.worker import backend_module

    model = load_config(model_folder(arguments.model))
    backend, device, _ = find_backend(arguments.backend, arguments.device)
    config = EngineConfig(**_engine_options(arguments), model=arguments.model, backend=backend)
    resolved, _ = resolve(config, model, device)
    try:
        plans = backend_module(backend).make_plans(model, resolved)
    except OpError as error:
        raise ConfigError(f"op-priority, enable-ops: {_one_line(error)}") from error
    rows = [_plan_row(plan[name], kind) for kind, plan in plans.by_kind.items() for name in plan.choices]
    if arguments.all:
        called = {row["op"] for row in rows}
        everything = backend_module(backend, "plans").chooser(resolved)()
        rows += [_plan_row(choice, "-") for name, choice in everything.choices.items() if name not in called]
    if arguments.json:
        keys = {"cache_key": plans.cache_key, "plan_hash": plans.hash}
        print(json.dumps({"backend": backend, "ops": rows, **keys}))
        return 0
    for row in rows:
        passed = f"  passed over: {'; '.join(row['passed_over'])}" if row["passed_over"] else ""
        same = "deterministic" if row["deterministic"] else "not deterministic"
        same += ", row-invariant" if row["row_invariant"] else ""
        what = f"{row['op']:<24} {row['kind']:<7} {row['provider']:<12} {row['chosen_by']:<9} {row['uuid']}"
        print(f"{what}  {same:<28} rounds {row['rounds']}{passed}")
    print(f"plan hash {plans.hash}")
    return 0


def _plan_row(choice: Any, kind: str) -> dict[str, Any]:
    """What `twinfer plan` says of an op in a kind of program ("-": in none)."""
    from ..ops import REGISTRY

    op, implementation = REGISTRY[choice.op], choice.implementation
    return {
        "op": op.name,
        "kind": kind,
        "provider": choice.provider,
        "chosen_by": choice.chosen_by,
        "passed_over": [f"{provider}: {why}" for provider, why in choice.passed_over],
        "rounds": op.contract.rounds,
        "contract": dataclasses.asdict(op.contract),
        "deterministic": implementation.deterministic,
        "row_invariant": implementation.row_invariant,
        "uuid": choice.uuid,
    }


if __name__ == "__main__":
    raise SystemExit(main())
