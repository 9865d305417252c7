"""The steps that are compared: prompts through the real scheduler and packer, with given tokens,
not sampled ones.

Prompts of different lengths, more tokens than a step holds, and some continuation: so there are
chunks, ragged batches of prefill and decode, pure decode steps, and padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...bucketing import Table
from ...shared.errors import ConfigError, RequestError
from ...shared.packer import pack
from ...shared.page_groups import PageGroup
from ...shared.request import Request
from ...shared.request_table import ScheduledStep
from ...shared.sampling_params import SamplingParams
from ...shared.scheduler import Scheduler
from ...shared.scheduler_config import SchedulerConfig
from ...shared.step import StepInput, StepShape
from ...shared.tokenizer import Tokenizer
from .narrow_cache import empty
from .subject import Subject

LENGTHS = (40, 3, 61, 17, 30, 1)
"""Tokens of the prompts: with 64 tokens a step, some are split, some share a step."""
NEW_TOKENS = 3
TEXTS = (
    "def read_file(path):\n    with open(path) as file:\n        return file.read()\n\n\nclass "
    "Node:\n    def __init__",
    "import json\n\n\ndef load_config(filename):\n    with open(filename) as file:\n        "
    "return "
    "json.load(file)\n",
    "The two sides run the same steps; what differs is judged against what rounding alone would "
    "do. " * 2,
)


def default_prompts(
    subject: Subject, seed: int = 0, lengths: Sequence[int] = LENGTHS
) -> list[np.ndarray]:
    """Prompts with their continuation, token ids int32: text if the model has a tokenizer, else
    random.
    """
    rng = np.random.default_rng(seed)
    lengths = [min(length, subject.max_model_len - NEW_TOKENS) + NEW_TOKENS for length in lengths]
    tokenizer = Tokenizer.load(subject.folder) if seed == 0 else None
    if tokenizer is not None:
        texts = [tokenizer.encode(text) for text in TEXTS]
        streams = [
            np.tile(np.asarray(ids, np.int32), 1 + max(lengths) // len(ids)) for ids in texts
        ]
        return [streams[i % len(streams)][7 * i : 7 * i + n] for i, n in enumerate(lengths)]
    return [rng.integers(0, subject.model.vocab_size, n).astype(np.int32) for n in lengths]


def read_text(path: str, subject: Subject) -> np.ndarray:
    """The tokens [tok] int32 of a text file. Raises ConfigError."""
    return np.asarray(encode(_read("text", path), subject), np.int32)


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot read {path}: {error}") from error


def read_prompts(path: str, subject: Subject) -> list[np.ndarray]:
    """Prompts from a file of JSON lines: {"token_ids": [...]} or {"prompt": "text"}. Raises
    ConfigError.
    """
    prompts, lines = [], _read("prompts", path).splitlines()
    for number, line in enumerate(filter(str.strip, lines), 1):
        try:
            record = json.loads(line)
            ids = (
                record["token_ids"] if "token_ids" in record else encode(record["prompt"], subject)
            )
            prompts.append(np.asarray(ids, np.int32))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"prompts: line {number} of {path} has no token_ids or prompt ({error})"
            ) from error
    if not prompts:
        raise ConfigError(f"prompts: {path} has none")
    return prompts


def encode(text: str, subject: Subject) -> list[int]:
    """The token ids of a text. Raises ConfigError if the model has no tokenizer."""
    tokenizer = Tokenizer.load(subject.folder)
    if tokenizer is None:
        raise ConfigError(f"prompt: {subject.folder} has no tokenizer.json; give token ids")
    return tokenizer.encode(text)


def make_steps(subject: Subject, prompts: Sequence[np.ndarray]) -> list[StepInput]:
    """The steps of `make_owned_steps` alone."""
    return [step for step, _ in make_owned_steps(subject, prompts)]


def make_owned_steps(
    subject: Subject, prompts: Sequence[np.ndarray], new_tokens: int = NEW_TOKENS
) -> Iterator[tuple[StepInput, list[int]]]:
    """Steps that run each prompt but for its last `new_tokens` ids, and then these, one at a time,
    but for the last one, which is only chosen; each with the prompts that its requests are of, by
    number. With `new_tokens` 0 all ids of a prompt run, and one more is chosen, which needs room.

    Raises RequestError for a prompt that is too short, too long, or outside of the vocabulary.
    """
    table = Table(
        (subject.max_num_seqs,), (max(subject.tokens, subject.max_num_seqs),), subject.max_num_seqs
    )
    groups = subject.layout.groups
    config = SchedulerConfig(
        max_num_seqs=subject.max_num_seqs,
        max_num_batched_tokens=table.mixed_sizes[-1],
        max_model_len=subject.max_model_len,
        page_size=subject.page_size,
        num_pages=subject.num_pages * len(groups),
        enable_prefix_caching=False,
        pipeline_depth=1,
        groups=groups,
    )
    pages = -(-subject.max_model_len // subject.page_size)
    shape = StepShape(
        pages, subject.max_num_seqs, subject.max_model_len, subject.model.vocab_size, len(groups)
    )
    scheduler = Scheduler(config, table)
    chosen = max(new_tokens, 1)
    longest = subject.max_model_len - (chosen - new_tokens)
    for index, ids in enumerate(prompts):
        check_prompt(ids, index, subject, new_tokens + 1, longest)
        params = SamplingParams(temperature=0.0, max_tokens=chosen, ignore_eos=True)
        scheduler.add(Request(str(index), ids[: len(ids) - new_tokens], params, seed=index))
    for step, owners, _ in forced_steps(scheduler, shape, prompts):
        yield step, owners


def forced_steps(
    scheduler: Scheduler, shape: StepShape, prompts: Sequence[np.ndarray], first_id: int = 1
) -> Iterator[tuple[StepInput, list[int], ScheduledStep]]:
    """The steps of a scheduler until it has no work, with their page tables: each request goes on
    with the tokens of the prompt whose number its name begins with. With each step these numbers,
    and what was scheduled.
    """
    step_id = first_id
    while (scheduled := scheduler.schedule()) is not None:
        owners = [int(request.request_id.partition("/")[0]) for request in scheduled.requests]
        step = pack(scheduled, scheduler.table, shape, step_id, with_page_table=True)
        yield step, owners, scheduled
        step_id += 1
        following = [prompts[owner] for owner in owners]
        tokens = [
            ids[min(end, len(ids) - 1)]
            for ids, end in zip(following, scheduled.ends.tolist(), strict=True)
        ]
        scheduler.update(scheduled, np.asarray(tokens, np.int32))


def check_prompt(
    ids: np.ndarray, index: int, subject: Subject, shortest: int, longest: int
) -> None:
    """Raise RequestError for a prompt of another length, or outside of the vocabulary."""
    if not shortest <= len(ids) <= longest:
        raise RequestError(
            "prompts",
            f"prompt {index} has {len(ids)} tokens, allowed are {shortest} to {longest} with "
            f"max_model_len {subject.max_model_len}",
        )
    if ids.min() < 0 or ids.max() >= subject.model.vocab_size:
        raise RequestError("prompts", f"prompt {index} has a token outside of the vocabulary")


def groups_of(subject: Subject) -> list[int]:
    """The page group of each layer in the steps that are compared."""
    return [place.group for place in subject.layout.places]


def by_group(entries: np.ndarray, groups: Sequence[PageGroup]) -> np.ndarray:
    """Slots [G T] or page tables [G R, P] of a step with one page group behind another, as a view
    whose first axis is the group.
    """
    return entries.reshape(len(groups), -1, *entries.shape[1:])


def written_slots(step: StepInput, group: int) -> np.ndarray:
    """The slots that layers of a page group write, in the order of the tokens."""
    slots = step.field("slots").reshape(step.shape.num_groups, -1)[group]
    return slots[slots >= 0]


def held_entries(step: StepInput, groups: Sequence[PageGroup]) -> np.ndarray:
    """Which entries [group request column] of the page tables name pages that a step reads or
    writes. Those in front of a window are released.
    """
    count = int(step.field("counts")[1])
    lengths = step.field("kv_lens")[:count]
    first = lengths - np.diff(step.field("query_start")[: count + 1])
    columns = np.arange(step.shape.pages_per_request)
    held = np.zeros((len(groups), step.descriptor.requests, len(columns)), np.bool_)
    for number, group in enumerate(groups):
        begin, end = group.first_columns(first), -(-lengths // group.page_size)
        held[number, :count] = (columns >= begin[:, None]) & (columns < end[:, None])
    return held


def cache_shapes(subject: Subject, pages: int) -> list[tuple[int, ...]]:
    """The cache of each layer [page slot 2*kvhead hdim]."""
    layout = subject.layout
    return [(pages, *layout.page_shape(layer)) for layer in range(subject.model.num_layers)]


def empty_caches(subject: Subject, steps: Sequence[StepInput]) -> list[np.ndarray]:
    """The cache of each layer before the first step. Slots that nobody wrote hold NaN, or what no
    int8 cache holds: whoever reads one shows it. Layers of one shape share it.
    """
    shapes = cache_shapes(subject, pages_of(steps))
    made = {shape: empty(shape, subject.cache_dtype) for shape in shapes}
    return [made[shape] for shape in shapes]


def real_tokens(step: StepInput) -> int:
    """Tokens of a step that are not padding."""
    return int(step.field("query_start")[int(step.field("counts")[1])])


def rows_of_requests(step: StepInput) -> list[range]:
    """The rows of each request of a step."""
    starts, count = step.field("query_start").tolist(), int(step.field("counts")[1])
    return [range(*ends) for ends in pairwise(starts[: count + 1])]


def pages_of(steps: Sequence[StepInput]) -> int:
    """Pages that steps name, with the scratch page that stands behind them."""
    return 2 + max(int(step.field("page_table").max(initial=0)) for step in steps)


def _request_of(step: StepInput, token: int) -> int | None:
    """The request of row `token` of a step; None for padding."""
    starts, count = step.field("query_start"), int(step.field("counts")[1])
    request = int(np.searchsorted(starts[1 : count + 1], token, side="right"))
    return request if request < count else None


def where(step: StepInput, token: int) -> str:
    """Row `token` of a step, as (request, position)."""
    request = _request_of(step, token)
    if request is None:
        return "padding"
    return (
        f"request {int(step.field('rows')[request])}, position "
        f"{int(step.field('positions')[token])}"
    )


def owned_rows(step: StepInput, owners: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(prompt, position) of each row of a step whose requests are of the prompts `owners`."""
    starts, positions = step.field("query_start").tolist(), step.field("positions").tolist()
    for request, prompt in enumerate(owners):
        for row in range(starts[request], starts[request + 1]):
            yield prompt, positions[row]


def place(
    step: StepInput, worst: tuple[int, ...], ndim: int, subject: Subject, layer: int = -1
) -> str:
    """Where an element of an output of a layer is: index `worst` of its rows [tok ...], or slots
    [slot 2*kvhead hdim] of a cache, which has 4 dimensions. Names request, position, page, and the
    head where there is one.
    """
    if not worst:
        return ""
    parts, layout = [], subject.layout
    group = layout.places[layer].group if layer >= 0 else 0
    page_size = layout.groups[group].page_size
    if ndim == 4:
        page, offset = divmod(worst[0], page_size)
        written = np.flatnonzero(written_slots(step, group) == worst[0])
        parts = [where(step, int(written[0])) if len(written) else "not written in this step"]
        parts += [f"page {page}, slot {offset}", f"{'KV'[worst[1] % 2]} head {worst[1] // 2}"]
    elif (request := _request_of(step, worst[0])) is not None:
        position = int(step.field("positions")[worst[0]])
        pages = by_group(step.field("page_table"), layout.groups)[group, request]
        page = int(pages[position // page_size])
        parts = [where(step, worst[0]), f"page {page}"] + (
            [f"head {worst[1]}"] if ndim == 3 else []
        )
    return ", ".join(parts)
