"""Pallas kernels for TPUs, registered as implementations of ops by importing this package."""

from . import attention as attention
from . import experts as experts
from . import grouped as grouped
from . import narrow as narrow
from . import write as write
