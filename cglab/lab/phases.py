"""The runners of a lab: one for each phase and mode, made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from cglab.engine.load import Load
from cglab.errors import ClosedError, InputError, ToggleError
from cglab.graphs.coverage import Coverage
from cglab.graphs.options import Options
from cglab.lab.draft_round import BlockRound, Round, SeedRound
from cglab.lab.drafting import Drafting
from cglab.lab.sparse_prefill import SparseArm, extend_sizes, require_latent
from cglab.lab.techniques import SPARSE, Captures, technique
from cglab.models.decoder import Decoder
from cglab.models.draft_cache import Feeder
from cglab.models.dsa_config import DsaConfig
from cglab.models.kv import PagedKV
from cglab.runners.base import GraphGroup, Runner
from cglab.runners.block_draft import BlockDraftRunner
from cglab.runners.decode import DecodeRunner
from cglab.runners.draft_extend import DraftExtendRunner
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.draft_sampler import DraftSampler
from cglab.runners.dsa_choice import SELECTION
from cglab.runners.dsa_policy import SelectionRule
from cglab.runners.prefill import PrefillRunner
from cglab.runners.seed_step import SeedRunner
from cglab.runners.verify import VerifyRunner
from cglab.settings import SEED_GRAPH_SWITCH

R = TypeVar("R", bound=Runner[Any])


class LabPhases:
    """Runners by phase, on whatever the toggles say; ``engine.Phases`` for a lab.

    Args:
        model: the decoder.
        kv: its cache.
        group: pool and shared buffers of all runners: none holds another's output across a replay.
        captures: the toggles.
        buckets: batch sizes of decode, verify and draft steps.
        prefill_buckets: token counts of prefill steps.
        options: padding and the rest; the backend is the toggle's.
        drafting: the draft model, where there is one.
        bucket_floor: smallest prefill bucket in which sparse attention is recorded; None for S3's rule.

    Attributes:
        max_cached: of a full sparse prefill, see ``SparseArm``.
        selection: reads the rule of ``dsa_indexer_prep=auto``; none without recorded costs.
    """

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        group: GraphGroup,
        captures: Captures,
        *,
        buckets: Sequence[int],
        prefill_buckets: Sequence[int],
        options: Options,
        drafting: Drafting | None = None,
        bucket_floor: int | None = None,
    ) -> None:
        self.model, self.kv, self.group, self.captures = model, kv, group, captures
        self.buckets, self.prefill_buckets, self.options = buckets, prefill_buckets, options
        self.drafting, self.bucket_floor = drafting, bucket_floor
        self.max_cached: int | None = None
        self.selection: Callable[[], SelectionRule] = SelectionRule
        self._made: dict[str, dict[str, Runner[Any]]] = {}
        self._closed = False

    def decode(self, mode: str | None = None, *, sampling: bool = False) -> DecodeRunner:
        """The decode runner of a mode (the toggle's own by default), captured on first use."""
        mode = self._mode("decode", mode)
        make = partial(DecodeRunner, self.model, self.kv, self.group, self.buckets, sampling=sampling)
        return self._runner("decode", f"{mode}, sampling" if sampling else mode, make, self._options(mode))

    def prefill(self, mode: str | None = None, **parts: str) -> PrefillRunner:
        """The prefill runner of a mode and, of latent attention, ``SPARSE`` parts; a bucket captured on first use."""
        mode = self._mode("prefill", mode)
        name, options = mode, self._options(mode)
        make: Callable[..., PrefillRunner] = partial(PrefillRunner, feeder=self._feeder)
        if isinstance(self.model.config, DsaConfig):
            arm = self._arm(mode, **parts)
            name, make = arm.name, partial(arm.make, floor=self.bucket_floor)
        make = partial(make, self.model, self.kv, self.group, self.prefill_buckets)
        return self._runner("prefill", name, make, replace(options, lazy=True))

    def _arm(self, mode: str, **parts: str) -> SparseArm:
        attention, preparation = (self._mode(each, parts.get(each)) for each in SPARSE)
        return SparseArm(mode, attention, preparation, self.max_cached, self.selection)

    def draft_extend(self, mode: str | None = None) -> DraftExtendRunner:
        """The runner of a NextN layer's extends, in the parts of its target's sparse prefill; captured on first use.

        Raises:
            ToggleError: without a NextN layer.
        """
        mode, (layer, kv) = self._mode("draft_extend", mode), self._drafting("draft_extend").nextn
        arm, sizes = self._arm(self._mode("prefill", None)), extend_sizes(self.buckets, self.prefill_buckets)
        make = partial(arm.extend, layer, kv, self.group, sizes, floor=self.bucket_floor)
        name = mode if arm.name == "breakable" else f"{mode}, prefill {arm.name}"
        options = self._options("breakable" if mode == "graph" else "eager")
        return self._runner("draft_extend", name, make, replace(options, lazy=True))

    def verify(self, mode: str | None = None) -> VerifyRunner:
        """The runner of verify steps.

        Raises:
            ToggleError: without a draft model.
        """
        mode, speculation = self._mode("verify", mode), self._drafting("verify").speculation
        make = partial(
            VerifyRunner, self.model, self.kv, self.group, self.buckets, width=speculation.width,
            topk=speculation.topk, steps=speculation.steps, hidden=self._feeder is None, feeder=self._feeder,
        )  # fmt: skip
        return self._runner("verify", mode, make, self._options(mode))

    def draft_loop(self, mode: str | None = None, *, fused: bool | None = None) -> DraftLoopRunner:
        """The runner of draft loops.

        Args:
            mode: None for the toggle's own.
            fused: whether the seed is the loop's first iteration; None for what the seed's toggle says.

        Raises:
            ToggleError: without a draft model.
        """
        mode, drafting = self._mode("draft_loop", mode), self._drafting("draft_loop")
        fused, speculation = self.fused() if fused is None else fused, drafting.speculation
        make = partial(
            DraftLoopRunner, drafting.assistant, self.kv, self.group, self.buckets, steps=speculation.steps,
            topk=speculation.topk, tokens=speculation.width, fused=fused,
        )  # fmt: skip
        return self._runner("draft_loop", f"{mode}, fused" if fused else mode, make, self._options(mode))

    def seed_step(self, mode: str | None = None) -> SeedRunner | None:
        """The runner of seed steps; None where the loop begins with the seed.

        With ``CGLAB_DISABLE_SEED_GRAPH=1`` the step is eager in every mode, and counts why.

        Raises:
            ToggleError: without a draft model.
        """
        mode, drafting = self._mode("seed_step", mode), self._drafting("seed_step")
        if self.fused(mode):
            return None
        switched_off = mode != "eager" and not drafting.seed_graph
        options = self._options("full" if mode == "graph" else "eager")
        if switched_off:
            options = replace(options, kill_switch=f"{SEED_GRAPH_SWITCH}=1")
        make = partial(
            SeedRunner, drafting.assistant, self.kv, self.group, self.buckets, topk=drafting.speculation.topk
        )  # fmt: skip
        return self._runner("seed_step", mode, make, options)

    def fused(self, mode: str | None = None) -> bool:
        """Whether the draft loop begins with the seed: the seed's mode says so and no variable forbids its graph."""
        return self._mode("seed_step", mode) == "fused" and self._drafting("seed_step").seed_graph

    def block_draft(self, mode: str | None = None) -> BlockDraftRunner:
        """The runner of block drafts; the draft loop's toggle says how the draft itself is captured.

        Args:
            mode: whether the sampler is part of it; None for what the sampler's toggle says.

        Raises:
            ToggleError: without a block draft.
        """
        mode, backend = self._mode("draft_sampler", mode), self._mode("draft_loop", None)
        fed = self._drafting("draft_sampler").block

        def make(options: Options) -> BlockDraftRunner:
            sampler = DraftSampler(self.model, fed.draft.config.block_size, in_graph=mode == "graph")
            return BlockDraftRunner(fed.draft, fed.kv, self.group, self.buckets, options, sampler=sampler)

        name = mode if backend == "full" else f"{mode}, draft {backend}"
        return self._runner("draft_sampler", name, make, self._options(backend))

    def for_load(self, load: Load) -> dict[str, Runner[Any]]:
        """The runners that a load needs, by phase; one without a second token never decodes.

        Raises:
            InputError: for a load at a temperature where drafts are accepted greedily.
        """
        if load.temperature > 0 and self.drafting is not None:
            raise InputError(
                f"the load samples at temperature {load.temperature:g}, and drafts are accepted greedily; "
                "give temperature 0, or open the model without a draft"
            )
        needed: dict[str, Runner[Any]] = {"prefill": self.prefill()}
        if load.most_new_tokens > 1:
            needed |= self.for_decoding(sampling=load.temperature > 0)
        return needed

    def for_decoding(self, *, sampling: bool = False) -> dict[str, Runner[Any]]:
        """The runners that make requests longer, by phase: that of decode, or those of drafts and verify."""
        if self.drafting is None:
            return {"decode": self.decode(sampling=sampling)}
        if self._feeder is not None:
            return {"block_draft": self.block_draft(), "verify": self.verify()}
        if self.drafting.layer_kv is not None:
            return {"draft_extend": self.draft_extend(), "verify": self.verify()}
        seed = self.seed_step()
        seeds: dict[str, Runner[Any]] = {} if seed is None else {"seed_step": seed}
        return seeds | {"draft_loop": self.draft_loop(), "verify": self.verify()}

    def runner(self, name: str, mode: str | None = None) -> Runner[Any]:
        """The runner of a technique, by the toggle's name; that of a fused seed step is the loop's.

        Raises:
            ToggleError: for an unknown name, or one that is no technique of a single process.
        """
        if (name := technique(name).name) == "seed_step":
            return self.seed_step(mode) or self.draft_loop(fused=True)
        made: dict[str, Callable[[str | None], Runner[Any]]] = {
            "decode": self.decode, "prefill": self.prefill, "verify": self.verify, "draft_loop": self.draft_loop,
            "draft_sampler": self.block_draft, "draft_extend": self.draft_extend,
        }  # fmt: skip
        if name in SPARSE:
            require_latent(self.model.config, name)
            return self.prefill(**{} if mode is None else {name: mode})
        if name not in made:
            raise ToggleError(
                f"{name} has no runner in a lab of one process: its stages are processes; run cglab bench pipeline. "
                f"Here: {', '.join(made)}, seed_step"
            )
        return made[name](mode)

    def arm(self, name: str, mode: str) -> Runner[Any] | Round:
        """What a comparison runs: a runner; a seed step with the loop after it, a sampler with the draft before it."""
        if (name := technique(name).name) == "draft_sampler":
            return BlockRound(self.block_draft(mode))
        if name != "seed_step":
            return self.runner(name, mode)
        seed = self.seed_step(mode)
        return SeedRound(self.draft_loop(fused=seed is None), seed)

    @property
    def _feeder(self) -> Feeder | None:
        return None if self.drafting is None else self.drafting.feeder

    def _options(self, mode: str) -> Options:
        return replace(self.options, backend=mode)

    def _runner(self, phase: str, name: str, make: Callable[[Options], R], options: Options) -> R:
        """The runner of a phase and mode; captured, once."""
        made = self._made.setdefault(phase, {})
        if name not in made:
            runner = make(options)
            runner.capture()
            made[name] = runner  # not before: one that was interrupted is captured anew
        return cast("R", made[name])

    def _mode(self, name: str, mode: str | None) -> str:
        if self._closed:
            raise ClosedError("the lab was closed and captures nothing any more; open it again")
        return technique(name).check(mode or getattr(self.captures, name) or "eager")

    def _drafting(self, name: str) -> Drafting:
        if self.drafting is None:
            raise ToggleError(
                f"{name} needs a draft model and this lab has none; open it with draft=, such as "
                'cglab.open("pico-gqa", draft="pico-gqa-assistant")'
            )
        return self.drafting

    def made(self, phase: str) -> Mapping[str, Runner[Any]]:
        """The runners of a phase that were asked for so far, by mode."""
        return self._made.get(phase, {})

    def coverage(self, name: str) -> dict[str, Coverage]:
        """What the runners of a technique, or ``dsa_selection`` where it is chosen, counted since made, by mode."""
        name = name if name == SELECTION else technique(name).name
        made = self.made("prefill" if name in (*SPARSE, SELECTION) else name)
        counts = {mode: runner.coverages() for mode, runner in made.items()}
        return {mode: found[name] for mode, found in counts.items() if name in found}

    def ledgers(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of every runner's bucket ledger, by mode; those of other phases than decode are told apart by name."""
        return {
            mode if name == "decode" else f"{name} {mode}": runner.memory()
            for name, made in self._made.items()
            for mode, runner in made.items()
        }

    def close(self) -> None:
        """Gives recordings and buffers back; the group is closed by whoever made it."""
        self._closed = True
        for made in self._made.values():
            for runner in made.values():
                runner.close()
        self._made.clear()
