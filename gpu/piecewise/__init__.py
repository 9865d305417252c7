"""The whole-graph road: the model traced once, split at attention, and compiled piece by piece
for sizes and ranges.
"""

from .build import build
from .decorate import Open, evaluate_guards, support_torch_compile
from .stitched import Piecewise

__all__ = ["Open", "Piecewise", "build", "evaluate_guards", "support_torch_compile"]
