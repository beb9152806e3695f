"""Is it the same work: bitwise, drift or corrupted (B45).

*Drift* is the same mathematics in another order of rounding; it stays under a bound that is measured, by
computing the same rows in another order or at another batch size, never assumed. *Corrupted* is anything
beyond: a wrong buffer, a stale row, an unreset tail. A NaN is corrupted whatever the other side holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from cglab.errors import InputError

TIE_LIMIT = 0.01
"""Largest share of tokens that may differ at near-ties of the oracle (the design's oracle 2)."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Verdict(StrEnum):
    """From best to worst."""

    BITWISE = "bitwise"
    DRIFT = "drift"
    CORRUPTED = "corrupted"


@dataclass(frozen=True, slots=True)
class Parity:
    """A captured result against its oracle.

    Attributes:
        verdict: bitwise, drift or corrupted.
        compared: elements (logits) or tokens that were compared.
        max_abs: largest absolute difference of logits; infinite where a NaN or an infinity differs; 0 for
            tokens.
        bound: drift bound that was applied.
        tied: tokens that differ at a near-tie of the oracle.
        step, row: first difference; for ``corrupted`` the first difference beyond the bound. None when
            bitwise.
        detail: what was seen there, in words.
    """

    verdict: Verdict
    compared: int
    max_abs: float = 0.0
    bound: float | None = None
    tied: int = 0
    step: int | None = None
    row: int | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Bitwise, or drift within the bound."""
        return self.verdict is not Verdict.CORRUPTED

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record; a difference that is not finite is None there and told in ``detail``."""
        return {
            "verdict": self.verdict.value,
            "compared": self.compared,
            "max_abs": self.max_abs if isfinite(self.max_abs) else None,
            "bound": self.bound,
            "tied": self.tied,
            "step": self.step,
            "row": self.row,
            "detail": self.detail,
        }

    def __str__(self) -> str:
        return f"{self.verdict}: {self.detail or f'{self.compared} compared'}"


def compare_logits(captured: Tensor, reference: Tensor, *, bound: float = 0.0) -> Parity:
    """Compares the logits of a captured run with those of its oracle.

    Args:
        captured: ``[rows, vocab]`` or ``[steps, rows, vocab]``, any floating dtype.
        reference: same shape and dtype.
        bound: largest absolute difference that is drift; see :class:`cglab.measure.drift.Drift`. With 0 only bitwise
            passes (and zeros that differ in sign, which are drift of 0).

    Raises:
        InputError: if shapes or dtypes differ, or nothing is there to compare.
    """
    if captured.shape != reference.shape or captured.dtype != reference.dtype or captured.dim() not in (2, 3):
        raise InputError(
            f"logits are compared in one shape and dtype, [rows, vocab] or [steps, rows, vocab]: captured is "
            f"{list(captured.shape)} {captured.dtype}, reference {list(reference.shape)} {reference.dtype}"
        )
    if captured.numel() == 0 or not captured.is_floating_point() or not 0 <= bound < inf:
        raise InputError(f"nothing to compare: {list(captured.shape)} {captured.dtype}, bound {bound}")
    steps = captured if captured.dim() == 3 else captured.unsqueeze(0)
    wanted = (reference if reference.dim() == 3 else reference.unsqueeze(0)).to(captured.device)
    largest, first, corrupted = 0.0, None, None
    for step, (now, oracle) in enumerate(zip(steps, wanted, strict=True)):
        different = _bits(now) != _bits(oracle)
        nan = now.isnan() | oracle.isnan()
        rows = (different | nan).any(-1)
        if not rows.any():
            continue
        # Equal infinities (masked entries) would subtract to NaN, so only what differs is subtracted.
        error = (now.double() - oracle.double()).abs().masked_fill(~different, 0.0)
        error = error.masked_fill(nan, inf).amax(-1)
        largest = max(largest, float(error.max()))
        first = first or (step, _first(rows))
        beyond = error > bound
        if corrupted is None and bool(beyond.any()):
            row = _first(beyond)
            more = f" ({int(beyond.sum())} rows of that step)" if beyond.sum() > 1 else ""
            what = _likeness(steps, wanted, step, row) or f"differs by {float(error[row]):.3g}"
            corrupted = step, row, f"step {step} row {row}: {what}{more}; the bound is {bound:.3g}"
    facts: dict[str, Any] = {"compared": captured.numel(), "max_abs": largest, "bound": bound}
    if corrupted is not None:
        step, row, detail = corrupted
        return Parity(Verdict.CORRUPTED, **facts, step=step, row=row, detail=detail)
    if first is not None:
        step, row = first
        detail = f"largest difference {largest:.3g}, bound {bound:.3g}, first at step {step} row {row}"
        return Parity(Verdict.DRIFT, **facts, step=step, row=row, detail=detail)
    return Parity(Verdict.BITWISE, **facts)


def compare_tokens(
    captured: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    *,
    reference_logits: Sequence[Tensor] | None = None,
    bound: float = 0.0,
    forced: bool = False,
    limit: float = TIE_LIMIT,
) -> Parity:
    """Compares token ids, row by row.

    A token that differs passes only where the oracle itself was undecided: the logit of the captured token
        lies less than ``bound`` below the oracle's best, which needs a top-two gap below ``bound``.

    Args:
        captured: token ids by row (request), then step; rows may differ in length.
        reference: the oracle's, same number of rows.
        reference_logits: by row ``[steps, vocab]``, the logits that the oracle's tokens were chosen from.
        bound: drift bound of the logits.
        forced: every step had the same context in both runs. Otherwise the runs part at a row's first
            difference and the rest of that row is not compared.
        limit: largest share of the compared tokens that may differ so.

    Raises:
        InputError: if the numbers of rows differ, logits do not cover the tokens, or nothing is there to
            compare.
    """
    if len(captured) != len(reference) or not any(map(len, reference)):
        raise InputError(
            f"cannot compare {len(captured)} rows of tokens with {len(reference)} rows of the oracle; "
            "need as many, with tokens in them"
        )
    compared, ties, faults = 0, [], []
    for row, (now, oracle) in enumerate(zip(captured, reference, strict=True)):
        reached = min(len(now), len(oracle))
        parted = False
        for step in [step for step in range(reached) if now[step] != oracle[step]]:
            gap = inf if reference_logits is None else _gap(reference_logits, row, step, now[step])
            above = f", whose logit lies {gap:.3g} higher" if isfinite(gap) else ""
            if gap < bound:
                ties.append((step, row))
            else:
                faults.append((step, row, f"token {now[step]} where the oracle has {oracle[step]}{above}"))
            if not forced:
                reached, parted = step + 1, True
                break
        compared += reached
        if not parted and len(now) != len(oracle):
            faults.append((reached, row, f"{len(now)} tokens where the oracle has {len(oracle)}"))
    facts: dict[str, Any] = {"compared": compared, "bound": bound, "tied": len(ties)}
    if faults:
        step, row, detail = min(faults)
        detail = f"step {step} row {row}: {detail}; the bound is {bound:.3g}"
        return Parity(Verdict.CORRUPTED, **facts, step=step, row=row, detail=detail)
    if not ties:
        return Parity(Verdict.BITWISE, **facts)
    step, row = min(ties)
    detail = (
        f"{len(ties)} of {compared} tokens differ at near-ties of the oracle, first at step {step} row {row}"
    )
    if len(ties) > limit * compared:
        detail += f"; more than {limit:.0%} may not"
        return Parity(Verdict.CORRUPTED, **facts, step=step, row=row, detail=detail)
    return Parity(Verdict.DRIFT, **facts, step=step, row=row, detail=detail)


def worst(parities: Iterable[Parity]) -> Parity:
    """The worst verdict of several (logits, tokens, buckets); the first of equals.

    Raises:
        InputError: without any, since nothing compared is nothing shown.
    """
    ranked = sorted(parities, key=lambda parity: list(Verdict).index(parity.verdict), reverse=True)
    if not ranked:
        raise InputError("no parity verdicts to combine")
    return ranked[0]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _first(mask: Tensor) -> int:
    return int(mask.nonzero()[0])


def _gap(logits: Sequence[Tensor], row: int, step: int, token: int) -> float:
    """How far the oracle's logit of ``token`` lies below its best; infinite when that is no number."""
    if row >= len(logits) or step >= logits[row].shape[0] or not 0 <= token < logits[row].shape[1]:
        raise InputError(f"the oracle's logits do not cover row {row}, step {step}, token {token}")
    line = logits[row][step].double()
    gap = float(line.max() - line[token])
    return gap if isfinite(gap) else inf


def _likeness(captured: Tensor, oracle: Tensor, step: int, row: int) -> str | None:
    """What a corrupted row looks like, where that tells the fault."""
    ours = captured[step, row]
    if bool(ours.isnan().any()):
        return f"{int(ours.isnan().sum())} NaN"
    if bool(oracle[step, row].isnan().any()):
        return "the oracle itself holds NaN"
    for other in range(oracle.shape[1]):
        if other != row and torch.equal(ours, oracle[step, other]):
            return f"holds the oracle's row {other} of the same step (wrong row)"
    if step > 0 and torch.equal(ours, oracle[step - 1, row]):
        return "holds the oracle's result of the step before (stale)"
    return None if bool(ours.any()) else "all zero"
