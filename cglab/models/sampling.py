"""The next token of each request: greedy at temperature 0, else drawn from softmax(logits / temperature).

A draw is Gumbel-max: the largest of the logits plus Gumbel noise times the temperature. The noise is no generator's
state but a hash of (seed, position, token), so that a request draws the same token alone or batched, captured or
eager, before or after a preemption. In a recording that counter is an input, and every replay draws anew; a baked
seed, an offset kept on the host, or a plan made there would repeat one quantile for ever (B50, B48, P38).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

WORD: Final = 0xFFFFFFFF
"""Hashing is arithmetic modulo 2^32 in int64: with factors below 2^31 no product overflows, on any device."""
SPREAD: Final = (0x9E3779B1, 0x85EBCA77)
"""Odd, one for each half of a seed: positions that follow each other lie far apart in both."""
BELOW_2_TO_MINUS_32: Final = 2.0**-32 * (1 - 2.0**-24)
"""The float32 before 2^-32: a word that float32 rounds up to 2^32 still becomes less than 1."""


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Picks the next token of each row.

    The noise is scaled and not the logits: temperature 0 then adds nothing, without a branch (P37), and its token
    is that of a plain argmax, ties included. At its peak it holds 16 bytes for each element of ``logits``.

    Args:
        logits: [R, vocabulary], of any floating-point dtype.
        temperatures: [R] float32, finite and at least 0.
        seeds: [R] int64, each request's own.
        positions: [R] int64, from 0: position of the token whose logits a row holds.

    Returns:
        [R] int64.
    """
    # An exponential race: minus the logarithm of an arrival time is Gumbel noise. log1p tells early arrivals,
    # which win, apart to 2^-33; a plain logarithm of numbers near 1 would tie them.
    arrival = uniforms(seeds, positions, logits.shape[-1]).neg_().log1p_().neg_()
    return (logits - arrival.log_().mul_(temperatures.unsqueeze(1))).argmax(-1)


def uniforms(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Uniform random numbers that are a function of seed, position and column; the same bits on every device.

    Args:
        seeds: [R] int64.
        positions: [R] int64, from 0 to 2^31 - 1.
        count: columns.

    Returns:
        [R, count] float32, from 2^-33 to 1 - 2^-24: never 0 and never 1.
    """
    low = torch.add(seeds & WORD, positions, alpha=SPREAD[0])
    high = torch.add(seeds >> 32, positions, alpha=SPREAD[1])
    first, other = _mix(torch.stack((low, high)).bitwise_and_(WORD)).unsqueeze(-1)
    # Each row counts in steps of its own: odd ones, so that none of its words comes twice.
    step = (first ^ other).bitwise_right_shift_(1).bitwise_or_(1)
    # The first column is 1, since 0 hashes to 0, and seed 0 at position 0 counts from there in steps of 1.
    columns = torch.arange(1, count + 1, device=seeds.device)
    words = _mix(torch.addcmul(first, columns, step).bitwise_and_(WORD))
    return words.to(torch.float32).add_(0.5).mul_(BELOW_2_TO_MINUS_32)


def _mix(words: Tensor) -> Tensor:
    """Hashes 32-bit words, in place: xor-shifts and products, with factors published by hash-prospector."""
    words.bitwise_xor_(words >> 16).mul_(0x21F0AAAD).bitwise_and_(WORD)
    words.bitwise_xor_(words >> 15).mul_(0x735A2D97).bitwise_and_(WORD)
    return words.bitwise_xor_(words >> 15)
