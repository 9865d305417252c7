"""What a request asks of the sampler. Validated once, here; nothing behind this file checks
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import Any

from .errors import RequestError
from .models.fields import show
from .option_kinds import INT32_MAX, Number, Switch, Whole
from .options import asks_for_nothing, check_fields, nearest_name, option, options_of
from .sampling_kinds import AtMost, Biases, Sequences, Strings, Temperature, TokenIds
from .structured_outputs import Structure, StructuredOutputs

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TOKEN_IDS = 1 << 19
MAX_BANNED_SEQUENCES = 1024
MAX_BANNED_LENGTH = 64
MAX_BAD_WORDS = 512
MAX_BAD_WORD_LENGTH = 256
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
LOGIT_BIAS_RANGE = 100.0
MAX_TEMPERATURE = 10.0

ELSEWHERE = {
    "best_of": "say n, and choose among the completions by cumulative_logprob",
    "detokenize": "texts are made always; leave it out",
    "early_stopping": "beams are not searched; leave it out",
    "extra_args": "no code of a user reads them; leave it out",
    "guided_decoding": "say structured_outputs",
    "length_penalty": "beams are not searched; leave it out",
    "logits_processors": "no code of a user runs in a step; see logit_bias and allowed_token_ids",
    "output_kind": "LLM.stream gives what is new, LLM.generate what is complete; leave it out",
    "spaces_between_special_tokens": "the tokenizer decides; leave it out",
    "truncate_prompt_tokens": "cut the prompt's token ids, and give those",
    "use_beam_search": "beams are not searched; see n",
}
"""What stands in the place of settings that vLLM has and that are none here."""
_NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "extra_args": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
"""Values of theirs with which they ask for nothing, beside None."""

_option = partial(option, owner="sampling")


def _own(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without those of vLLM's that ask for nothing. Raises RequestError for any other that is no
    setting here, with what stands in its place.
    """
    known = options_of(SamplingParams)
    unknown = settings.keys() - known.keys()
    for name in unknown:
        value = settings[name]
        if name in ELSEWHERE and asks_for_nothing(value, *_NOTHING.get(name, ())):
            continue
        near = nearest_name(name, known.values())
        words = ELSEWHERE.get(name) or (f"did you mean {near!r}?" if near else "no such setting")
        raise RequestError(name, f"got {show(value)}; {words}")
    return {name: settings[name] for name in settings.keys() - unknown} if unknown else settings


def _takes_others(cls: type[SamplingParams]) -> type[SamplingParams]:
    """With an initialiser that knows what vLLM's settings are; it shows its own alone."""
    init: Callable[..., None] = vars(cls)["__init__"]

    @wraps(init)
    def answer(self: SamplingParams, *args: Any, **settings: Any) -> None:
        init(self, *args, **_own(settings))

    type.__setattr__(cls, "__init__", answer)
    return cls


@_takes_others
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request, with the names and defaults that users of vLLM know.

    `max_tokens` None is as many as fit, and is kept as the largest number; a completion ends with
    `length` where context or cache do, whatever the maximum. `temperature` 0 is
    greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `seed` None lets the engine draw one.
    Penalties follow the usual order: repetition on the raw logits, then frequency and presence,
    then the bias, then masks (`allowed_token_ids`, `banned_token_ids`, `banned_sequences`,
    `min_tokens`), then the temperature. `bad_words` become banned tokens and sequences where there
    is a tokenizer: `LLM` and the server do it. `logprobs` N returns the N best tokens and the
    sampled one, from the raw logits. `structured_outputs` is a mapping with one of json (a schema),
    json_object, regex, choice and grammar: only tokens that keep to it are sampled, and a complete
    text ends.
    """

    n: int = _option(1, Whole(1, MAX_N), help="completions of each prompt")
    max_tokens: int = _option(
        16, AtMost(1, INT32_MAX), help="tokens of a completion at most", near=("max_new_tokens",)
    )
    min_tokens: int = _option(
        0, Whole(0, INT32_MAX), limits="0 to max-tokens", help="tokens before a stop counts"
    )
    temperature: float = _option(
        1.0, Temperature(0.0, MAX_TEMPERATURE, metavar="T"), help="how far from greedy"
    )
    top_k: int = _option(
        0,
        Whole(-1, INT32_MAX, metavar="K"),
        limits="from 1; 0 or -1: all",
        help="sample from the K best",
    )
    top_p: float = _option(
        1.0, Number(0.0, 1.0, above=True, metavar="P"), help="from the best that sum to P"
    )
    min_p: float = _option(
        0.0, Number(0.0, 1.0, metavar="P"), help="from P times the best's probability and up"
    )
    seed: int | None = _option(
        None,
        Whole(-(2**63), 2**64 - 1),
        usual="drawn",
        help="the same seed gives the same tokens on every backend",
    )
    presence_penalty: float = _option(0.0, Number(-2.0, 2.0), help="on tokens that were generated")
    frequency_penalty: float = _option(
        0.0, Number(-2.0, 2.0), help="on each time a token was generated"
    )
    repetition_penalty: float = _option(
        1.0, Number(0.01, 100.0), help="on tokens of prompt and output, 1 being none"
    )
    logit_bias: Mapping[int, float] = _option(
        None,
        Biases(MAX_LOGIT_BIAS, LOGIT_BIAS_RANGE),
        factory=dict,
        hash=False,
        help="added to logits",
    )
    allowed_token_ids: tuple[int, ...] | None = _option(
        None, TokenIds(MAX_TOKEN_IDS, some=True), usual="all", help="no other tokens"
    )
    banned_token_ids: tuple[int, ...] = _option(
        (), TokenIds(MAX_TOKEN_IDS), help="not these tokens"
    )
    banned_sequences: tuple[tuple[int, ...], ...] = _option(
        (),
        Sequences(MAX_BANNED_SEQUENCES, MAX_BANNED_LENGTH),
        help="no token that would complete one of these in the output",
    )
    bad_words: tuple[str, ...] = _option(
        (),
        Strings(MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
        help="not the tokens of these texts, as a text begins with one or behind a space",
    )
    stop: tuple[str, ...] = _option(
        (), Strings(MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH), help="texts that end a completion"
    )
    stop_token_ids: tuple[int, ...] = _option(
        (), TokenIds(MAX_STOP_TOKEN_IDS), usual="the model's end-of-sequence ids only",
        help="tokens that end a completion",
    )  # fmt: skip
    ignore_eos: bool = _option(False, Switch(), help="go on after end-of-sequence ids")
    include_stop_str_in_output: bool = _option(
        False, Switch(), help="keep the stop string in the text"
    )
    skip_special_tokens: bool = _option(True, Switch(), help="leave special tokens out of the text")
    structured_outputs: StructuredOutputs | None = _option(
        None, Structure(), help="the form that the text must have"
    )
    logprobs: int | None = _option(
        None, Whole(0, MAX_LOGPROBS), help="log-probabilities of each token and the N best"
    )
    prompt_logprobs: int | None = _option(
        None, Whole(0, MAX_LOGPROBS), help="the same of the prompt's tokens"
    )

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens",
                f"got {self.min_tokens}, must not exceed max_tokens ({self.max_tokens})",
                "max_tokens",
            )
        if self.min_tokens and self.structured_outputs is not None:
            raise RequestError(
                "min_tokens",
                "cannot be had with structured_outputs: a complete text ends",
                "structured_outputs",
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError if a token id named here does not exist in a vocabulary of
        `vocab_size`.
        """
        for name in ("stop_token_ids", "banned_token_ids", "allowed_token_ids", "banned_sequences"):
            listed = getattr(self, name) or ()
            for token in chain(*listed) if name == "banned_sequences" else listed:
                if token >= vocab_size:
                    raise RequestError(
                        name, f"token id {token} is out of range: the vocabulary has {vocab_size}"
                    )
        for token in self.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    "logit_bias",
                    f"token id {token} is out of range: the vocabulary has {vocab_size}",
                )
        if len(set(self.banned_token_ids)) >= vocab_size:
            raise RequestError("banned_token_ids", "bans the whole vocabulary")
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= set(
            self.banned_token_ids
        ):
            raise RequestError("allowed_token_ids", "every allowed token is also banned")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0.0

    @property
    def needs_processors(self) -> bool:
        """Whether logits are changed before sampling: by penalties, a bias or masks."""
        return self.changes_scores or self.masks_always or bool(self.min_tokens)

    @property
    def masks_always(self) -> bool:
        """Whether some tokens are masked at every step: `min_tokens` masks the first ones alone."""
        return bool(
            self.allowed_token_ids is not None
            or self.banned_token_ids
            or self.banned_sequences
            or self.bad_words
            or self.structured_outputs is not None
        )

    @property
    def changes_scores(self) -> bool:
        """Whether penalties or a bias change logits before sampling."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
        )

    def with_seed(self, seed: int) -> SamplingParams:
        """The same settings with `seed`, an integer of 64 bits. They are not checked again: a form
        or a list of token ids takes long, and each of many completions has its own seed.
        """
        other = copy(self)
        object.__setattr__(other, "seed", seed)
        return other
