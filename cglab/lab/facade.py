"""``cglab.open``: a model with its cache, its runners and its toggles."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from cglab.engine.batches import SchedulerOptions
from cglab.engine.cache import paged_kv
from cglab.engine.engine import Engine
from cglab.engine.generation import Generation
from cglab.engine.load import Load
from cglab.engine.memory import CacheLayout
from cglab.engine.requests import Event, Request, Sampling
from cglab.engine.workload import Step
from cglab.errors import ClosedError
from cglab.graphs.buckets import bucket_list, exact_sizes, sglang_decode, sglang_speculative
from cglab.graphs.options import Options
from cglab.lab import comparing, steps
from cglab.lab.comparison import Comparison, Profile
from cglab.lab.drafting import DraftPlan, host_tier, open_draft, use_ops_of_both
from cglab.lab.load_run import LoadRun, run_load
from cglab.lab.phases import LabPhases
from cglab.lab.prefill_limit import prefill_sizes
from cglab.lab.prompts import Prompts, encode, sample_prompts
from cglab.lab.reports import LabReports
from cglab.lab.step_times import StepTimes
from cglab.lab.sweep import Sweep
from cglab.lab.techniques import Captures
from cglab.lab.views import show
from cglab.measure.ab import Progress
from cglab.measure.memory import Memory
from cglab.measure.parity import Parity
from cglab.models.compiled import nothing_compiled
from cglab.models.loading import ModelSource, load_model
from cglab.runners.base import GraphGroup, Runner


class Lab(LabReports):
    """One model on one device, with toggles; made by ``cglab.open``.

    Attributes:
        captures: the toggles; a change takes effect with the next call, and one that could have none is refused.
        model, config, tokenizer: what was opened.
        weights: ``trained`` or ``random``.
        drafting: the draft model, and how much it drafts; None without one.
        engine: requests and the paged cache.
        sizes: how large measured steps are, and can be.
        closing: called first when it closes, by whoever works on it in another thread.
    """

    def __init__(
        self, name: str | Path, source: ModelSource, layout: CacheLayout, *,
        device: torch.device, dtype: torch.dtype, ops: str, captures: Captures, buckets: Sequence[int] | None,
        prefill_buckets: Sequence[int] | None, scheduling: SchedulerOptions, padding: bool, seed: int, debug: bool,
        draft: DraftPlan | None = None, bucket_floor: int | None = None, host_pages: int = 0,
    ) -> None:  # fmt: skip
        sizes = exact_sizes if not padding else sglang_decode if draft is None else sglang_speculative
        self.buckets = bucket_list(layout.rows - 1, sizes, explicit=buckets)
        self.prefill_buckets = prefill_sizes(scheduling.token_budget, prefill_buckets)
        self.name, self.device, self.dtype = str(name), device, dtype
        self.captures, self.closing, self._closed = captures, list[Callable[[], object]](), False
        self.group = GraphGroup(device)
        self._before = self._memory()
        self.model, self.config, self.tokenizer, self.weights = load_model(
            source, device=device, dtype=dtype, seed=seed
        )
        kv = paged_kv(layout, self.config, device=device, dtype=dtype)
        self.drafting = None if draft is None else open_draft(draft, self.model, kv, seed=seed)
        use_ops_of_both(ops, self.model, kv, self.drafting)
        self.phases = LabPhases(
            self.model, kv, self.group, self.captures, buckets=self.buckets, prefill_buckets=self.prefill_buckets,
            options=Options(padding=padding, debug=debug), drafting=self.drafting, bucket_floor=bucket_floor,
        )  # fmt: skip
        speculator = None if self.drafting is None else self.drafting.speculator(kv, self.phases)
        host = host_tier(host_pages, kv, self.drafting, self.group)
        self.engine = Engine(self.model, kv, self.phases, scheduling, speculator, host)
        self.times = StepTimes(self.phases.made)
        self.engine.segments.watch = self.times.note
        self.sizes = steps.StepSizes(self.buckets, self.prefill_buckets, self.max_context)

    @property
    def ops(self) -> str:
        """In which kernels the model computes, in every arm; see ``models.ops``."""
        return self.model.body.name

    @property
    def compile_seconds(self) -> float:
        """Seconds that went into compiling for models of these shapes so far."""
        return sum(model.body.compile_seconds for model in self.models)

    @property
    def max_context(self) -> int:
        """Longest request that can run, prompt and new tokens, in tokens."""
        return self.engine.scheduler.memory.layout.room

    @property
    def drafted(self) -> dict[str, Any]:
        """Sizes of drafts, as they are recorded; nothing without a draft model."""
        return {} if self.drafting is None else self.drafting.sizes

    @property
    def models(self) -> tuple[Any, ...]:
        """What computes: the model, and its draft if it has one."""
        return (self.model,) if self.drafting is None else (self.model, self.drafting.model)

    @property
    def prefix_reuse_reason(self) -> str | None:
        """Why tokens that an earlier request computed are computed again; None if they are not."""
        return self.engine.scheduler.prefix_reuse_reason

    def runner(self, mode: str | None = None, name: str = "decode") -> Runner[Any]:
        """The runner of a technique and mode (the toggle's own by default), captured on first use."""
        return self.phases.runner(name, mode)  # a closed lab has no phases, and says so

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Token ids of prompts that are text or token ids already.

        Raises:
            InputError: for text without a tokenizer, or a prompt of another kind.
        """
        return encode(prompts, self.tokenizer, self.name)

    def sample_prompts(self, count: int = 2) -> list[Any]:
        """Prompts that this model can take: code where it has a tokenizer, token ids otherwise."""
        return sample_prompts(count, vocabulary=self.config.vocab_size, has_text=self.tokenizer is not None)

    def generate(
        self, prompts: Prompts, max_new_tokens: int | Sequence[int] = 64, *,
        temperature: float = 0.0, seed: int = 0, stop_at_end: bool = True,
    ) -> Generation:  # fmt: skip
        """Continuations of prompts.

        Args:
            prompts: one text, texts, or lists of token ids.
            max_new_tokens: limit for all, or one for each prompt.
            temperature: of sampling; 0 is greedy.
            seed: of the draws of the first prompt; each prompt after it has the next.
            stop_at_end: end a request at the model's own end token.

        Raises:
            InputError: for a prompt that can never run.
        """
        self._require_open()
        return self.engine.generate(
            self.encode(prompts), max_new_tokens, sampling=Sampling(temperature, seed),
            stops=self.config.eos_token_ids if stop_at_end else (),
            decode=self.tokenizer.decode if self.tokenizer is not None else None,
        )  # fmt: skip

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Tokens as they come, of requests with limits, sampling and stops of their own."""
        self._require_open()
        return self.engine.stream(requests)

    def load(
        self, load: Load, *, seconds: float | None = None, watch: Callable[[], None] | None = None
    ) -> LoadRun:
        """Runs a closed-loop load on whatever the toggles say: latency, coverage by phase, forward occupancy.

        Args:
            load: what to ask; equal loads are the same requests to the byte.
            seconds: stop after so long; None runs it to its end.
            watch: called after every step; what it raises ends the load.

        Raises:
            InputError: if other requests are in flight, or the cache cannot hold the shared prefix.
        """
        self._require_open()
        with nothing_compiled(*self.models):
            needed = self.phases.for_load(load)
            return run_load(self.engine, load, needed, model=self.name, seconds=seconds, watch=watch)

    def compare(
        self, name: str = "decode", arms: Sequence[str] = ("eager", "full"), *,
        instances: int = 3, repeats: int = 10, progress: Progress | None = None, **sizes: int | None,
    ) -> Comparison:  # fmt: skip
        """Measures settings of one toggle in turns, with parity and coverage beside the times.

        A seed step is timed together with the draft loop after it: fused, they are one graph; a draft sampler with
        the draft before it.

        Args:
            name: the toggle.
            arms: its values; the first is the reference of the ratios.
            instances: turns of each arm.
            repeats: timed steps in a turn.
            progress: called with an arm and its instance before each turn; what it raises ends the comparison.
            **sizes: of the step; ``tokens``, ``cached`` and ``requests`` of prefill, ``batch`` and ``context`` of
                all others.

        Raises:
            ToggleError: for an unknown toggle or value.
        """
        self._require_open()
        return comparing.compare(self, name, arms, sizes, comparing.Turns(instances, repeats, progress))

    def describe(self, step: Step, name: str = "decode") -> dict[str, Any]:
        """The workload of a step as it is recorded."""
        sizes = steps.describe(step, self.phases.arm(name, "eager"))
        return sizes | {"cache": self.max_context, "ops": self.ops, **self.drafted}

    def step_parity(self, mode: str, step: Step, name: str = "decode") -> Parity:
        """One captured step against the same step run eager at the padded size (oracle 1)."""
        return steps.step_parity(self.phases.arm(name, mode), step)

    def sweep(
        self, name: str = "decode", arms: Sequence[str] = ("eager", "full"), sizes: Sequence[int] = (), **options: Any,
    ) -> Sweep:  # fmt: skip
        """``compare`` at several batch sizes or, of prefill, numbers of tokens; ``options`` are those of ``compare``.

        Without sizes: every bucket of decode; of prefill the largest step, a quarter of it, and so on.
        """
        size, swept = steps.size_name(name), sizes or self.sizes.swept(name, options.get("requests", 1))
        return Sweep(tuple(self.compare(name, arms, **{size: each, **options}) for each in swept))

    def profile(
        self, name: str = "decode", arms: Sequence[str] = ("eager", "full"), *, repeats: int = 3,
        save: str | Path | None = None, whole: bool = False, **sizes: int | None,
    ) -> Profile:  # fmt: skip
        """Traces a few steps of each arm; never used for times.

        Args:
            name: the toggle.
            arms: its values.
            repeats: traced steps of each arm.
            save: a folder to keep the Chrome traces in, for ``recorded_profile`` and Perfetto.
            whole: of arms of the seed step or the sampler, the whole speculative step that each is part of.
            **sizes: of the step, as in ``compare``.

        Raises:
            ToggleError: for an unknown toggle or value, or whole steps of another toggle.
        """
        self._require_open()
        traced = comparing.trace_whole if whole else comparing.trace
        return traced(self, name, arms, sizes, repeats=repeats, save=save)

    def dashboard(self, *toggles: str) -> Any:
        """The interactive workspace on this lab, a widget; of the toggles named alone, all ten by default."""
        return show("lab_dashboard", self, toggles)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the lab on {self.name} was closed; open it again")

    def close(self) -> Memory | None:
        """Gives the memory back: recordings first, then cache and weights.

        Returns:
            What the device still holds beyond the time before ``open``: outputs that the caller kept, say.
        """
        if self._closed:
            return None
        self._closed = True
        for end in self.closing:
            end()
        self.phases.close()
        self.group.close()
        for model in self.models:
            model.to("meta")
        self.drafting = None
        del self.engine, self.model, self.phases, self.times
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._memory() - self._before

    def __getattr__(self, name: str) -> NoReturn:  # of what is not there, such as what close() gave back
        if name in ("engine", "model", "phases", "times") and self.__dict__.get("_closed"):
            self._require_open()
        raise AttributeError(f"a Lab has no {name!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"Lab({self.name}, {self.weights} weights, {self.device}, {self.dtype}; closed)"
        why = f"; no prefix reuse: {self.prefix_reuse_reason}" if self.prefix_reuse_reason else ""
        state = f"{self.captures}, buckets {self.buckets[0]} to {self.buckets[-1]}{why}"
        return f"Lab({self.name}, {self.weights} weights, {self.device}, {self.dtype}; {state})"
