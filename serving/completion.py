"""The text side of one completion: detokenisation, stop strings, log-probabilities."""

from __future__ import annotations

from ..shared.detokenizer import Detokenizer
from ..shared.engine import Update
from ..shared.request import NOT_FINITE, FinishReason, Request, RequestState
from ..shared.tokenizer import Tokenizer
from .outputs import CompletionOutput


class Completion:
    """Turns the updates of one engine request into a `CompletionOutput`."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.output = CompletionOutput(index)
        self.done = False
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._text = None
        if tokenizer is not None:
            self._text = Detokenizer(
                tokenizer,
                request.prompt.tolist(),
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    def take(self, update: Update) -> bool:
        """Take a token. True if its text completed a stop string: the engine must end the request."""
        output, params = self.output, self.request.params
        output.token_ids.append(update.token)
        if update.logprobs is not None and output.logprobs is not None:
            output.logprobs.append(update.logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + update.logprobs[update.token].logprob
        if update.finished:
            reason = self._take_reason()
            if reason is FinishReason.STOP:
                output.stop_reason = update.token if update.token in params.stop_token_ids else None
        if self._text is not None:
            # The token that ends a request belongs to its ids, not to its text.
            ended_by_token = update.finished and self.request.finish_reason is FinishReason.STOP
            if not (ended_by_token and not params.include_stop_str_in_output):
                output.text += self._text.append([update.token])
            if self._text.stopped is not None:
                output.finish_reason, output.stop_reason = FinishReason.STOP.value, self._text.stopped
                self.done = True
                return not update.finished
            if update.finished:
                output.text += self._text.finish()
                if self._text.stopped is not None:
                    output.finish_reason, output.stop_reason = FinishReason.STOP.value, self._text.stopped
        self.done = self.done or update.finished
        return False

    def ended(self) -> bool:
        """Whether nothing more will come: it is done, or its request was ended from outside."""
        if not self.done and self.request.state is RequestState.FINISHED:
            self.done = True
            self._take_reason()
            if self._text is not None:
                self.output.text += self._text.finish()
        return self.done

    def _take_reason(self) -> FinishReason:
        """Say in the output why the request ended."""
        reason = self.request.finish_reason or FinishReason.ERROR
        self.output.finish_reason = reason.value
        if reason is FinishReason.ERROR:
            self.output.stop_reason = NOT_FINITE
        return reason
