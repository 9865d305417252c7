"""The limits and policies of one scheduler, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .drafts import SpeculativeConfig
from .errors import ConfigError
from .page_groups import PageGroup, base_page, check_groups


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a scheduler may do. Raises ConfigError.

    max_num_seqs            requests that run at once
    max_num_batched_tokens  tokens of a step
    max_model_len           tokens of a request, prompt included
    page_size, num_pages    of the KV cache
    groups                  its page groups; none: one of pages of `page_size` tokens, which keeps
                            all of them. The smallest page has `page_size` tokens
    enable_chunked_prefill  split prompts to fill a step; otherwise a prompt goes whole or waits
    policy                  "fcfs": by arrival; "priority": lower numbers first
    priority_window         with "priority": one level is worth that many arrivals, so that nothing
                            waits for ever
    pipeline_depth          steps scheduled and not read back: 1, or 2 to schedule while the device
                            computes
    watermark               share of the pages kept free, when others run, for their next tokens:
                            starting a request that is soon preempted costs more than starting it
                            later
    decode_steps            decode steps that one step may hold (a loop) while no request needs the
                            host between tokens
    drafts                  how tokens are guessed and computed ahead; None: they are not
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    priority_window: int = 1000
    pipeline_depth: int = 2
    watermark: float = 0.01
    decode_steps: int = 1
    groups: tuple[PageGroup, ...] = ()
    drafts: SpeculativeConfig | None = None

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """The groups: one that keeps all tokens where none are named."""
        return self.groups or (PageGroup(self.page_size),)

    def __post_init__(self) -> None:
        least_1 = (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "page_size",
            "num_pages",
            "decode_steps",
        )
        for name in least_1:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, allowed is at least 1")
        # A step must hold the decodes of all running requests, and a whole prompt where prompts are
        # not split.
        floors = {"max_num_seqs": self.max_num_seqs}
        if not self.enable_chunked_prefill:
            floors["max_model_len without chunked prefill"] = self.max_model_len
        for name, floor in floors.items():
            if self.max_num_batched_tokens < floor:
                raise ConfigError(
                    f"max_num_batched_tokens: got {self.max_num_batched_tokens}, allowed is at "
                    f"least {floor} ({name})"
                )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy: got {self.policy!r}, allowed are 'fcfs' and 'priority'")
        if self.priority_window < 1:
            raise ConfigError(f"priority_window: got {self.priority_window}, allowed is at least 1")
        if self.pipeline_depth not in (1, 2):
            # The device keeps one token per row, so a row can have one token that is computed with
            # but not read.
            raise ConfigError(f"pipeline_depth: got {self.pipeline_depth}, allowed are 1 and 2")
        if self.drafts is not None and (self.pipeline_depth, self.decode_steps) != (1, 1):
            # Guesses follow a token that the host has read.
            raise ConfigError(
                f"drafts: need pipeline_depth 1 and decode_steps 1, got {self.pipeline_depth} and "
                f"{self.decode_steps}"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark: got {self.watermark}, allowed is 0 to less than 1")
        check_groups(self.page_groups)
        if base_page(self.page_groups) != self.page_size:
            raise ConfigError(
                f"page_size: got {self.page_size}, the smallest page of the groups has "
                f"{base_page(self.page_groups)}"
            )
