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
    "-cc": "--compilation-config",
    "-q": "--quantization",
    "--context-length": "--max-model-len",
    "--dp-size": "--data-parallel-size",
    "--enable-log-requests": "--log-requests",
    "--model-path": "--model",
    "--seed": "--engine-seed",
    "--shutdown-timeout": "--drain-timeout",
    "--tp-size": "--tensor-parallel-size",
}
"""What other engines call our flags."""

ALWAYS = "it is always so; leave it out"
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
        "--logits-processors --worker-cls --worker-extension-cls --scheduler-cls "
        "--io-processor-plugin",
    ),
    (
        "models read and write text only; leave it out",
        "--task --runner --convert --limit-mm-per-prompt --mm-processor-kwargs "
        "--allowed-local-media-path --disable-chunked-mm-input --language-model-only "
        "--allowed-media-domains --enable-mm-embeds --enable-prompt-embeds --interleave-mm-strings "
        "--media-io-kwargs --mm-encoder-attn-backend --mm-encoder-only --mm-encoder-tp-mode "
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-shm-cache-max-object-size-mb "
        "--mm-tensor-ipc --pooler-config --skip-mm-profiling --video-pruning-rate",
    ),
    (
        "adapters are not supported; merge them into the checkpoint",
        "--enable-lora --max-loras --max-lora-rank --lora-modules --default-mm-loras "
        "--enable-prompt-adapter --enable-tower-connector-lora --fully-sharded-loras --lora-dtype "
        "--lora-extra-vocab-size --lora-target-modules --max-cpu-loras --specialize-active-lora",
    ),
    (
        "see --speculative-config",
        "--speculative-model --num-speculative-tokens -sc --num-lookahead-slots",
    ),
    (
        "weights and the KV cache stay on the devices; leave it out",
        "--swap-space --cpu-offload-gb --kv-offloading-size --kv-transfer-config "
        "--kv-events-config --cpu-offload-params --ec-transfer-config --enable-sleep-mode "
        "--kv-offloading-backend --offload-backend --offload-group-size --offload-num-in-group "
        "--offload-params --offload-prefetch-step --weight-transfer-config",
    ),
    (
        "tensors are read from their files as they are needed; leave it out",
        "--ignore-patterns --max-parallel-loading-workers --model-loader-extra-config "
        "--pt-load-map-location --safetensors-load-strategy --use-tqdm-on-load",
    ),
    ("all layers have --kv-cache-dtype", "--kv-cache-dtype-skip-layers"),
    ("see --dtype", "--override-attention-dtype"),
    (
        "see --op-priority and --enable-ops",
        "--attention-config -ac --disable-cascade-attn --enable-flashinfer-autotune "
        "--gdn-prefill-backend --kernel-config --linear-backend --moe-backend",
    ),
    (
        "see --max-num-seqs, --max-num-batched-tokens and --decode-steps",
        "--performance-mode",
    ),
    ("scales are the checkpoint's, or --kv-cache-scales", "--calculate-kv-scales"),
    (
        "say --compilation-config '{\"cudagraph_capture_sizes\": [1, 2, 4]}'",
        "--cudagraph-capture-sizes --cuda-graph-sizes --max-cudagraph-capture-size "
        "--max-seq-len-to-capture --cuda-graph-bs",
    ),
    (
        "one process answers for all engines of --data-parallel-size, on one host",
        "--api-server-count -asc --headless --data-parallel-backend --data-parallel-address "
        "--data-parallel-rpc-port --data-parallel-size-local --data-parallel-start-rank "
        "--data-parallel-rank --data-parallel-hybrid-lb --data-parallel-external-lb -dpa -dpb -dpe "
        "-dph -dpl -dpn -dpp -dpr --data-parallel-supervisor-port --renderer-num-workers",
    ),
    (
        "several hosts: docs/scale-out.md; a server runs on one",
        "--nnodes --node-rank --master-addr --master-port",
    ),
    (
        "layers and experts are shared by --tensor-parallel-size alone",
        "--pipeline-parallel-size -pp --enable-expert-parallel -ep --enable-eplb "
        "--decode-context-parallel-size -dcp --disable-custom-all-reduce --all2all-backend "
        "--cp-kv-cache-interleave-size --dbo-decode-token-threshold --dbo-prefill-token-threshold "
        "--dcp-comm-backend --dcp-kv-cache-interleave-size --enable-dbo --enable-elastic-ep "
        "--enable-ep-weight-filter --eplb-config --expert-placement-strategy "
        "--prefill-context-parallel-size -pcp --ubatch-size",
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
        "--max-log-len --enable-log-outputs --enable-log-deltas",
    ),
    (
        "leave it out: calls are logged with --access-log or --log-requests only",
        "--disable-uvicorn-access-log --disable-access-log-for-endpoints --disable-log-requests",
    ),
    (
        "see --verbose, --access-log, --log-requests and --log-format",
        "--uvicorn-log-level --log-level --log-config-file --disable-log-stats --log-error-stack "
        "--enable-logging-iteration-details",
    ),
    (
        "/metrics tells what there is; leave it out",
        "--cudagraph-metrics --enable-mfu-metrics --kv-cache-metrics --kv-cache-metrics-sample "
        "--show-hidden-metrics-for-version",
    ),
    (
        "see --otlp-traces-endpoint and --log-requests",
        "--collect-detailed-traces --enable-per-request-metrics",
    ),
    (
        "a step is profiled by scripts/profile_step.py; leave it out",
        "--enable-layerwise-nvtx-tracing --profiler-config --ray-workers-use-nsight",
    ),
    (
        "reasoning and calls are found without it; --tool-call-parser names their format",
        "--enable-auto-tool-choice --reasoning-parser --enable-reasoning --reasoning-config",
    ),
    (
        ALWAYS,
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
        "--guided-decoding-backend --structured-outputs-config "
        "--guided-decoding-disable-any-whitespace",
    ),
    ("at most 20 for each token; leave it out", "--max-logprobs"),
    ("they are of the raw logits; leave it out", "--logprobs-mode"),
    (
        "families are listed in docs/models.md; leave it out",
        "--model-impl --mamba-block-size --mamba-cache-dtype --mamba-cache-mode "
        "--mamba-ssm-cache-dtype --cohere-format",
    ),
    ("windows are the model's; leave it out", "--disable-sliding-window"),
    (
        "see --max-num-batched-tokens and --scheduling-policy",
        "--max-num-partial-prefills --long-prefill-token-threshold --max-long-partial-prefills "
        "--scheduler-delay-factor --scheduler-reserve-full-isl",
    ),
    ("requests are computed anew; leave it out", "--preemption-mode"),
    ("docs/serving.md lists the calls; leave it out", "--enable-offline-docs"),
    (
        "a checkpoint's own scheme is read without it; leave it out",
        "--allow-deprecated-quantization",
    ),
    (
        "it is fixed; leave it out",
        "--disable-nccl-for-dp-synchronization --distributed-timeout-seconds --fingerprint-mode "
        "--fingerprint-value --kv-sharing-fast-prefill --prefix-caching-hash-algo "
        "--tokenizer-pool-size",
    ),
    ("no call tells of experts; leave it out", "--enable-return-routed-experts"),
    ("chats and texts are always served; leave it out", "--tokens-only"),
    (
        "no variable of another engine is read; leave it out",
        "--fail-on-environ-validation",
    ),
    ("there are flags only; keep them in a script", "--config --additional-config"),
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


def name_of(word: str) -> str:
    """The flag in a word of a command line: -O of -O3, -cc of -cc.mode=3."""
    found = re.match(r"-(O|cc|-compilation-config)(?=[0-9.])", word)
    return found[0] if found else word.split("=")[0]


def answer_to(flag: str) -> str:
    """What to do without a flag that is none here; "" if nobody knows it."""
    positive = f"--{flag.removeprefix('--no-')}"
    if flag != positive and flag.startswith("--no-") and flag not in ELSEWHERE:
        if positive in OTHER_NAMES:
            return "it is off unless it is asked for; leave it out"
        if ELSEWHERE.get(positive, ALWAYS) != ALWAYS:
            return "it is so without it; leave it out"
        return ELSEWHERE.get(positive, "")
    return ELSEWHERE.get(flag, "")


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
    "kv_offloading_backend": ("native",),
    "logprobs_mode": ("raw_logprobs",),
    "max_logprobs": (20,),
    "mm_processor_cache_gb": (4, 4.0),
    "moe_backend": ("auto",),
    "performance_mode": ("balanced",),
    "pipeline_parallel_size": (1,),
    "prefix_caching_hash_algo": ("sha256",),
    "runner": ("auto",),
    "swap_space": (0, 0.0),
    "task": ("auto",),
    "safetensors_load_strategy": ("lazy",),
    "tokenizer_mode": ("auto",),
    "use_tqdm_on_load": (True,),
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
