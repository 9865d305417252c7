"""Launches that overlap (programmatic dependent launch): a kernel comes up while the one before it
still runs.

What it does before `wait` is hidden behind that one: finding its place, loading weights. The rule,
which all kernels here keep: before `wait` nothing is written, and only weights are read, which no
launch of a step writes. `decode_kernel` and `held_decode_kernel` also read lengths, page tables
and, in a decode step, K and V of all slots but a request's last: the scheduler lets no other be
written by the same step. `latent_decode_kernel` reads lengths and page tables. A step begins with
launches that do not overlap, which bring its inputs, gather page tables and then embed its tokens;
what came before the last of them, whoever wrote those slots and tables among it, has ended when the
layers begin.
`narrow_few_down_kernel` also reads the choices of experts: the launch in front of it is LATE, and
waits for who chose. A program may end without `wait` if another one of its launch waits: else the
launch would be done before the one in front of it. A kernel that knows nothing of this neither
starts early nor lets others start before it has ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LATE = tl.constexpr(1)
"""The next launch may come up once this one's inputs are there."""
EARLY = tl.constexpr(2)
"""The next launch may come up once this one has asked for its weights: several may be waiting in
a row.
"""


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Until the launch before has ended and its results can be read. OVERLAP: 0 (not at all),
    LATE or EARLY.
    """
    if OVERLAP == EARLY:
        gdc_launch_dependents()
    if OVERLAP:
        gdc_wait()
    if OVERLAP == LATE:
        gdc_launch_dependents()
