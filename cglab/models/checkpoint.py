"""Reads the safetensors of a Hugging Face folder into a model: checked whole, then copied one by one.

Nothing is ever unpickled. All names, shapes and dtypes are compared with the headers before any weight memory
is allocated, so that a wrong folder costs nothing; the copy then holds one tensor on the host at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from cglab.errors import ModelError
from cglab.models.config import ModelConfig
from cglab.models.fields import read_json
from cglab.models.layout import Piece
from cglab.models.shard_file import SUFFIX, UNREADABLE, opened

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = ("F32", "F16", "BF16")
SHOWN = 3

Header = dict[str, tuple[tuple[int, ...], str]]


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint.

    Args:
        folder: a model's folder.

    Returns:
        One file, plain or compressed, or the shards that the index names, sorted.

    Raises:
        ModelError: if there are none, if only pickles are there, or if the index names a file that is missing
            or outside of the folder.
    """
    for single in (SINGLE, SINGLE + SUFFIX):
        if (folder / single).is_file():
            return [folder / single]
    index = folder / INDEX
    if not index.is_file():
        found = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern)
        )
        fact = f"only {_some(found)}, which is not read (a pickle can run code)" if found else "no weights"
        raise ModelError(
            f"{folder} has {fact}; expected: {SINGLE}, or {INDEX} with its shards; "
            "fetch the safetensors version of the model, or convert it where you trust it"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map of tensor to file; fetch the file again")
    names = sorted({str(name) for name in weight_map.values()})
    # By name, not by resolved path: the files of a download cache are links to elsewhere, and rightly so.
    outside = [name for name in names if name in (".", "..") or Path(name).name != name or "\\" in name]
    if outside:
        raise ModelError(
            f"{index} names {_some(outside)}, outside of its folder; only plain file names are read; "
            "do not use this folder"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(names)} shards: {_some(missing)}; fetch them again"
        )
    return [folder / name for name in names]


def check_shards(
    shards: Iterable[Path],
    config: ModelConfig,
    layout: Callable[[], Mapping[str, Piece]],
) -> None:
    """Compares the headers of a checkpoint with the shape that ``config.json`` states.

    Args:
        shards: the safetensors files.
        config: the shape.
        layout: where each tensor goes; asked once the file is known to have as many layers as the shape.

    Raises:
        ModelError: if a file is truncated, or a tensor is missing, unknown, there twice, or of the wrong
            shape or dtype.
    """
    headers = [(shard, _header(shard)) for shard in shards]
    stored = sum(len(header) for _, header in headers)
    if config.num_layers > stored:  # before anything is made for every layer
        raise ModelError(
            f"config.json states {config.num_layers} layers, the checkpoint has {stored} tensors in all; "
            "weights and configuration are of different models: fetch both again"
        )
    derived = ("lm_head.weight",) if config.tie_embeddings else ()
    _compare(headers, layout(), config.architecture, derived)


def check_draft_shards(shards: Iterable[Path], layout: Mapping[str, Piece], architecture: str) -> None:
    """Compares the headers of a draft's checkpoint with its layout.

    Args:
        shards: the safetensors files.
        layout: where each tensor goes.
        architecture: for messages.

    Raises:
        ModelError: as ``check_shards``.
    """
    _compare([(shard, _header(shard)) for shard in shards], layout, architecture, ())


def _compare(
    headers: Iterable[tuple[Path, Header]],
    layout: Mapping[str, Piece],
    architecture: str,
    derived: Sequence[str],
) -> None:
    expected = {name: piece.shape for name, piece in layout.items()}
    found: dict[str, Path] = {}
    for shard, header in headers:
        for name, (shape, dtype) in header.items():
            if name in found:
                raise ModelError(
                    f"{name} is in {found[name].name} and in {shard.name}; fetch the checkpoint again"
                )
            found[name] = shard
            if name in expected and shape != expected[name]:
                raise ModelError(
                    f"{shard}: {name} has shape {list(shape)}, config.json asks for {list(expected[name])}; "
                    "weights and configuration are of different models: fetch both again"
                )
            if name in expected and dtype not in DTYPES:
                raise ModelError(
                    f"{shard}: {name} is stored as {dtype}; supported: {', '.join(DTYPES)}; "
                    "open the unquantised model"
                )
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(expected)} tensors are missing: {_some(missing)}; "
            "fetch the missing shard, or a config.json that fits these weights"
        )
    # What is saved although it follows from others: a tied head, rotary frequencies.
    known = (*expected, *derived)
    extra = [name for name in found if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if extra:
        raise ModelError(
            f"{len(extra)} tensors have no place in {architecture}: {_some(extra)}; "
            "the model computes something that the decoder does not: open another one"
        )


def read_shards(shards: Iterable[Path], model: nn.Module, layout: Mapping[str, Piece]) -> None:
    """Copies a checked checkpoint into a model, one tensor at a time, converting to its dtype.

    Args:
        shards: the safetensors files.
        model: on any device.
        layout: where each tensor goes.

    Raises:
        ModelError: if a file can no longer be read, or a tensor holds NaN or infinities, in the file or in the model's
            dtype.
    """
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    for shard in shards:
        try:
            with opened(shard) as tensors, torch.no_grad():
                for name in tensors.keys():  # noqa: SIM118 - the file is no mapping
                    if piece := layout.get(name):
                        stored = tensors.get_tensor(name)
                        held = piece.of(parameters[piece.parameter]).copy_(stored)
                        _require_finite(shard, name, stored, held)
        except UNREADABLE as error:
            raise _damaged(shard, error) from error


def _require_finite(shard: Path, name: str, stored: torch.Tensor, held: torch.Tensor) -> None:
    """Refuses weights that make every token NaN: such a model opens, and only its text is wrong.

    Least and largest carry a NaN on and need no memory, unlike a mask of what is finite.
    """
    if held.is_meta or not held.numel() or all(bool(end.isfinite()) for end in held.aminmax()):
        return
    wrong = int((~stored.isfinite()).sum())
    if wrong:
        raise ModelError(
            f"{shard}: {name} holds {wrong} values of {stored.numel()} that are NaN or infinite; "
            "fetch the file again, or train it anew from before it diverged"
        )
    raise ModelError(
        f"{shard}: {name} has values that {held.dtype} cannot hold, the largest {float(stored.abs().max()):.3g}; "
        "open it with dtype=torch.float32"
    )


def _header(shard: Path) -> Header:
    """Shape and dtype of every tensor in a file, without its data."""
    try:
        with opened(shard) as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - the file is no mapping
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except UNREADABLE as error:
        raise _damaged(shard, error) from error


def _damaged(shard: Path, error: Exception) -> ModelError:
    return ModelError(f"{shard} is truncated or no safetensors file ({error}); fetch the file again")


def _some(names: list[str]) -> str:
    """The first few names."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
