"""Qwen2.5-VL: a Qwen2 beside a vision tower. The text model alone runs, on prompts of text."""

from __future__ import annotations

from . import qwen2_vl

FAMILY = qwen2_vl.family("Qwen2_5_VLTextModel")
