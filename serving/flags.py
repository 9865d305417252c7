"""The flags of prompts, sampling and the engine: one function for each group, and one that makes options of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ..shared.compilation_config import LEVELS, MODE_STEPS, MODES
from ..shared.config import (
    BACKEND_CHOICES,
    COMPILE_LEVELS,
    DEVICES,
    DTYPES,
    LOAD_FORMATS,
    MAX_DECODE_STEPS,
    MAX_NUM_SEQS,
    POLICIES,
    EngineConfig,
)
from ..shared.errors import ConfigError
from ..shared.generation_config import FIELDS, SOURCES
from ..shared.jax_config import MAX_SHARDS
from ..shared.kv_config import KV_DTYPES
from ..shared.sampling_params import (
    LOGIT_BIAS_RANGE,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    SamplingParams,
)
from .parser import biases, json_object, op_priority, scales, size, sizes, token_ids, words

SAMPLING_OPTIONS = tuple(SamplingParams.__dataclass_fields__)
ENGINE_OPTIONS = (
    "device", "enable_ops", "dtype", "load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "page_size", "kv_cache_memory", "num_pages", "memory_utilization", "scheduling_policy", "compile_level",
    "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "scan_layers", "tensor_parallel_size",
    "decode_sizes", "mixed_sizes", "compilation_cache_dir", "aot_folder", "cudagraph_mode", "enforce_eager",
    "compilation_config", "decode_steps", "kv_cache_dtype", "kv_cache_scales", "capture",
)  # fmt: skip


class _Switch(argparse.BooleanOptionalAction):
    """`--flag` and `--no-flag`, with the help as it is written: Python 3.11 adds the default a second time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.help = options["help"]


class _TypedPrompt(argparse.Action):
    """Appends (kind, value), so that prompts stay in the order in which they were typed, whatever their flags."""

    def __call__(self, parser: Any, arguments: Any, values: Any, option_string: str | None = None) -> None:
        """As `argparse` has it."""
        kind = self.option_strings[0]
        arguments.prompts = [*arguments.prompts, (kind, values)]


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """What is completed."""
    g = parser.add_argument_group("prompts", "each may be given several times; results count in the order given")
    options: dict[str, Any] = {"action": _TypedPrompt, "dest": "prompts", "default": []}
    g.add_argument("--prompt", **options, metavar="TEXT", help="a text")
    g.add_argument("--prompt-token-ids", **options, type=token_ids, metavar="1,2,3", help="token ids")
    g.add_argument("--prompt-file", **options, metavar="FILE", help="a text a line, UTF-8")
    g.add_argument("--chat", action="store_true", help="texts are what a user says: render them by the chat template")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The fields of SamplingParams. None stands for: not said."""
    g = parser.add_argument_group("sampling")
    g.add_argument(
        "--max-tokens", type=size, metavar="N", help=f"tokens of a completion at most, from 1{_usual('max_tokens')}"
    )
    g.add_argument(
        "--min-tokens", type=size, metavar="N", help="tokens before a stop counts, 0 to max-tokens (default: 0)"
    )
    g.add_argument(
        "--temperature", type=float, metavar="T",
        help=f"0 (greedy), or 0.01 to {MAX_TEMPERATURE:g}{_usual('temperature')}",
    )  # fmt: skip
    g.add_argument("--top-k", type=int, metavar="K", help=f"sample from the K best; 0 or -1: all{_usual('top_k')}")
    g.add_argument("--top-p", type=float, metavar="P", help=f"from the best that sum to P, 0 to 1{_usual('top_p')}")
    g.add_argument("--min-p", type=float, metavar="P", help=f"from P times the best's and up, 0 to 1{_usual('min_p')}")
    g.add_argument("--seed", type=int, help="the same seed gives the same tokens on every backend (default: drawn)")
    g.add_argument("--n", type=int, metavar="N", help=f"completions of each prompt, 1 to {MAX_N} (default: 1)")
    g.add_argument(
        "--presence-penalty", type=float, metavar="X", help="on tokens that were generated, -2 to 2 (default: 0)"
    )
    g.add_argument("--frequency-penalty", type=float, metavar="X", help="on each time they were, -2 to 2 (default: 0)")
    g.add_argument(
        "--repetition-penalty", type=float, metavar="X",
        help=f"on tokens of prompt and output, 0.01 to 100; 1 is none{_usual('repetition_penalty')}",
    )  # fmt: skip
    g.add_argument(
        "--logit-bias", type=biases, metavar="ID:BIAS,...",
        help=f"added to logits, within {LOGIT_BIAS_RANGE:g} of 0; {MAX_LOGIT_BIAS} at most (default: none)",
    )  # fmt: skip
    g.add_argument("--allowed-token-ids", type=token_ids, metavar="1,2,3", help="no other tokens (default: all)")
    g.add_argument("--banned-token-ids", type=token_ids, metavar="1,2,3", help="not these tokens (default: none)")
    g.add_argument(
        "--stop", action="append", metavar="TEXT",
        help=f"ends a completion; at most {MAX_STOP_STRINGS}, of 1 to {MAX_STOP_STRING_LENGTH} letters (default: none)",
    )  # fmt: skip
    g.add_argument(
        "--stop-token-ids", type=token_ids, metavar="1,2,3",
        help=f"end a completion; {MAX_STOP_TOKEN_IDS} at most (default: the model's end-of-sequence ids only)",
    )  # fmt: skip
    g.add_argument("--ignore-eos", action=_Switch, help="go on after end-of-sequence ids (default: off)")
    g.add_argument(
        "--include-stop-str-in-output", action=_Switch, help="keep the stop string in the text (default: off)"
    )
    g.add_argument("--skip-special-tokens", action=_Switch, help="leave special tokens out of the text (default: on)")
    best = f"0 to {MAX_LOGPROBS}, with --json (default: none)"
    g.add_argument("--logprobs", type=int, metavar="N", help=f"log-probabilities of each token and the N best, {best}")
    g.add_argument("--prompt-logprobs", type=int, metavar="N", help=f"the same of the prompt's tokens, {best}")
    g.add_argument(
        "--generation-config", choices=SOURCES, default="auto",
        help="none: without the sampling defaults of the model's generation_config.json (default: %(default)s)",
    )  # fmt: skip


def _usual(name: str) -> str:
    value = getattr(SamplingParams(), name)
    where = "generation_config.json, else " if name in FIELDS.values() else ""
    return f" (default: {where}{value})"


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that have a flag on this command line."""
    values = {name: getattr(arguments, name) for name in SAMPLING_OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def add_output(parser: argparse.ArgumentParser) -> None:
    """What is printed."""
    g = parser.add_argument_group("output")
    g.add_argument("--json", action="store_true", help="one JSON object a line, written when a completion ends")
    g.add_argument("--stream", action="store_true", help="text as it comes; with --json an object for each piece")
    g.add_argument(
        "-v", "--verbose", action="store_true", help="the start report: what was filled in, and why (stderr)"
    )


def add_engine(parser: argparse.ArgumentParser, torch: bool = True) -> None:
    """The options of an engine; without `torch` those of that backend keep their defaults and have no flag."""
    g = parser.add_argument_group("engine")
    g.add_argument(
        "--backend", choices=BACKEND_CHOICES, default="auto",
        help="auto: jax on TPUs, torch elsewhere (default: %(default)s)",
    )  # fmt: skip
    g.add_argument(
        "--device", default="auto", metavar="|".join(DEVICES),
        help="which device; with a number, which of this machine's: cuda:1 (default: %(default)s)",
    )  # fmt: skip
    g.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: the checkpoint's (default: %(default)s)")
    g.add_argument(
        "--load-format", choices=LOAD_FORMATS, default="auto",
        help="dummy: seeded random weights, which a shape needs (default: %(default)s)",
    )  # fmt: skip
    g.add_argument(
        "--engine-seed", type=int, default=0, metavar="N",
        help="seeds dummy weights and requests without a seed (default: %(default)s)",
    )  # fmt: skip
    g.add_argument(
        "--tensor-parallel-size", "--tp", "-tp", type=size, default=1, metavar="N",
        help=f"devices that share each layer, 1 to {MAX_SHARDS} (default: %(default)s)",
    )  # fmt: skip
    g.add_argument(
        "--capture", metavar="DIR,...",
        help="keep steps as bundles: DIR,request=ID,step=N,nan,mismatch=T:D (default: none)",
    )  # fmt: skip
    _add_batching(parser)
    _add_programs(parser, torch)


def _add_batching(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("batching and memory", "sizes may have a unit: 32k is 32000, 32K is 32768")
    default_of = _default_of(parser)
    tokens = default_of("max_num_batched_tokens", "8192, on a CPU 512")
    length = default_of("max_model_len", "what the model allows, on a CPU 2048 at most")
    g.add_argument(
        "--max-model-len", type=size, metavar="N",
        help=f"tokens of a request, prompt included, from 2 (default: {length})",
    )  # fmt: skip
    g.add_argument(
        "--max-num-seqs", type=size, metavar="N",
        help=f"requests of a step, 1 to {MAX_NUM_SEQS} (default: {default_of('max_num_seqs', '256, on a CPU 16')})",
    )  # fmt: skip
    g.add_argument(
        "--max-num-batched-tokens", type=size, metavar="N",
        help=f"tokens of a step, from max-num-seqs (default: {tokens})",
    )  # fmt: skip
    g.add_argument(
        "--page-size", "--block-size", type=size, metavar="N",
        help="tokens of a KV page, a power of two from 1 to 256 (default: 16, on a TPU 128 or 256)",
    )  # fmt: skip
    g.add_argument(
        "--gpu-memory-utilization", "--memory-utilization", dest="memory_utilization", type=float, metavar="PART",
        default=EngineConfig.__dataclass_fields__["memory_utilization"].default,
        help="of the device's memory, what the engine may take, 0.05 to 1 (default: %(default)s)",
    )  # fmt: skip
    g.add_argument(
        "--kv-cache-memory", type=size, metavar="BYTES", help="of the KV cache, such as 4G (default: what is left)"
    )
    g.add_argument(
        "--num-pages", type=size, metavar="N", help="pages of the KV cache, instead of bytes (default: by bytes)"
    )
    g.add_argument(
        "--kv-cache-dtype", choices=KV_DTYPES, default="auto",
        help="narrow ones hold x / scale in a byte; auto: as --dtype (default: %(default)s)",
    )  # fmt: skip
    g.add_argument(
        "--kv-cache-scales", type=scales, metavar="K,V",
        help="of a narrow cache: what K and V are divided by (default: 1,1; int8 needs them)",
    )  # fmt: skip
    g.add_argument(
        "--decode-steps", type=size, default=1, metavar="N",
        help=f"tokens to decode while the host does not look, 1 to {MAX_DECODE_STEPS} (default: %(default)s)",
    )  # fmt: skip
    g.add_argument("--scheduling-policy", choices=POLICIES, default="fcfs", help="default: %(default)s")
    for flag, what in {
        "enable-prefix-caching": "share pages of equal beginnings",
        "enable-chunked-prefill": "spread a long prompt over steps",
        "async-scheduling": "two steps in flight",
    }.items():
        state = default_of(flag.replace("-", "_"), True)
        text = f"{what} (default: {'on' if state else 'off'})"
        g.add_argument(f"--{flag}", action=_Switch, default=state, help=text)


def _add_programs(parser: argparse.ArgumentParser, torch: bool) -> None:
    g = parser.add_argument_group("compilation and kernels")
    g.add_argument(
        "--op-priority", action="append", default=[], type=op_priority, metavar="OP=PROVIDER,...",
        help="implementations to try first, for an op; may be repeated (default: none)",
    )  # fmt: skip
    g.add_argument(
        "--enable-ops", type=words, default=("all",), metavar="all,-OP,...",
        help="all or none, then +OP and -OP; a disabled op runs natively (default: all)",
    )  # fmt: skip
    if torch:
        _add_torch(g)
    else:
        parser.set_defaults(compile_level=None, cudagraph_mode=None, enforce_eager=None, compilation_config={})
    g.add_argument(
        "--scan-layers", action=_Switch, default=None,
        help="JAX: one loop over layers, or unrolled (default: a loop, but on GPUs and TPU7x)",
    )  # fmt: skip
    g.add_argument(
        "--decode-sizes", type=sizes, metavar="8,16,...",
        help="JAX: requests of the decode programs, up to max-num-seqs (default: a ladder)",
    )  # fmt: skip
    g.add_argument(
        "--mixed-sizes", type=sizes, metavar="16,32,...",
        help="JAX: tokens of the mixed programs, up to max-num-batched-tokens (default: a ladder)",
    )  # fmt: skip
    g.add_argument(
        "--compilation-cache-dir", metavar="FOLDER",
        help="JAX: keep compiled programs there; none: nowhere (default: ~/.cache/twinfer/jax)",
    )  # fmt: skip
    g.add_argument("--aot-folder", metavar="FOLDER", help="JAX: programs that `twinfer aot` compiled (default: none)")


def _lines(text: str, meanings: Mapping[Any, str]) -> str:
    """A help text with a line for each value of its flag."""
    return "\n".join([text, *(f"{value}: {meaning}" for value, meaning in meanings.items())])


def _add_torch(g: Any) -> None:
    g.add_argument(
        "--compile-level", type=int, choices=COMPILE_LEVELS,
        help=_lines("torch: what runs (default: 3 on a GPU, else 0)", LEVELS),
    )  # fmt: skip
    g.add_argument(
        "--cudagraph-mode", type=str.upper, choices=MODES,
        help=_lines("torch: which steps are CUDA graphs (default: FULL at level 3 where kernels allow it)", MODE_STEPS),
    )  # fmt: skip
    g.add_argument("--enforce-eager", action=_Switch, default=None, help="torch: level 0, no graphs (default: off)")
    g.add_argument(
        "--compilation-config", type=json_object, default={}, metavar="JSON",
        help="torch: all options of docs/compilation.md (default: none)",
    )  # fmt: skip


def _default_of(parser: argparse.ArgumentParser) -> Any:
    """A function: the default that this command has set for an engine option, or another."""
    return lambda name, other: other if parser.get_default(name) is None else parser.get_default(name)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `EngineConfig` but for model and backend."""
    options = {name: getattr(arguments, name) for name in ENGINE_OPTIONS}
    return options | {"seed": arguments.engine_seed, "op_priority": dict(arguments.op_priority)}


def read_prompts(typed: Sequence[tuple[str, Any]]) -> list[Any]:
    """Texts and token ids, in the order in which they were typed. Raises ConfigError for a file that cannot be read."""
    prompts: list[Any] = []
    for kind, value in typed:
        if kind != "--prompt-file":
            prompts.append(value)
            continue
        try:
            with open(value, encoding="utf-8-sig") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt-file: cannot read {value}: {error}") from error
        # Not splitlines(): a form feed or a line separator belongs to a prompt.
        prompts += text.removesuffix("\n").split("\n") if text else []
    return prompts
