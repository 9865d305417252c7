"""Pallas kernels for TPUs, registered as implementations of ops by importing this package."""

from . import attention as attention
from . import write as write
