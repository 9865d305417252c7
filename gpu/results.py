"""What a step gives, on its way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..ops.namespaces.torch_ import to_numpy
from ..shared.errors import InternalError
from ..shared.step import StepInput, StepOutput, TopLogprobs


class Download:
    """Brings the sampled tokens to the host on a stream of its own, through pinned buffers that
    are used again. `stream` is that of the steps, None on a CPU.
    """

    def __init__(self, rows: int, cuda: bool) -> None:
        self._rows = rows
        self._stream = torch.cuda.Stream() if cuda else None
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._made = torch.cuda.Event() if cuda else None
        self._last: torch.cuda.Event | None = None

    def wait_for_last(self, stream: torch.cuda.Stream | None) -> None:
        """Let the device finish the last copy before the tokens are written again."""
        if self._last is not None:
            self._last.wait(stream)

    def start(
        self, tokens: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> Callable[[], np.ndarray]:
        """Copy tokens [R], or [steps R] of a loop, and return what waits for them."""
        if self._stream is None or self._made is None or stream is None:
            kept = tokens.numpy().copy()
            return lambda: kept
        if not self._free:
            self._free.append(
                (torch.empty(self._rows, dtype=torch.int32, pin_memory=True), torch.cuda.Event())
            )
        host, done = self._free.pop()
        target = host[: tokens.numel()].view(tokens.shape)
        # Streams are named: to ask for the current one each time takes longer than the calls.
        self._made.record(stream)
        self._stream.wait_event(self._made)
        torch.cuda.set_stream(self._stream)
        try:
            target.copy_(tokens, non_blocking=True)
        finally:
            torch.cuda.set_stream(stream)
        done.record(self._stream)
        self._last = done

        def wait() -> np.ndarray:
            done.synchronize()
            array = target.numpy().copy()
            self._free.append((host, done))
            return array

        return wait


@dataclass(slots=True)
class Handle:
    """A started step. What is not the tokens is on its way to the host; `ready` is recorded
    behind it on a GPU.
    """

    step: StepInput
    tokens: Callable[[], np.ndarray] | None
    """None: the step waits for masks."""
    top: tuple[torch.Tensor, ...] | None
    prompt: list[tuple[torch.Tensor, ...]] | None
    ready: torch.cuda.Event | None
    streams: list[torch.Tensor] | None = None
    """By iteration, on the device."""
    drops: bool = False

    def result(self) -> StepOutput:
        """Wait for the step. Raises InternalError if it waits for masks."""
        if self.tokens is None:
            raise InternalError(f"step {self.step.step_id} has no sampler yet")
        if self.ready is not None:
            self.ready.synchronize()
        top = None if self.top is None else TopLogprobs(*(x.numpy() for x in self.top))
        prompt = None
        if self.prompt is not None:
            prompt = TopLogprobs(
                *(torch.cat(column).numpy() for column in zip(*self.prompt, strict=True))
            )
        return StepOutput(self.step.step_id, self.tokens(), top, prompt, self._streams())

    def _streams(self) -> np.ndarray | None:
        if self.streams is None:
            return None
        found: np.ndarray = to_numpy(torch.stack(self.streams))
        if self.drops:
            # The last layer has the last tokens of requests at the front.
            index = self.step.field("sample_index")[: int(self.step.field("counts")[1])]
            last = found[:, -1, :, : len(index)].copy()
            found[:, -1] = np.nan
            found[:, -1][:, :, index] = last
        return found
