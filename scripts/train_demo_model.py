"""Train the demo checkpoint: a small Qwen3-architecture decoder on the Python standard library's
source text.

The result is an ordinary Hugging Face checkpoint folder, small enough to live in the repository and
good enough that greedy completions are recognisably Python. The recipe is seeded and ordered
throughout: the corpus is the interpreter's own standard library in sorted order, every random
choice is seeded, torch is asked for its deterministic kernels, and the held-out files are chosen by
the hash of their path.

Needs torch, tokenizers, safetensors and transformers (a development dependency: only the model
definition and the final self-check come from it). Example:

    python scripts/train_demo_model.py --out shared/models/demo --steps 9000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import random
import re
import sys
import sysconfig
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

# cuBLAS is deterministic only with a fixed workspace, and reads this when its first handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"
MAX_CHECKPOINT_BYTES = 8_000_000
VOCAB_SIZE = 2048
CONTEXT = 1024

# Third-party code, test data, and generated or vendored material: not the standard library's
# prose-like source.
EXCLUDED = re.compile(
    r"(^|/)(__pycache__|(site|dist)-packages|tests?|idlelib|lib2to3|turtledemo|pydoc_data|distutils|_bundled)/"
    r"|(^|/)_sysconfigdata"
)
HOLD_OUT_ONE_IN = 50
COPIES = 4

# Newlines and indentation are tokens of their own, so that a prompt may end after either; elsewhere
# a word or a run of punctuation takes the one space before it along.
PIECES = r"[ \t]{2,}|\n+| ?[\p{L}\p{M}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}_]+|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)

PROMPTS = (
    "def read_file(path):\n",
    "import os\nimport ",
    "class Node:\n    def __init__(self",
    "for i in range(",
    "try:\n    ",
)

SHAPE: dict[str, int | float | bool | str] = dict(
    vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, hidden_size=256, intermediate_size=608,
    num_hidden_layers=5,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_act="silu",
    attention_bias=False,
    attention_dropout=0.0, initializer_range=0.02, rms_norm_eps=1e-6, tie_word_embeddings=True,
    use_cache=True,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
ROPE_THETA = 10000.0

LICENSE_NOTICE = """\
The weights and the tokenizer in this folder were derived from the source text of the Python standard library, which is
distributed under the Python Software Foundation License Version 2 (https://docs.python.org/3/license.html):

{copyright}

The standard library's text itself is not included here. A few of its modules carry further notices of their own, listed
on the same page under "Licenses and Acknowledgements for Incorporated Software".

The checkpoint is offered under the same terms, without warranty of any kind.
"""


class Corpus(NamedTuple):
    """The text to train on, in a fixed order, and the held-out files' text by name."""

    train: list[str]
    held_out: dict[str, str]
    sha256: str
    total_bytes: int


def check(condition: bool, complaint: str) -> None:
    """Stop if what the recipe promises does not hold."""
    if not condition:
        raise SystemExit(f"train_demo_model: {complaint}")


def read_corpus(roots: list[Path]) -> Corpus:
    """Collect the library's modules; of a module found under several roots, the first root's
    copy counts.
    """
    files: dict[str, Path] = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if not EXCLUDED.search(name := path.relative_to(root).as_posix()):
                files.setdefault(name, path)
    train, held_out, digest, total = [], {}, hashlib.sha256(), 0
    for name in sorted(files):
        data = files[name].read_bytes()
        text = data.decode("utf-8", errors="replace").replace("\r\n", "\n").strip("\n") + "\n"
        # The generated character maps under encodings/ are a tenth of all text and teach nothing
        # but a table's rows.
        if len(text) < 64 or "decoding_table" in text or "decoding_map" in text:
            continue
        digest.update(name.encode() + b"\0" + data + b"\0")
        total += len(data)
        if int(hashlib.sha256(name.encode()).hexdigest(), 16) % HOLD_OUT_ONE_IN == 0:
            held_out[name] = text
        else:
            train.append(text)
    return Corpus(train, held_out, digest.hexdigest(), total)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are in the alphabet, so that any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],  # first, hence id 0
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    check(tokenizer.get_vocab_size() == VOCAB_SIZE, "the tokenizer has another size than asked for")
    return tokenizer


def encode(
    tokenizer: Tokenizer, texts: list[str], copies: int = 1, seed: int | None = None
) -> torch.Tensor:
    """One stream of token ids, with the end-of-text token after each file.

    With a seed, each copy of a file is cut at random places and its parts encoded one by one: then
    a prompt that stops within a word, or after a space that would have belonged to the next word,
    is nothing new to the model.
    """
    rng = random.Random(seed)
    parts: list[str] = []
    for text in texts * copies:
        start = 0
        while seed is not None and start < len(text) - 512:
            stop = start + rng.randint(32, 512)
            parts.append(text[start:stop])
            start = stop
        parts.append(text[start:] + END_OF_TEXT)
    return torch.tensor([i for encoding in tokenizer.encode_batch(parts) for i in encoding.ids])


def build_model(dropout: float) -> Qwen3ForCausalLM:
    """The model with fp32 weights, and residual dropout, which the architecture itself does not
    offer, as hooks.
    """
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    model = Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, rope_parameters=rope, attn_implementation="sdpa")
    ).float()
    if dropout > 0:
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.register_forward_hook(
                    lambda module, _, y: F.dropout(y, dropout, training=module.training)
                )
    return model


def mean_loss(model: Qwen3ForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy; the mask is given as 'none', so that attention takes its
    causal fast path.
    """
    hidden = model.model(
        input_ids=inputs, attention_mask={"full_attention": None}, use_cache=False
    ).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), targets.flatten())


def windows(
    stream: torch.Tensor, starts: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the given windows of the stream."""
    rows = stream[starts[:, None] + torch.arange(length + 1, device=stream.device)]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate(model: Qwen3ForCausalLM, stream: torch.Tensor, length: int, limit: int = 256) -> float:
    """Mean loss over up to `limit` windows, spread evenly over the stream."""
    was_training = model.training
    model.eval()
    count = max(1, min(limit, (len(stream) - 1) // length))
    starts = torch.linspace(0, len(stream) - 1 - length, count, device=stream.device).long()
    total = 0.0
    for chunk in starts.split(32):
        with torch.autocast(stream.device.type, torch.bfloat16, enabled=stream.is_cuda):
            total += mean_loss(model, *windows(stream, chunk, length)).item() * len(chunk)
    model.train(was_training)
    return total / count


def train(
    model: Qwen3ForCausalLM, stream: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace
) -> int:
    """Run the training loop; returns the number of steps taken."""
    device = stream.device
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    step_loss = torch.compile(mean_loss, dynamic=False) if args.compile else mean_loss
    generator = torch.Generator().manual_seed(args.seed)
    model.train()
    began = time.monotonic()
    for step in range(args.steps):
        minutes = (time.monotonic() - began) / 60
        # With --minutes the schedule follows whichever is further along, so that the rate still
        # falls to its end.
        progress = max(step / args.steps, minutes / args.minutes if args.minutes else 0.0)
        if progress >= 1:
            return step
        rate = args.lr * min(
            (step + 1) / args.warmup, 0.02 + 0.49 * (1 + math.cos(math.pi * progress))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        # The last fifth runs on whole-context windows: the positions past --seq-len must be trained
        # to be usable.
        length = args.seq_len if progress < 0.8 else CONTEXT
        rows = max(1, args.batch_size * args.seq_len // length)
        starts = torch.randint(len(stream) - length, (rows,), generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = step_loss(model, *windows(stream, starts, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0 or step == args.steps - 1:
            line = f"step {step:6d}/{args.steps}  lr {rate:.2e}  loss {loss.item():.3f}"
            if step % (args.log_every * 5) == 0:
                line += f"  held-out {evaluate(model, held_out, args.seq_len):.3f}"
            print(f"{line}  {time.monotonic() - began:6.1f} s", flush=True)
    return args.steps


def write_checkpoint(out: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> int:
    """Write weights (bf16, the tied output matrix left out), config and tokenizer; returns the
    weights' file size.
    """
    out.mkdir(parents=True, exist_ok=True)
    state = {
        k: v.to("cpu", torch.bfloat16)
        for k, v in sorted(model.state_dict().items())
        if k != "lm_head.weight"
    }
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
    } | SHAPE
    config["rope_theta"] = ROPE_THETA
    tokenizer_config = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT) | {
        "add_prefix_space": False,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, fields in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        (out / name).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    (out / "LICENSE").write_text(
        LICENSE_NOTICE.format(copyright=textwrap.indent(sys.copyright, "    "))
    )
    return (out / "model.safetensors").stat().st_size


def write_readme(
    out: Path, corpus: Corpus, args: argparse.Namespace, facts: dict[str, object]
) -> None:
    """Say in the folder what the checkpoint is and how to make it again."""
    values = [
        (k.replace("_", "-"), v)
        for k, v in vars(args).items()
        if k not in ("compile", "stdlib", "minutes")
    ]
    flags = " ".join(f"--{k} {v}" for k, v in values) + (
        " --compile" if args.compile else " --no-compile"
    )
    flags += f" --minutes {args.minutes}" if args.minutes else ""
    flags += "".join(f" --stdlib {root}" for root in args.stdlib or ())
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    (out / "README.md").write_text(f"""\
# Demo checkpoint

A small decoder of the Qwen3 architecture with a byte-level BPE tokenizer, trained from nothing on the source text of
the Python standard library. It exists so that an engine can be run and tested end to end without a download: greedy
completions look like Python, and nothing more is claimed for them.

| | |
| --- | --- |
{table}

Made with:

    python scripts/train_demo_model.py {flags}

The corpus is the library of the interpreter that ran the script, without tests, IDLE, lib2to3, distutils, bundled
packages, generated character maps and documentation topics. Its sha256 is taken over each file's relative path and
bytes, in sorted order; distributions patch and split the library, so it can differ for one version of Python.
Held out for validation:
{", ".join(f"`{n}`" for n in corpus.held_out)}.

The chat template renders each message as a line `# role: content`. The model was not trained on dialogues: the template
is there so that the chat path can be exercised.

The text is under the Python Software Foundation License and is not included here; see `LICENSE`.
""")


@torch.no_grad()
def print_samples(out: Path, new_tokens: int = 64) -> None:
    """Load the folder back as any user would, and complete the prompts greedily."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for text in ("naïve café 😀👩‍💻 \t\r\n  x  ", *PROMPTS):
        check(
            tokenizer.decode(tokenizer.encode(text)) == text,
            f"the tokenizer does not round-trip {text!r}",
        )
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        output = model.generate(
            **inputs, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
        )
        print(f"----- {prompt!r}\n{tokenizer.decode(output[0])}", flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="stop by then (0: no limit; not reproducible)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="windows of --seq-len tokens in a step"
    )
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps of linear warm-up")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    parser.add_argument(
        "--stdlib", type=Path, action="append", help="another library folder to read (repeatable)"
    )
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # before the work, not after
        parser.error(f"--out: cannot make {args.out}: {error.strerror}")
    return args


def main() -> None:
    """Read, tokenize, train, write, and try the result."""
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    torch.set_float32_matmul_precision("high")
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if args.device == "auto" else args.device)

    roots = args.stdlib or [Path(sysconfig.get_paths()["stdlib"])]
    corpus = read_corpus(roots)
    print(
        f"corpus: {', '.join(map(str, roots))}: {corpus.total_bytes:,} bytes, sha256 "
        f"{corpus.sha256}",
        flush=True,
    )
    if corpus.total_bytes < 7_000_000:
        print("WARNING: this library looks incomplete; add others with --stdlib", flush=True)
    print(f"held out: {' '.join(corpus.held_out)}", flush=True)
    tokenizer = train_tokenizer(corpus.train)
    stream = encode(tokenizer, corpus.train, copies=COPIES, seed=args.seed).to(device)
    held_out = encode(tokenizer, list(corpus.held_out.values())).to(device)
    tokens = (
        f"{len(stream):,} training ({COPIES} copies, cut differently), {len(held_out):,} held out"
    )
    print(f"tokens: {tokens}", flush=True)

    model = build_model(args.dropout).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"parameters: {parameters:,} ({parameters * 2:,} bytes in bf16)", flush=True)
    check(parameters * 2 < MAX_CHECKPOINT_BYTES, f"{parameters} parameters are too many")
    began = time.monotonic()
    steps = train(model, stream, held_out, args)
    seconds = time.monotonic() - began

    # The losses reported are those of the weights as saved: rounded to bf16.
    model.to(torch.bfloat16).float()
    losses = {
        part: evaluate(model, data, args.seq_len)
        for part, data in (("train", stream), ("held", held_out))
    }
    losses["long"] = evaluate(model, held_out, CONTEXT)
    size = write_checkpoint(args.out, model, tokenizer)
    check(
        size <= MAX_CHECKPOINT_BYTES,
        f"the checkpoint has {size} bytes, at most {MAX_CHECKPOINT_BYTES} are allowed",
    )
    facts: dict[str, object] = {
        "data": f"standard library of Python {platform.python_version()}, {corpus.total_bytes:,} "
        "bytes",
        "corpus sha256": f"`{corpus.sha256}`",
        "tokens": tokens,
        "parameters": f"{parameters:,} (`model.safetensors`: {size:,} bytes, bf16)",
        "steps": f"{steps:,} of {args.batch_size * args.seq_len:,} tokens ({seconds:.0f} s, torch "
        f"{torch.__version__})",
        "training loss": f"{losses['train']:.3f} nats per token, without dropout",
        "held-out loss": f"{losses['held']:.3f} ({args.seq_len}-token windows), "
        f"{losses['long']:.3f} ({CONTEXT}-token)",
    }
    write_readme(args.out, corpus, args, facts)
    for key, value in facts.items():
        print(f"{key}: {value}", flush=True)
    print_samples(args.out)


if __name__ == "__main__":
    main()
