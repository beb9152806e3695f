"""The draft side of a lab: who drafts, how much, and in which kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from cglab import settings
from cglab.engine.drafters import AssistantDrafter
from cglab.engine.phases import DraftPhases
from cglab.engine.speculation import Speculation
from cglab.engine.speculator import Speculator
from cglab.errors import InputError
from cglab.models.assistant import Assistant, AssistantConfig, bound_layers
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.draft_tree import check_branches
from cglab.models.drafts import DraftSource, find_draft, load_draft
from cglab.models.kv import PagedKV
from cglab.models.loading import LoadedModel
from cglab.models.ops import use_draft_ops, use_ops
from cglab.models.paged import AttentionKind

SHIPPED = "pico-gqa-assistant"
RANDOM = "random"
"""Names a draft of random weights in whatever shape the target asks for."""


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
        assistant: bound to its target.
        speculation: steps, top-k and tokens of a draft.
        seed_graph: whether the seed step may be captured; False for ``CGLAB_DISABLE_SEED_GRAPH=1``.
        name: what it was opened by.
        weights: ``trained`` or ``random``.
    """

    assistant: Assistant
    speculation: Speculation
    seed_graph: bool = True
    name: str = ""
    weights: str = "random"

    @property
    def sizes(self) -> dict[str, Any]:
        """What a record's workload says about drafts."""
        sizes = self.speculation
        return {
            "draft": self.name, "draft_weights": self.weights, "draft_steps": sizes.steps, "topk": sizes.topk,
            "width": sizes.width, "pinned": sizes.pinned,
        }  # fmt: skip

    def speculator(self, kv: PagedKV, phases: DraftPhases) -> Speculator:
        """What drafts and verifies for an engine over this cache.

        Args:
            kv: the target's cache.
            phases: runners over it.
        """
        drafter = AssistantDrafter(self.assistant, kv, phases, self.speculation)
        return Speculator(self.assistant.target, drafter, kv, phases, self.speculation)


def plan_draft(
    name: str | Path | None, speculation: Speculation | None, target: ModelConfig
) -> DraftPlan | None:
    """Finds a draft for a target.

    Args:
        name: as ``find_draft``, or ``random`` for an assistant that fits any target; None for no draft.
        speculation: how much is drafted; None for three steps of one candidate.
        target: shape of the model that it drafts for.

    Raises:
        InputError: for speculation without a draft, of another kind, or that the target cannot score.
        ModelError: if there is no such draft, or it is another target's.
        ToggleError: for a setting of the environment that is not good.
    """
    if speculation is not None and not isinstance(speculation, Speculation):
        raise InputError(f"speculation is {speculation!r}; give a Speculation(steps, topk, tokens)")
    if name is None:
        if speculation is not None:
            raise InputError('speculation needs a draft model; give draft= too, such as "pico-gqa-assistant"')
        return None
    source = DraftSource(random_shape(target), None) if name == RANDOM else find_draft(name)
    bound_layers(source.assistant, target)
    sizes = speculation or Speculation()
    check_branches(sizes.steps, sizes.topk, vocabulary=target.vocab_size, window=target.sliding_window)
    return DraftPlan(str(name), source, sizes, settings.read_settings().seed_graph)


def open_draft(plan: DraftPlan, target: Decoder, *, seed: int = 0) -> Drafting:
    """Loads a draft and binds it to its target.

    Args:
        plan: what ``plan_draft`` found.
        target: whose cache, embedding and head it uses.
        seed: of random weights.

    Raises:
        ModelError: as ``load_draft``.
    """
    loaded = load_draft(plan.source, target, seed=seed)
    return Drafting(loaded.assistant, plan.speculation, plan.seed_graph, plan.name, loaded.weights)


def use_ops_of_both(ops: str, target: Decoder, kv: PagedKV, drafting: Drafting | None) -> None:
    """Sets the form in which a target, and its draft if it has one, compute over a cache: before any capture."""
    if drafting is None:
        use_ops(ops, target, kv)
        return
    speculation = drafting.speculation
    verify = AttentionKind(target.config.num_heads, speculation.width, tree=speculation.topk > 1)
    use_ops(ops, target, kv, [verify])
    use_draft_ops(ops, drafting.assistant, kv)


def draft_of(loaded: LoadedModel, *, seed: int = 0) -> Assistant:
    """A draft for the model that cases run on: the shipped one, or for random weights one that fits.

    Args:
        loaded: the shipped model, or one with random weights.
        seed: of random weights.
    """
    if loaded.weights == "trained":
        return load_draft(SHIPPED, loaded.model).assistant
    return load_draft(DraftSource(random_shape(loaded.config), None), loaded.model, seed=seed).assistant


def random_shape(target: ModelConfig) -> AssistantConfig:
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
