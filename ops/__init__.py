"""What is computed: op declarations, references, contracts, the implementation plan, and the
framework bindings.

Importing this package imports neither JAX nor torch; `resolve(framework)` loads the one that is
asked for.
"""

from . import reference as _reference  # noqa: F401  registers the ops
from .declare import REGISTRY, Contract, Op, OpError, define
from .implement import Implementation, implement
from .plan import BoundPlans, Choice, Plan, Plans, priority, resolve, set_default
from .recording import Recorder

__all__ = [
    "REGISTRY",
    "BoundPlans",
    "Choice",
    "Contract",
    "Implementation",
    "Op",
    "OpError",
    "Plan",
    "Plans",
    "Recorder",
    "define",
    "implement",
    "priority",
    "resolve",
    "set_default",
]
