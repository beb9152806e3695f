"""The rotary embedding: tables of angles by position, and the turn of heads by them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cglab.models.config import Llama3Scaling, ModelConfig


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None) -> Tensor:
    """The angle that one position adds to each pair of a head.

    Args:
        head_dim: width of a head.
        theta: base of the geometric series.
        scaling: the Llama 3.1 stretch, or None.

    Returns:
        [head_dim / 2] float32 on the CPU, in radians per token.
    """
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if scaling is None:
        return frequency
    # How many turns a pair makes within the original context says how much of the stretch it gets.
    turns = scaling.original_max_position * frequency / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def rotary_table(config: ModelConfig) -> Tensor:
    """Cosines and signed sines of every position, side by side so that one gather fetches both.

    Args:
        config: the shape of the decoder.

    Returns:
        [max_position, 2, head_dim] float32 on the CPU: row p holds cos, then sin with the first half negated,
        for position p.
    """
    frequency = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    position = torch.arange(config.max_position, dtype=torch.float32, device="cpu")
    angle = torch.outer(position, frequency)
    cosine, sine = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)), dim=1)


def rotate(heads: Tensor, turn: Tensor) -> Tensor:
    """Turns heads to their positions.

    Args:
        heads: [T, n, head_dim].
        turn: [T, 2, head_dim], rows of ``rotary_table``.

    Returns:
        [T, n, head_dim] in the dtype of ``heads``.
    """
    cosine, sine = turn.to(heads.dtype).unsqueeze(2).unbind(1)
    # With the sine's sign in the table, the rotation by halves is a plain roll.
    return torch.addcmul(heads * cosine, heads.roll(heads.shape[-1] // 2, dims=-1), sine)


def paired(table: Tensor) -> Tensor:
    """A rotary table for heads whose pairs lie side by side, as ``rotate_pairs`` reads it.

    Args:
        table: [max_position, 2, head_dim], as ``rotary_table`` gives it.

    Returns:
        The same rows, each pair's two entries next to each other.
    """
    return table.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def rotate_pairs(heads: Tensor, turn: Tensor) -> Tensor:
    """As ``rotate``, for heads of pairs (0, 1), (2, 3), ... and rows of a ``paired`` table."""
    cosine, sine = turn.to(heads.dtype).unsqueeze(2).unbind(1)
    swapped = heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(heads * cosine, swapped, sine)
