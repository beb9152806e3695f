"""``cglab.open``: settings, device and defaults for a lab."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from cglab import settings
from cglab.engine.batches import SchedulerOptions
from cglab.engine.memory import CacheLayout
from cglab.engine.speculation import Speculation
from cglab.errors import InputError, ModelError
from cglab.lab.available import draft_kind, inert
from cglab.lab.drafting import plan_draft
from cglab.lab.facade import Lab
from cglab.lab.room import CacheSizes, require_room
from cglab.lab.selection_rule import recorded_rule
from cglab.lab.sparse_prefill import require_latent
from cglab.lab.techniques import Captures
from cglab.measure.memory import free_bytes
from cglab.models.dsa_config import DsaConfig
from cglab.models.loading import find_model
from cglab.models.ops import check_ops

PAGE_SIZE: Final = 16
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MOST: Final = 10**8
"""Tokens or requests beyond which no size is meant: no machine holds their cache."""
CPU_SIZES: Final = {"max_batch": 8, "max_context": 512, "token_budget": 256}
GPU_SIZES: Final = {"max_batch": 64, "max_context": 1024, "token_budget": 8192}


def open_lab(
    name: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_batch: int | None = None,
    max_context: int | None = None,
    cache_tokens: int | None = None,
    buckets: Sequence[int] | None = None,
    prefill_buckets: Sequence[int] | None = None,
    token_budget: int | None = None,
    prefix_reuse: bool = True,
    host_tokens: int | None = None,
    mixed: bool = False,
    padding: bool = True,
    seed: int = 0,
    debug: bool = False,
    ops: str | None = None,
    draft: str | Path | None = None,
    speculation: Speculation | None = None,
    bucket_floor: int | None = None,
) -> Lab:
    """Opens a model.

    Args:
        name: a shipped model, a local Hugging Face folder, a hub id, or a published shape with random weights
            (``qwen3-8b``, ``dsa-24``); None takes ``CGLAB_MODEL``, else ``pico-gqa``.
        device: None takes ``CGLAB_DEVICE``, else a GPU if there is one.
        dtype: None takes float32 on a CPU, bfloat16 on a GPU.
        max_batch: most requests at once: 8 on a CPU, 64 on a GPU.
        max_context: longest request in tokens: 512 on a CPU, 1024 on a GPU.
        cache_tokens: tokens that the cache has room for, of all requests together; None for ``max_batch`` of the
            longest. With less, the youngest request gives way when it is full.
        buckets: batch sizes to capture; None takes SGLang's list up to ``max_batch``.
        prefill_buckets: token counts to capture; None takes SGLang's list up to ``token_budget`` or, if that is
            lower, ``prefill_limit.PREFILL_LIMIT``.
        token_budget: most tokens of one prefill step, and so a chunk: 256 on a CPU, 8192 on a GPU.
        prefix_reuse: tokens that an earlier request computed are not computed again.
        host_tokens: tokens of prefixes that host memory keeps when they leave the cache; None forgets them.
        mixed: requests that decode ride along in prefill steps.
        padding: pad to a bucket; without it every size up to ``max_batch`` is captured.
        seed: of random weights.
        debug: outputs refuse to be read once they are stale.
        draft: a draft model for speculative decoding: a shipped one, a folder, ``random``, ``random-block``,
            ``nextn`` for a model with latent attention, or a shape with random weights; None decodes plainly.
        speculation: how much is drafted; None for three steps of one candidate each, a block draft's whole block, or
            a NextN layer's one token.
        bucket_floor: smallest prefill bucket in which parts of latent attention are recorded, none if it is above the
            largest; None for S3's rule.
        ops: ``portable`` or ``compiled``; None takes ``CGLAB_OPS``, else compiled on a GPU, portable on a CPU.

    Raises:
        ModelError: if there is no such model or draft, it is damaged, or the draft is another model's.
        DeviceError: if the device is not there.
        ToggleError: for ops that the device cannot use, or a bucket floor of a model without latent attention.
        InputError: for a dtype that weights cannot have, speculation without a draft, a cache that does not fit in
            memory, or a size or seed that makes no sense: before a weight is loaded.
    """
    if name is not None and not isinstance(name, str | Path):
        raise ModelError(f"a model is named by a string or a path, not by {name!r}")
    where = settings.device() if device is None else settings.named_device(str(device))
    if dtype is None:
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    given = {
        "max_batch": max_batch, "max_context": max_context, "token_budget": token_budget, "cache_tokens": cache_tokens,
        "host_tokens": host_tokens, "bucket_floor": bucket_floor,
    }  # fmt: skip
    for what, size in given.items():
        if size is not None and (
            type(size) is not int or not 1 <= size <= MOST
        ):  # True is an int, and no size
            raise InputError(f"{what} must be a whole number from 1 to {MOST:,}, got {size!r}")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise InputError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
    defaults = CPU_SIZES if where.type == "cpu" else GPU_SIZES
    sizes = {what: given[what] or default for what, default in defaults.items()}
    name = settings.read_settings().model if name is None else name
    source = find_model(name)
    if bucket_floor is not None:
        require_latent(source.config, "bucket_floor")
    form = check_ops(settings.read_settings().ops if ops is None else ops, where, source.config)
    if host_tokens and (source.config.sliding_window or not prefix_reuse):
        raise InputError(
            f"host memory is for prefixes, and {name} keeps none (sliding window {source.config.sliding_window}, "
            f"prefix_reuse={prefix_reuse}); leave host_tokens out"
        )
    plan = plan_draft(draft, speculation, source.config)
    ahead = (
        0 if plan is None else plan.speculation.lookahead
    )  # drafts of a request's last token have positions too

    def layout(of: CacheSizes) -> CacheLayout:
        return CacheLayout.for_requests(
            of.max_batch, min(of.max_context, source.config.max_position - ahead), PAGE_SIZE,
            tokens=of.cache_tokens, budget=sizes["token_budget"], window=source.config.sliding_window,
            lookahead=ahead,
        )  # fmt: skip

    asked = CacheSizes(sizes["max_batch"], sizes["max_context"], cache_tokens)
    require_room(asked, layout, source.config, dtype=dtype, free=free_bytes(where))
    kind = None if plan is None else draft_kind(plan.source.config)
    captures = Captures(inert(kind, latent=isinstance(source.config, DsaConfig)))
    lab = Lab(
        name, source, layout(asked), device=where, dtype=dtype, captures=captures,
        buckets=buckets, prefill_buckets=prefill_buckets,
        scheduling=SchedulerOptions(sizes["token_budget"], prefix_reuse=prefix_reuse, mixed=mixed),
        padding=padding, seed=seed, debug=debug, ops=form, draft=plan,
        bucket_floor=bucket_floor, host_pages=-(-(host_tokens or 0) // PAGE_SIZE),
    )  # fmt: skip
    lab.phases.selection = partial(recorded_rule, lab.name, dtype, where)
    return lab
