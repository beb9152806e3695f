"""``ops``: in which kernels a model computes, the same in the eager and in the captured arm.

``portable`` is PyTorch's own operators, block after block, over gathered keys and values: it runs anywhere, and it is
what the tape records. ``compiled`` is regions of ``torch.compile`` between attentions and one attention kernel over
the pages; it needs a CUDA device and Triton, and is the default where both are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from cglab.errors import ToggleError, no_such
from cglab.models.assistant import Assistant, AssistantConfig
from cglab.models.attention import DecodeAttention
from cglab.models.block_draft import BlockDraft
from cglab.models.body import Portable
from cglab.models.compiled import Compiled
from cglab.models.compiled_assistant import CompiledAssistant
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.dsa_config import DsaConfig
from cglab.models.kv import PagedKV
from cglab.models.latent_decode import LatentDecode
from cglab.models.paged import AttentionKind, PagedDecodeAttention

OPS = ("portable", "compiled")
DECODE_ATTENTION: Mapping[str, type[DecodeAttention | PagedDecodeAttention]] = MappingProxyType(
    {"portable": DecodeAttention, "compiled": PagedDecodeAttention}
)
"""How a decode step attends, by the form of the body."""


def decode_attention(config: object, form: str) -> Callable[..., Any]:
    """What a decode step of a model attends with; the arguments are those of ``DecodeStep``.

    Args:
        config: the model's shape.
        form: of its body.
    """
    if isinstance(config, DsaConfig):
        return functools.partial(LatentDecode, index_topk=config.index_topk)
    return DECODE_ATTENTION[form]


def good_ops(device: torch.device, config: object = None) -> dict[str, str | None]:
    """Every form, with the reason why it cannot be used on a device, or None if it can.

    Args:
        device: where a model computes.
        config: its shape; None for any that all forms have.
    """
    why = None
    if isinstance(config, DsaConfig):
        why = "it has no form for latent attention"
    elif device.type != "cuda":
        why = "it needs a CUDA device: the tape records uncompiled operations"
    elif find_spec("triton") is None:
        why = "its kernels need Triton, which comes with torch for CUDA"
    return {"portable": None, "compiled": why}


def check_ops(name: str | None, device: torch.device, config: object = None) -> str:
    """The form of this name; None takes the fastest that the device can use.

    Args:
        name: the form.
        device: where a model computes.
        config: its shape; None for any that all forms have.

    Raises:
        ToggleError: for an unknown form, or one that the device cannot use.
    """
    forms = good_ops(device, config)
    good = [form for form, why in forms.items() if why is None]
    if name is None:
        return good[-1]
    if name not in OPS:
        raise ToggleError(no_such(f"form of ops on {device}", name, good))
    if forms[name] is not None:
        raise ToggleError(f"ops {name!r} cannot be used on {device}: {forms[name]}; good: {', '.join(good)}")
    return name


def use_ops(name: str, model: Decoder, kv: PagedKV, kinds: Sequence[AttentionKind] = ()) -> None:
    """Sets the form in which ``model`` computes, compiled for it and its cache.

    Args:
        name: a checked form.
        model: whose form.
        kv: its cache.
        kinds: of steps beside decode, such as a verify step's.

    Raises:
        ToggleError: if the model has layers that the form has not.
    """
    if name == "portable":
        model.body = Portable()
        return
    if isinstance(model.config, DsaConfig):
        raise ToggleError(f"ops {name!r} has no form for latent attention; good: portable")
    body = _compiled(model.config, model.rotary.dtype, kv.device)
    body.prepare(model, kv, kinds)
    model.body = body


def use_draft_ops(name: str, draft: Assistant | BlockDraft, kv: PagedKV) -> None:
    """Sets the form in which a draft model computes; see ``use_ops``.

    Args:
        name: a checked form.
        draft: bound to its target.
        kv: the cache that its layers read: the target's, or a block draft's own.
    """
    if name == "portable":
        draft.body = Portable()
    elif isinstance(draft, BlockDraft):
        shape, place = draft.config, (draft.norm.weight.dtype, kv.device)
        body = _compiled(shape.stack, *place)
        body.prepare(draft, kv, [AttentionKind(shape.num_heads, shape.block_size, tree=True)])
        draft.body = body
    else:
        asking = _compiled_draft(draft.config, draft.norm.weight.dtype, kv.device)
        asking.prepare(draft, kv)
        draft.body = asking


@functools.cache
def _compiled(config: ModelConfig, _dtype: Any, _device: Any) -> Compiled:
    """One for all models of a shape: opening a model again compiles nothing."""
    return Compiled(config)


@functools.cache
def _compiled_draft(config: AssistantConfig, _dtype: Any, _device: Any) -> CompiledAssistant:
    return CompiledAssistant(config.stack)
