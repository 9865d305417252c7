"""GLM-4.5V and GLM-4.6V: a GLM-4.5 beside a vision tower. The text model alone runs, on prompts of
text.
"""

from __future__ import annotations

from . import glm4v

FAMILY = glm4v.family("Glm4vMoeTextModel", 151_363)
