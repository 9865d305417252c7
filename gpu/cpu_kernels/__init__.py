"""C kernels for CPUs as implementations of ops: provider "c". Importing this registers them; they
are compiled when a plan first asks for one.
"""

from . import attention, rows  # noqa: F401
from .build import supported
from .call import PROVIDER

__all__ = ["PROVIDER", "supported"]
