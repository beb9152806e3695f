"""The draft side of a lab: who drafts, how much, and in which kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from cglab import settings
from cglab.engine.drafters import AssistantDrafter, BlockDrafter, require_block
from cglab.engine.host_tier import HostTier
from cglab.engine.nextn_drafter import NextNDrafter, require_one
from cglab.engine.phases import AnyPhases
from cglab.engine.proposals import Drafter
from cglab.engine.speculation import Speculation
from cglab.engine.speculator import Speculator
from cglab.errors import InputError, ToggleError
from cglab.lab.sparse_prefill import require_latent
from cglab.models.assistant import Assistant, AssistantConfig, bound_layers
from cglab.models.block_draft import BlockDraft, BlockDraftConfig, require_fit, spread
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.draft_cache import Feeder, draft_cache
from cglab.models.draft_tree import check_branches
from cglab.models.drafts import DraftConfig, DraftModel, DraftSource, LoadedDraft, find_draft, load_draft
from cglab.models.dsa_config import DsaConfig
from cglab.models.kv import PagedKV
from cglab.models.loading import LoadedModel
from cglab.models.nextn import NextN, nextn_config, require_own
from cglab.models.ops import use_draft_ops, use_ops
from cglab.models.paged import AttentionKind
from cglab.models.sources import shipped_drafts
from cglab.runners.base import GraphGroup

SHIPPED = "pico-gqa-assistant"
SHIPPED_BLOCK = "pico-gqa-dflash"
SHIPPED_NEXTN = "pico-dsa-nextn"
RANDOM, RANDOM_BLOCK, RANDOM_NEXTN = "random", "random-block", "nextn"
BLOCK = 8
"""Tokens of a block, where nothing says otherwise."""


class DraftPlan(NamedTuple):
    """A draft that was found and fits its target; no weight is loaded.

    Attributes:
        name: what it was opened by.
        source: its shape and folder.
        speculation: steps, top-k and tokens.
        seed_graph: whether the seed step may be captured; False for ``CGLAB_DISABLE_SEED_GRAPH=1``.
    """

    name: str
    source: DraftSource
    speculation: Speculation
    seed_graph: bool


class Drafting(NamedTuple):
    """Who drafts, and how much.

    Attributes:
        model: bound to its target.
        speculation: steps, top-k and tokens of a draft.
        seed_graph: whether the seed step may be captured; False for ``CGLAB_DISABLE_SEED_GRAPH=1``.
        name: what it was opened by.
        weights: ``trained`` or ``random``.
        feeder: fills the cache of a block draft; None for any other.
        layer_kv: the cache of a NextN layer; None for any other.
    """

    model: DraftModel
    speculation: Speculation
    seed_graph: bool = True
    name: str = ""
    weights: str = "random"
    feeder: Feeder | None = None
    layer_kv: PagedKV | None = None

    @classmethod
    def over(cls, kv: PagedKV, model: DraftModel, speculation: Speculation, **facts: Any) -> Drafting:
        """With the cache that a block draft or a NextN layer needs beside its target's, ``kv``."""
        if isinstance(model, Assistant):
            return cls(model, speculation, **facts)
        stack = model.config.stack if isinstance(model, BlockDraft) else model.config
        beside = draft_cache(stack, kv, dtype=kv.full.keys.dtype)
        if isinstance(model, BlockDraft):
            return cls(model, speculation, feeder=Feeder(model, beside), **facts)
        return cls(model, speculation, layer_kv=beside, **facts)

    @property
    def assistant(self) -> Assistant:
        """The model, where only an assistant will do.

        Raises:
            ToggleError: if it is another draft.
        """
        if not isinstance(self.model, Assistant):
            kind, instead = (
                ("NextN layer", "use draft_extend")
                if self.layer_kv
                else (
                    "block draft",
                    f'open the model with an assistant, such as draft="{RANDOM}", or use draft_sampler',
                )
            )
            raise ToggleError(f"a {kind} has neither seed step nor draft loop; {instead}")
        return self.model

    @property
    def nextn(self) -> tuple[NextN, PagedKV]:
        """The model with its cache, where only a NextN layer will do.

        Raises:
            ToggleError: if it is another draft.
        """
        if self.layer_kv is None or not isinstance(self.model, NextN):
            raise ToggleError(
                "a NextN layer alone has a draft_extend; open a model with latent attention and one, such as "
                f'cglab.open("pico-dsa", draft="{SHIPPED_NEXTN}")'
            )
        return self.model, self.layer_kv

    @property
    def block(self) -> Feeder:
        """The model with its cache, where only a block draft will do.

        Raises:
            ToggleError: if it is another draft.
        """
        if self.feeder is None:
            kind = "a NextN layer" if self.layer_kv else "an assistant"
            raise ToggleError(
                f"{kind} has no draft_sampler; open the model with a block draft, such as "
                f'draft="{RANDOM_BLOCK}", or use seed_step'
            )
        return self.feeder

    @property
    def kv(self) -> PagedKV | None:
        """The draft's own cache; None for an assistant, which has none."""
        return self.layer_kv if self.feeder is None else self.feeder.kv

    @property
    def sizes(self) -> dict[str, Any]:
        """What a record's workload says about drafts."""
        sizes = self.speculation
        return {
            "draft": self.name, "draft_weights": self.weights, "draft_steps": sizes.steps, "topk": sizes.topk,
            "width": sizes.width, "pinned": sizes.pinned,
        }  # fmt: skip

    def drafter(self, kv: PagedKV, phases: AnyPhases) -> Drafter:
        """What drafts for an engine over the target's cache, on these runners."""
        if isinstance(self.model, BlockDraft):
            return BlockDrafter(self.model, phases, self.speculation)
        if isinstance(self.model, NextN):
            return NextNDrafter(self.model, kv, phases, self.speculation)
        return AssistantDrafter(self.assistant, kv, phases, self.speculation)

    def speculator(self, kv: PagedKV, phases: AnyPhases) -> Speculator:
        """The same with what verifies."""
        return Speculator(self.model.target, self.drafter(kv, phases), kv, phases, self.speculation)


def plan_draft(
    name: str | Path | None, speculation: Speculation | None, target: ModelConfig
) -> DraftPlan | None:
    """Finds a draft for a target.

    Args:
        name: as ``find_draft``, or one that is made to fit: ``random-block`` for any target, ``nextn`` for one with
            latent attention, ``random``, an assistant, for one without; None for no draft.
        speculation: how much is drafted; None for three steps of one candidate, a whole block, or a NextN layer's
            token.
        target: shape of the model that it drafts for.

    Raises:
        InputError: for speculation without a draft, of another kind, of another length than a draft's blocks, or
            that the target cannot score.
        ModelError: if there is no such draft, or it is another target's.
        ToggleError: for a setting of the environment that is not good.
    """
    if speculation is not None and not isinstance(speculation, Speculation):
        raise InputError(f"speculation is {speculation!r}; give a Speculation(steps, topk, tokens)")
    if name is None:
        if speculation is not None:
            raise InputError('speculation needs a draft model; give draft= too, such as "pico-gqa-assistant"')
        return None
    source = _fitting(name, target, speculation.width if speculation else BLOCK)
    if isinstance(source.config, BlockDraftConfig):
        speculation = speculation or Speculation(steps=source.config.block_size - 1)
        require_block(source.config, speculation)
    elif isinstance(source.config, DsaConfig):
        speculation = speculation or Speculation(steps=1)
        require_one(speculation)
    sizes = speculation or Speculation()
    check_branches(sizes.steps, sizes.topk, vocabulary=target.vocab_size, window=target.sliding_window)
    seed_graph = settings.SEED_GRAPH_SWITCH not in settings.read_settings().switches
    return DraftPlan(str(name), source, sizes, seed_graph)


def _fitting(name: str | Path, target: ModelConfig, block_size: int = BLOCK) -> DraftSource:
    """The draft of a name, which fits the target; one of random weights is made to, with blocks of this size."""
    make = MADE_TO_FIT.get(str(name))
    source = DraftSource(make(target, block_size), None) if make else find_draft(name, MADE_TO_FIT)
    if isinstance(source.config, BlockDraftConfig):
        require_fit(source.config, target)
    elif isinstance(source.config, DsaConfig):
        require_own(source.config, target)
    else:
        bound_layers(source.assistant, target)
    return source


def open_draft(plan: DraftPlan, target: Decoder, kv: PagedKV, *, seed: int = 0) -> Drafting:
    """Loads a draft and binds it to its target.

    Args:
        plan: what ``plan_draft`` found.
        target: whose embedding and head it uses.
        kv: the target's cache.
        seed: of random weights.

    Raises:
        ModelError: as ``load_draft``.
    """
    loaded = load_draft(plan.source, target, seed=seed)
    facts = {"seed_graph": plan.seed_graph, "name": plan.name, "weights": loaded.weights}
    return Drafting.over(kv, loaded.model, plan.speculation, **facts)


def use_ops_of_both(ops: str, target: Decoder, kv: PagedKV, drafting: Drafting | None) -> None:
    """Sets the form in which a target, and its draft if it has one, compute over a cache: before any capture."""
    if drafting is None:
        use_ops(ops, target, kv)
        return
    speculation = drafting.speculation
    verify = AttentionKind(target.config.num_heads, speculation.width, tree=speculation.topk > 1)
    use_ops(ops, target, kv, [verify])
    if not isinstance(drafting.model, NextN):  # whose target has one form only, and so has the layer
        use_draft_ops(ops, drafting.model, drafting.kv or kv)


def host_tier(pages: int, kv: PagedKV, drafting: Drafting | None, group: GraphGroup) -> HostTier | None:
    """Host memory for prefixes of a target's cache and, where there is one, the draft's; None for no pages."""
    if not pages:
        return None
    beside = None if drafting is None else drafting.kv
    return HostTier([kv] if beside is None else [kv, beside], group, pages)


def draft_of(loaded: LoadedModel, *, block: bool = False, seed: int = 0) -> LoadedDraft:
    """A draft for the model that cases run on: the shipped one, or for random weights one that fits.

    Args:
        loaded: the shipped model, or one with random weights.
        block: a block draft, and no assistant.
        seed: of random weights.
    """
    shipped, fitting = (SHIPPED_BLOCK, RANDOM_BLOCK) if block else (SHIPPED, RANDOM)
    name = shipped if loaded.weights == "trained" and shipped in shipped_drafts() else fitting
    return load_draft(_fitting(name, loaded.config), loaded.model, seed=seed)


def random_shape(target: ModelConfig, _block_size: int = BLOCK) -> AssistantConfig:
    """The shape of an assistant for any target, where none was trained: about what is published for large ones.

    Its weights are random, so what it drafts is not worth accepting: pin the acceptance, and times are a draft's.
    """
    layers, width = (4, 1024) if target.hidden_size >= 4 * 1024 else (2, max(16, target.hidden_size // 4))
    windowed, whole = bool(target.window_layers), len(target.window_layers) < target.num_layers
    kinds = ["sliding" if windowed else "full"] * (layers - 1) + ["full" if whole else "sliding"]
    return AssistantConfig(
        target.vocab_size, target.hidden_size, width, 4 * width, tuple(kinds), target.num_heads, target.num_kv_heads,
        target.head_dim,
    )  # fmt: skip


def random_block(target: ModelConfig, block_size: int = BLOCK) -> BlockDraftConfig:
    """The same of a block draft: the target's own layers, few of them, as published ones have."""
    layers = 5 if target.hidden_size >= 4 * 1024 else 2
    return BlockDraftConfig(
        target.vocab_size, target.hidden_size, target.intermediate_size, layers, target.num_heads, target.num_kv_heads,
        target.head_dim, block_size, mask_token_id=target.vocab_size - 1,
        context_layers=spread(target.num_layers, max(1, min(layers, target.num_layers - 3))),
    )  # fmt: skip


def random_nextn(target: ModelConfig, _block_size: int = BLOCK) -> DsaConfig:
    """The same of a NextN layer: one layer more of the target's own kind."""
    return nextn_config(require_latent(target, "a NextN layer"))


MADE_TO_FIT: Final[Mapping[str, Callable[[ModelConfig, int], DraftConfig]]] = {
    RANDOM: random_shape, RANDOM_BLOCK: random_block, RANDOM_NEXTN: random_nextn,
}  # fmt: skip
"""Drafts of random weights in whatever shape a target asks for, from it and the size of a block."""
