"""The torch-xla worker (TPUs, and CPUs through XLA): torch's ops under XLA's compiler."""

import os

from ..shared.backends import has_tpu

GIVEN_DEVICE = os.environ.get("PJRT_DEVICE")
"""What somebody else chose. torch-xla chooses for itself as it is imported, and says so."""
os.environ.setdefault("PJRT_DEVICE", "TPU" if has_tpu() else "CPU")
