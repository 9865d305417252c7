"""The ops: one executable reference each."""

from . import dense, paged, sampling

__all__ = ["dense", "paged", "sampling"]
