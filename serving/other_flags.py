"""Flags of vLLM and SGLang that are none here, and what stands in their place: for whoever brings a
command line along, or a script that gives `LLM` the same as options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..shared.engine_config import EngineConfig
from ..shared.errors import ConfigError
from ..shared.models.fields import show
from ..shared.options import asks_for_nothing, options_of

OTHER_NAMES = {
    "-O": "--compile-level",
    "-q": "--quantization",
    "--context-length": "--max-model-len",
    "--dp-size": "--data-parallel-size",
    "--enable-log-requests": "--log-requests",
    "--model-path": "--model",
    "--seed": "--engine-seed",
    "--tp-size": "--tensor-parallel-size",
}
"""What other engines call our flags."""

_ANSWERS = (
    (
        "nothing is downloaded: hf download --revision R --local-dir FOLDER makes MODEL",
        "--revision --tokenizer-revision --code-revision --hf-token --download-dir",
    ),
    (
        "the files in MODEL's folder decide",
        "--tokenizer --tokenizer-mode --skip-tokenizer-init --hf-overrides --hf-config-path "
        "--config-format --rope-scaling --rope-theta --enable-tokenizer-info-endpoint",
    ),
    (
        "no code of a model or of a user is loaded; leave it out",
        "--trust-remote-code --tool-parser-plugin --reasoning-parser-plugin --middleware "
        "--logits-processors --worker-cls --worker-extension-cls --scheduler-cls",
    ),
    (
        "models read and write text only; leave it out",
        "--task --runner --convert --limit-mm-per-prompt --mm-processor-kwargs "
        "--allowed-local-media-path --disable-chunked-mm-input --language-model-only",
    ),
    (
        "adapters are not supported; merge them into the checkpoint",
        "--enable-lora --max-loras --max-lora-rank --lora-modules",
    ),
    (
        "speculative decoding is not supported; leave it out",
        "--speculative-config --speculative-model --num-speculative-tokens -sc",
    ),
    (
        "weights and the KV cache stay on the devices; leave it out",
        "--swap-space --cpu-offload-gb --kv-offloading-size --kv-transfer-config "
        "--kv-events-config",
    ),
    ("scales are the checkpoint's, or --kv-cache-scales", "--calculate-kv-scales"),
    (
        "say --compilation-config '{\"cudagraph_capture_sizes\": [1, 2, 4]}'",
        "--cudagraph-capture-sizes --cuda-graph-sizes --max-cudagraph-capture-size "
        "--max-seq-len-to-capture",
    ),
    (
        "one process answers for all engines of --data-parallel-size, on one host",
        "--api-server-count -asc --headless --data-parallel-backend --data-parallel-address "
        "--data-parallel-rpc-port --data-parallel-size-local --data-parallel-start-rank "
        "--data-parallel-rank --data-parallel-hybrid-lb --data-parallel-external-lb",
    ),
    (
        "several hosts: docs/scale-out.md; a server runs on one",
        "--nnodes --node-rank --master-addr --master-port",
    ),
    (
        "layers and experts are shared by --tensor-parallel-size alone",
        "--pipeline-parallel-size -pp --enable-expert-parallel -ep --enable-eplb "
        "--decode-context-parallel-size -dcp --disable-custom-all-reduce",
    ),
    (
        "bounds are fixed: a head has at most 64 KiB and 128 headers; --max-body-size",
        "--h11-max-header-count --h11-max-incomplete-event-size",
    ),
    (
        "is a proxy's work; here are --ssl-certfile and --ssl-keyfile",
        "--ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh",
    ),
    (
        "no log holds prompts or outputs; see --log-requests",
        "--max-log-len --enable-log-outputs",
    ),
    (
        "leave it out: calls are logged with --access-log or --log-requests only",
        "--disable-uvicorn-access-log --disable-access-log-for-endpoints --disable-log-requests",
    ),
    (
        "see --verbose, --access-log, --log-requests and --log-format",
        "--uvicorn-log-level --log-level --log-config-file --disable-log-stats",
    ),
    (
        "reasoning and calls are found without it; --tool-call-parser names their format",
        "--enable-auto-tool-choice --reasoning-parser --enable-reasoning",
    ),
    (
        "it is always so; leave it out",
        "--enable-prompt-tokens-details --enable-request-id-headers --disable-fastapi-docs "
        "--exclude-tools-when-tool-choice-none --use-v2-block-manager",
    ),
    ("each request asks: stream_options.include_usage", "--enable-force-include-usage"),
    ("each request asks: return_tokens_as_token_ids", "--return-tokens-as-token-ids"),
    ("an answer's role is assistant; leave it out", "--response-role"),
    ("contents reach a template as text; see --chat-template", "--chat-template-content-format"),
    ("no template comes with a request; see --chat-template", "--trust-request-chat-template"),
    ("a client runs its tools itself; leave it out", "--tool-server"),
    (
        "forms are kept by llguidance, without an option; leave it out",
        "--guided-decoding-backend --structured-outputs-config",
    ),
    ("at most 20 for each token; leave it out", "--max-logprobs"),
    ("families are listed in docs/models.md; leave it out", "--model-impl --mamba-cache-dtype"),
    (
        "see --max-num-batched-tokens and --scheduling-policy",
        "--max-num-partial-prefills --long-prefill-token-threshold",
    ),
    ("there are flags only; keep them in a script", "--config"),
)
ELSEWHERE = {flag: words for words, flags in _ANSWERS for flag in flags.split()}
"""What to do without a flag that has no counterpart."""

OTHER_VALUES = {
    ("--distributed-executor-backend", "uni"): "say mp",
    ("--dtype", "float"): "say float32",
    ("--dtype", "half"): "say float16",
    ("--generation-config", "vllm"): "say none",
    ("--kv-cache-dtype", "fp8"): "say fp8_e4m3",
    ("--load-format", "safetensors"): "say auto",
    ("--max-model-len", "-1"): "leave it out: it is what the model allows",
    ("--max-model-len", "auto"): "leave it out: it is what the model allows",
    ("--tool-call-parser", "gpt-oss"): "say harmony",
    ("--tool-call-parser", "llama4_json"): "say llama3_json",
    ("--tool-call-parser", "openai"): "say harmony",
    ("--tool-call-parser", "qwen3_xml"): "say qwen3_coder",
} | {
    ("--quantization", scheme): "leave it out: a checkpoint's own scheme is read without it"
    for scheme in ("awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin", "mxfp4")
}  # fmt: skip
"""What to say for values of our flags that other engines have."""


def option_of(flag: str) -> str:
    """What a flag is called as an option: --max-model-len is max_model_len."""
    return flag.lstrip("-").replace("-", "_")


_FLAGS = {flag: entry.name for entry in options_of(EngineConfig).values() for flag in entry.flags}


def _in_python(words: str) -> str:
    """An answer with the engine's options by their names, and JSON of the command line as a value;
    flags of commands stay what they are.
    """

    def option(found: re.Match[str]) -> str:
        flag, value = found.groups()
        if flag not in _FLAGS:
            return found[0]
        return _FLAGS[flag] if value is None else f"{_FLAGS[flag]}={value}"

    return re.sub("(--[a-z-]+)(?: '(.*?)')?", option, words)


_OPTIONS = {option_of(flag): _in_python(words) for flag, words in ELSEWHERE.items()} | {
    "data_parallel_size": "replicas are a server's: twinfer serve --data-parallel-size",
    "pipeline_parallel_size": "layers are shared by tensor_parallel_size alone",
}
_VALUES = {
    (option_of(flag), value): _in_python(words) for (flag, value), words in OTHER_VALUES.items()
}
_NOTHING: dict[str, tuple[Any, ...]] = {
    "cpu_offload_gb": (0, 0.0),
    "data_parallel_size": (1,),
    "hf_overrides": ({},),
    "limit_mm_per_prompt": ({},),
    "max_logprobs": (20,),
    "pipeline_parallel_size": (1,),
    "runner": ("auto",),
    "swap_space": (0, 0.0),
    "task": ("auto",),
    "tokenizer_mode": ("auto",),
}
"""Values of vLLM's options with which they ask for nothing, beside None and False."""


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `LLM` without those of vLLM's that ask for nothing.

    Raises ConfigError for one of vLLM's that does, or a value that only vLLM has, with what stands
    in its place. Whatever else is wrong is for others to say.
    """
    for name, value in options.items():
        words = _VALUES.get((name, value)) if isinstance(value, str) else None
        if name in _OPTIONS and not asks_for_nothing(value, False, *_NOTHING.get(name, ())):
            words = _OPTIONS[name]
        if name == "compilation_config" and type(value) is int:
            words = f"say compile_level={value}"
        if words is not None:
            raise ConfigError(f"{name}: got {show(value)}; {words}")
    return {name: value for name, value in options.items() if name not in _OPTIONS}
