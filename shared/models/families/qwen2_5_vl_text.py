"""The text model of Qwen2.5-VL, which is that of Qwen2-VL."""

from __future__ import annotations

from . import qwen2_vl_text

FAMILY = qwen2_vl_text.FAMILY
