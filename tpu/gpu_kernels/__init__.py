"""Pallas kernels that XLA compiles through Triton for NVIDIA GPUs, registered as implementations
by importing this.
"""

from . import attention as attention
from . import write as write
