"""T7, prefill of one stage of a pipeline: what a stage computes between the proxies that it takes and hands on (S2).

Captured: the stage's own layers for a fixed number of tokens, on the first stage after the embedding, on the last with
the last norm; attention is an eager break in each layer, as in T6. Static: weights, cache and page tables of the own
layers, positions and places of the tokens and, in place of their ids, the proxies of the stage before. These have
buffers of their own outside the pool: live values are copied in before every replay (B33), padded rows are reset, as
they are computed like any other (P75), and what is handed on is a copy cut to the live tokens (P73), since the next
micro-batch replays while it is still on its way.

A model with latent attention is cut anywhere: where a stage begins with a layer that shares the selection of the one
before, that is a proxy too, whose padded rows select nothing. Which parts of its layers are recorded is as in T8, T9
and T9b.

It cannot: serve more tokens than its limit, 8192 or the crossover found, unless one is given; capture a layer that has
no attention; or replay what another rank could not record. Each of these runs eager with its reason, on all ranks
alike: they decide by one rule on what all of them have, and that is agreed on once, after capturing (P10, B79).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from cglab.errors import RankError
from cglab.graphs.buckets import bucket_list, sglang_prefill
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.models.stages import Stage, by_global_id, held_layers
from cglab.runners.base import GraphGroup
from cglab.runners.dsa_prefill import DsaPrefillRunner
from cglab.runners.prefill import PrefillRunner
from cglab.runners.ranks import Ranks

STAGE_LIMIT: Final = 8192
"""Tokens of all requests together up to which a stage is captured by default: S2's last size with a gain."""
UNTRIED, UNRECORDED, RECORDED = -1, 0, 1


def stage_sizes(
    token_budget: int, *, limit: int | None = None, explicit: Sequence[int] | None = None
) -> list[int]:
    """Token counts of a stage's steps to capture; the largest is always among them (P5).

    Args:
        token_budget: most tokens of one step, all requests together.
        limit: up to how many to capture, such as a crossover that was measured; None for ``STAGE_LIMIT``.
        explicit: the user's own sizes, which override both.

    Raises:
        BucketError: as ``bucket_list``.
    """
    most = min(token_budget, STAGE_LIMIT if limit is None else limit)
    return bucket_list(token_budget if explicit else most, sglang_prefill, explicit=explicit)


def layer_miss(stage: Stage, attentions: Sequence[object | None]) -> Miss | None:
    """Why a stage cannot be captured: a layer of its own has no attention; what others hold does not count (P76).

    Args:
        stage: which layers are its own.
        attentions: by global layer id; None where there is none, or another stage has it.
    """
    without = [layer for layer in stage.layers if attentions[layer] is None]
    return Miss(Reason.NO_ATTENTION, f"layers {without} of {stage}") if without else None


class PipelineStageRunner(PrefillRunner):
    """The prefill of one stage over the cache of its layers.

    Args:
        model: the stage.
        kv: the cache of its layers.
        group: pool and shared buffers.
        buckets: token counts to capture, the same on all ranks; see ``stage_sizes``.
        options: backend, padding and the rest.
        **rest: as the runner of the whole model takes it.

    Attributes:
        taken: the proxies of the stage before.
        own: the inputs that follow from a batch alone; the others are proxies.
    """

    technique = "pp_prefill"
    variant: str | None = "pp_prefill"

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        **rest: Any,
    ) -> None:
        self.stage, self.taken = model.stage, model.taken
        self._lacking: dict[int, Miss] = {}
        layers = ((layer, getattr(block, "attention", None)) for layer, block in held_layers(model.blocks))
        miss = layer_miss(self.stage, by_global_id(layers, model.config.num_layers))
        options = replace(options, clone=not self.stage.last, refusal=options.refusal or miss)
        super().__init__(model, kv, group, buckets, options, **rest)
        self.own = self.inputs[: len(self.inputs) - len(self.taken)]

    def needed(self) -> tuple[str, ...]:
        """See ``PrefillRunner``; tokens on the first stage, proxies on all others."""
        columns = super().needed()
        if self.stage.first:
            return columns
        return (*(name for name in columns if name != "input_ids"), *(proxy.name for proxy in self.taken))

    def slots(self) -> dict[str, Slot]:
        """See ``PrefillRunner``; of a proxy one row a token, as it is declared."""
        proxies = {
            name: Slot(shape=(-1, *columns), dtype=dtype, pad=padding)
            for name, columns, dtype, padding in self.taken
        }
        return super().slots() | proxies

    def step(self, **inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The stage on one batch.

        Args:
            **inputs: ``self.inputs``: columns [tokens] int64, proxies [tokens, *columns] as declared.

        Returns:
            The proxies that ``model.handed`` declares, in that order; of the last stage hidden states
            [tokens, hidden_size], normed.
        """
        return self.model.part(
            positions=inputs["positions"], attend=self.attend(inputs), input_ids=inputs.get("input_ids"),
            proxies=inputs,
        )  # fmt: skip

    def named(self, output: Sequence[Tensor]) -> dict[str, Tensor]:
        """What a stage hands on, by name."""
        return {proxy.name: each for proxy, each in zip(self.model.handed, output, strict=True)}

    def vary(self, views: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """See ``PrefillRunner``; proxies are noise."""
        super().vary(views, generator)
        for name, value in self.noise(len(views["out_slots"]), generator).items():
            views[name].copy_(value)

    def noise(self, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Proxies that no stage has computed: [tokens, *columns] of each, where the generator is."""
        drawn = {}
        for name, columns, dtype, _ in self.taken:
            size = (tokens, *columns)
            if dtype.is_floating_point:
                drawn[name] = torch.randn(size, generator=generator, device=generator.device).to(dtype)
            else:  # slots, but for the reserved ones
                least, slots = self.kv.page_size, self.kv.full.keys.shape[1]
                drawn[name] = torch.randint(
                    least, slots, size, generator=generator, device=generator.device, dtype=dtype
                )
        return drawn

    def agree(self, ranks: Ranks) -> None:
        """Drops, on all ranks alike, the buckets that one of them has no recording of; all call it after capturing.

        Args:
            ranks: those of all stages, in order.

        Raises:
            RankError: if they were to capture different sizes, or one has skipped its capture.
        """
        sizes = self.captured.buckets
        policy = torch.tensor([len(sizes), hash(tuple(sizes))])  # of whole numbers the same everywhere
        if not (ranks.gather(policy) == policy).all():
            raise RankError(
                f"{self.stage} is to capture {list(sizes)} and another rank something else: "
                "start all ranks with the same sizes and token budget"
            )
        rows = ranks.gather(torch.tensor([self._state(size) for size in sizes])).tolist()
        if idle := [rank for rank, row in enumerate(rows) if UNTRIED in row]:
            raise RankError(
                f"rank {idle[0]} of {ranks.count} has skipped the capture of {list(sizes)}, and others have not: "
                "capture on every rank, then agree"
            )
        for rank, row in enumerate(rows):
            for size in (size for size, state in zip(sizes, row, strict=True) if state == UNRECORDED):
                facts = f"bucket {size}, no recording on rank {rank} of {ranks.count}"
                self._lacking.setdefault(size, Miss(Reason.OTHER_RANK, facts))

    def _state(self, size: int) -> int:
        if size in self.captured.captured_sizes:
            return RECORDED
        failed = self.backend == "eager" or any(key.size == size for key in self.captured.failures)
        return UNRECORDED if failed else UNTRIED

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """See ``PrefillRunner``; and a bucket that is not recorded on all ranks."""
        miss = super().ineligible(values)
        if miss is not None or self.backend == "eager":
            return miss
        bucket = self.captured.pad(self.rows(self.live.spans))
        return bucket if isinstance(bucket, Miss) else self._lacking.get(bucket)


class DsaStageRunner(PipelineStageRunner, DsaPrefillRunner):
    """The prefill of one stage of a model with latent attention over the cache of its layers; arguments of both.

    A selection has as many columns in every stage as keys are kept, whatever the cache has room for: it is declared so.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.columns = self.topk
