"""``cglab.open``: settings, device and defaults for a lab."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cglab import settings
from cglab.engine.batches import SchedulerOptions
from cglab.errors import InputError, ModelError
from cglab.lab.facade import Lab


def open_lab(
    name: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_batch: int | None = None,
    max_context: int | None = None,
    buckets: Sequence[int] | None = None,
    prefill_buckets: Sequence[int] | None = None,
    token_budget: int | None = None,
    prefix_reuse: bool = True,
    mixed: bool = False,
    padding: bool = True,
    seed: int = 0,
    debug: bool = False,
) -> Lab:
    """Opens a model.

    Args:
        name: a shipped model, a local Hugging Face folder, a hub id, or a published shape with random weights
            (``qwen3-8b``); None takes ``CGLAB_MODEL``, else ``pico-gqa``.
        device: None takes ``CGLAB_DEVICE``, else a GPU if there is one.
        dtype: None takes float32 on a CPU, bfloat16 on a GPU.
        max_batch: most requests at once: 8 on a CPU, 64 on a GPU.
        max_context: longest request in tokens: 512 on a CPU, 1024 on a GPU.
        buckets: batch sizes to capture; None takes SGLang's list up to ``max_batch``.
        prefill_buckets: token counts to capture; None takes SGLang's list up to ``token_budget``.
        token_budget: most tokens of one prefill step, and so a chunk: 256 on a CPU, 8192 on a GPU.
        prefix_reuse: tokens that an earlier request computed are not computed again.
        mixed: requests that decode ride along in prefill steps.
        padding: pad to a bucket; without it every size up to ``max_batch`` is captured.
        seed: of random weights.
        debug: outputs refuse to be read once they are stale.

    Raises:
        ModelError: if there is no such model, or it is damaged.
        DeviceError: if the device is not there.
        InputError: for a dtype that weights cannot have, or no room for a request.
    """
    if name is not None and not isinstance(name, str | Path):
        raise ModelError(f"a model is named by a string or a path, not by {name!r}")
    where = settings.device() if device is None else settings.named_device(str(device))
    if dtype is None:
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"dtype must be a floating-point torch.dtype such as torch.bfloat16, got {dtype!r}")
    budget = token_budget if token_budget is not None else (256 if where.type == "cpu" else 8192)
    return Lab(
        name or settings.read_settings().model, device=where, dtype=dtype,
        max_batch=max_batch if max_batch is not None else (8 if where.type == "cpu" else 64),
        max_context=max_context if max_context is not None else (512 if where.type == "cpu" else 1024),
        buckets=buckets, prefill_buckets=prefill_buckets,
        scheduling=SchedulerOptions(budget, prefix_reuse=prefix_reuse, mixed=mixed),
        padding=padding, seed=seed, debug=debug,
    )  # fmt: skip
