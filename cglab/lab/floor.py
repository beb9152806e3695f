"""The floor of a decode step: the bytes that must be read, over the read bandwidth measured in the same run."""

from __future__ import annotations

import torch

from cglab.engine.workload import DecodeStep
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder


def bytes_read(model: Decoder, config: ModelConfig, step: DecodeStep) -> int:
    """Bytes that one step cannot avoid reading: of weights and of keys and values."""
    return weight_bytes(model, config, step) + kv_bytes(model, config, step)


def weight_bytes(model: Decoder, config: ModelConfig, step: DecodeStep) -> int:
    """Bytes of every weight once, but of an untied embedding only the rows that are gathered.

    A tied embedding is the head, so it counts whole.
    """
    weights = {
        parameter.data_ptr(): parameter.numel() * parameter.element_size() for parameter in model.parameters()
    }
    if not config.tie_embeddings:
        table = model.embedding.weight
        weights[table.data_ptr()] = step.live * config.hidden_size * table.element_size()
    return sum(weights.values())


def kv_bytes(model: Decoder, config: ModelConfig, step: DecodeStep) -> int:
    """Bytes of the live keys and values of every layer, of one with a window no more than the window."""
    element = next(model.parameters()).element_size()
    windows = len(config.window_layers)
    seen = (config.num_layers - windows) * step.context
    if config.sliding_window is not None:
        seen += windows * min(step.context, config.sliding_window)
    return 2 * config.num_kv_heads * config.head_dim * element * step.live * seen


def read_bandwidth(device: torch.device, gigabytes: float = 4.0) -> float:
    """Bytes a second that a plain reduction reads on this device now: the best of a few passes over one buffer.

    Args:
        device: what is measured.
        gigabytes: size of the buffer; several times the last cache.
    """
    elements = int(gigabytes * 1e9 / 4)
    buffer = torch.ones(elements, dtype=torch.float32, device=device)
    seconds = min(sample_seconds(buffer.sum, clock_for(device), repeats=10, warmup=3))
    return elements * 4 / seconds


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Floating-point operations a second of a large square matrix product on this device now: the best of a few.

    Args:
        device: what is measured.
        dtype: of the matrices.
        size: rows and columns.
    """
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    seconds = min(sample_seconds(lambda: matrix @ matrix, clock_for(device), repeats=10, warmup=3))
    return 2 * size**3 / seconds
