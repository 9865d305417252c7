"""The text side of one completion: detokenisation, stop strings, log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..shared.detokenizer import Detokenizer
from ..shared.engine import TokenLogprobs, Update
from ..shared.request import NO_TOKEN, NOT_FINITE, FinishReason
from ..shared.sampling_params import SamplingParams
from ..shared.tokenizer import Tokenizer
from .outputs import CompletionOutput


@dataclass(frozen=True, slots=True)
class Mark:
    """A token that says something and is not part of the text: it stands before the character
    `place` of that, and is the completion's token `number`.
    """

    token_id: int
    place: int
    number: int


class Completion:
    """Turns the updates of one engine request into a `CompletionOutput`. `mark_ids` are tokens
    without a text whose places are to be told: `marks`; with each, whether stop strings are looked
    for behind it, if it changes that.
    """

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.output = CompletionOutput(index)
        self.done = False
        self.num_cached_tokens = 0
        self.mark_ids: Mapping[int, bool | None] = {}
        self.marks: list[Mark] = []
        self._params = params
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._text = None
        if tokenizer is not None:
            self._text = Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    def look_for(
        self, mark_ids: Mapping[int, bool | None], shown_ids: Collection[int] = ()
    ) -> None:
        """Leave tokens out of the text and tell of their places. `shown_ids` are special tokens
        that are part of the text, though others are skipped.
        """
        self.mark_ids = mark_ids
        if self._text is not None:
            self._text.hide(mark_ids)
            self._text.show(shown_ids)

    def take(self, update: Update) -> bool:
        """Take what a step brought. True if its text completed a stop string: the engine must
        end the request.
        """
        self.num_cached_tokens = update.num_cached_tokens
        last = len(update.tokens) - 1
        for position, token in enumerate(update.tokens):
            logprobs = None if update.logprobs is None else update.logprobs[position]
            reason = update.finish_reason if position == last else None
            self._take_token(token, logprobs, reason)
            if self.done:
                # What comes behind a stop string is not part of the output.
                return update.finish_reason is None
        if update.finish_reason is not None:
            self._end(update.finish_reason)
        return False

    def _take_token(
        self, token: int, logprobs: TokenLogprobs | None, reason: FinishReason | None
    ) -> None:
        """`reason`: of the token that ends the request."""
        output, params = self.output, self._params
        output.token_ids.append(token)
        if logprobs is not None and output.logprobs is not None:
            output.logprobs.append(logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs[token].logprob
        if reason is FinishReason.STOP and token in params.stop_token_ids:
            output.stop_reason = token
        if self._text is None:
            return
        # The token that ends a request belongs to its ids, not to its text.
        if reason is not FinishReason.STOP or params.include_stop_str_in_output:
            output.text += self._text.append([token])
        if token in self.mark_ids:
            output.text += self._text.settle()
            self.marks.append(Mark(token, len(output.text), len(output.token_ids) - 1))
            if (searches := self.mark_ids[token]) is not None:
                self._text.searches = searches
        self._look_for_stop()

    def _look_for_stop(self) -> None:
        """End the output if its text has completed a stop string."""
        if self._text is not None and self._text.stopped is not None:
            self.output.finish_reason, self.output.stop_reason = (
                FinishReason.STOP.value,
                self._text.stopped,
            )
            self.done = True

    def _end(self, reason: FinishReason) -> None:
        """Nothing more comes."""
        self.output.finish_reason = reason.value
        if reason is FinishReason.ERROR:
            self.output.stop_reason = NOT_FINITE
        elif reason is FinishReason.STUCK:
            self.output.finish_reason, self.output.stop_reason = "error", NO_TOKEN
        if self._text is not None:
            self.output.text += self._text.finish()
            self._look_for_stop()
        self.done = True
