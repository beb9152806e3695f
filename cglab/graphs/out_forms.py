"""``out=`` forms of operators, checked once at capture before a replay relies on them.

Writing into the block saves a copy, but some ``out=`` kernels resize, re-stride or round differently. Each use is
tried once: same bits, same strides, same memory, or the result is copied instead. Random operations are never
tried, so that a capture draws exactly as often as eager does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OutForm:
    """An ``out`` overload and the names of its output arguments."""

    func: Any
    names: tuple[str, ...]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[Tensor]) -> Any:
        """Runs it into ``targets``."""
        return self.func(*args, **kwargs, **dict(zip(self.names, targets, strict=True)))


@cache
def _candidate(func: Any) -> OutForm | None:
    tags = func.tags
    if torch.Tag.nondeterministic_seeded in tags or any(
        str(r.type) != "Tensor" for r in func._schema.returns
    ):
        return None  # a list of results (_foreach_add) has no out form that names each
    plain = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        form = getattr(func.overloadpacket, name)
        outs = tuple(a.name for a in form._schema.arguments if a.is_out)
        rest = [(a.name, str(a.type)) for a in form._schema.arguments if not a.is_out]
        if outs and rest == plain and len(outs) == len(func._schema.returns):
            return OutForm(form, outs)
    return None


def out_form(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[Tensor], results: list[Tensor]
) -> OutForm | None:
    """The ``out`` overload of ``func`` if it writes ``results`` to the letter, else None.

    Args:
        func: the functional overload.
        args, kwargs: arguments as a replay will pass them.
        targets: memory of the results, as a replay will pass it.
        results: the same memory, holding what ``func`` computed.
    """
    form = _candidate(func)
    if form is None:
        return None
    wanted = [result.clone() for result in results]
    places = [(t.data_ptr(), t.shape, t.stride()) for t in targets]
    for target in targets:
        target.view(torch.uint8).fill_(0xA5) if target.dim() and target.is_contiguous() and target.stride(
            -1
        ) == 1 else target.zero_()
    try:
        form.call(args, kwargs, targets)
        same = all(
            (t.data_ptr(), t.shape, t.stride()) == place and same_bits(t, want)
            for t, place, want in zip(targets, places, wanted, strict=True)
        )
    except (RuntimeError, TypeError, NotImplementedError):  # no kernel for this use: copy instead
        same = False
    for result, want in zip(results, wanted, strict=True):
        result.copy_(want)
    return form if same else None


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals NaN, 0.0 does not equal -0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.numel():
        return True
    return torch.equal(_words(left), _words(right))


WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _words(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # What is contiguous may still have an odd stride on an axis of one element.
    return plain.as_strided((plain.numel(),), (1,)).view(WORDS.get(plain.itemsize, torch.int64))
