"""What torch may not decide by itself: how products are rounded."""

from __future__ import annotations

import warnings

import torch


def pin_precision() -> None:
    """No framework defaults: float32 products in float32, bfloat16 products accumulated in
    float32.
    """
    # Inductor advises what we refuse on purpose.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
