"""How a decoder is cut into stages of a pipeline, and what one stage hands to the next (S2).

A stage holds consecutive layers under their global ids, with placeholders for those that others hold: attention, cache
and checkpoint keep one numbering, whatever the cut. The first stage holds the embedding too, the last one the last
norm and the head, and with a tied head the embedding once more. What passes between two stages are its proxies: each
has a name, a shape of one token and a dtype, and is bound by that name (P77).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from cglab.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's part of a decoder.

    Attributes:
        index: which stage, from 0.
        count: stages in all.
        layers: global ids of the layers that it holds, consecutive.
    """

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        """Whether it looks tokens up."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it scores the next token."""
        return self.index == self.count - 1

    def __str__(self) -> str:
        return f"stage {self.index} of {self.count} (layers {self.layers.start} to {self.layers.stop - 1})"


def cut(num_layers: int, stages: int, sizes: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """Cuts a stack of layers into stages.

    Args:
        num_layers: layers of the whole.
        stages: how many stages.
        sizes: layers of each; None for equal numbers, one more for the first ones where they do not divide: the
            last stage has the head beside its layers.

    Raises:
        InputError: if a stage would have no layer, or the sizes do not add up.
    """
    if not 1 <= stages <= num_layers:
        raise InputError(f"{num_layers} layers make 1 to {num_layers} stages, got {stages}")
    if sizes is None:
        each, more = divmod(num_layers, stages)
        sizes = [each + (index < more) for index in range(stages)]
    if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != num_layers:
        raise InputError(
            f"stages of {list(sizes)} layers are no cut of {num_layers} layers into {stages} stages: "
            "give each at least one, and all of them together"
        )
    ends = pairwise(accumulate(sizes, initial=0))
    return tuple(Stage(index, stages, range(start, stop)) for index, (start, stop) in enumerate(ends))


def by_global_id(held: Iterable[tuple[int, T]], num_layers: int) -> list[T | None]:
    """What a stage holds, listed by global layer id; None for what others hold (P76).

    Args:
        held: global id and object; the same object may come twice under its id.
        num_layers: layers of the whole.

    Raises:
        InputError: for an id that the whole does not have, or one that two objects claim.
    """
    listed: list[T | None] = [None] * num_layers
    for layer, each in held:
        if not 0 <= layer < num_layers:
            raise InputError(f"layer {layer} is none of 0 to {num_layers - 1}; give global ids")
        if listed[layer] is not None and listed[layer] is not each:
            raise InputError(f"layer {layer} is claimed by two objects; give every layer its own global id")
        listed[layer] = each
    return listed


class Elsewhere(nn.Module):
    """Stands where a part of the whole is that another stage holds.

    Args:
        what: the part.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, *_: Any) -> NoReturn:
        """Refuses.

        Raises:
            InputError: always.
        """
        raise InputError(f"{self.what} is held by another stage; run it there")


def held_layers(blocks: Iterable[nn.Module]) -> list[tuple[int, nn.Module]]:
    """The layers that are here, each with its global id."""
    return [(layer, block) for layer, block in enumerate(blocks) if not isinstance(block, Elsewhere)]


class Proxy(NamedTuple):
    """A tensor that a stage hands to the next, declared.

    Attributes:
        name: what it is bound by.
        columns: shape of one token.
        dtype: element type.
        padding: what a padded token has.
    """

    name: str
    columns: tuple[int, ...]
    dtype: torch.dtype
    padding: int = 0

    def empty(self, tokens: int, device: torch.device) -> Tensor:
        """Room for so many tokens: [tokens, *columns]."""
        return torch.empty((tokens, *self.columns), dtype=self.dtype, device=device)


def bind(declared: Sequence[Proxy], given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The declared proxies out of what was handed over, by name; anything else there, such as a marker, is left (P74).

    Raises:
        InputError: if one is absent, or has another shape or dtype than was declared.
    """
    absent = [proxy.name for proxy in declared if given.get(proxy.name) is None]
    if absent:
        raise InputError(
            f"the stage needs {', '.join(absent)} and was handed {', '.join(given) or 'nothing'}: "
            "compute both stages in the same ops, and hand over all that the one before gives"
        )
    for name, columns, dtype, _ in declared:
        found = given[name]
        if tuple(found.shape[1:]) != columns or found.dtype != dtype:
            raise InputError(
                f"{name} is {list(found.shape)} of {found.dtype}, declared [tokens, {', '.join(map(str, columns))}] "
                f"of {dtype}; open both stages on the same model and dtype"
            )
    return {proxy.name: given[proxy.name] for proxy in declared}
