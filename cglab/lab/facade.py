"""``cglab.open``: a model with its cache, its runners and its toggles."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from cglab.engine.engine import Engine
from cglab.engine.requests import Generation
from cglab.engine.workload import DecodeStep, steady_decode
from cglab.errors import ClosedError, InputError, ToggleError
from cglab.graphs.buckets import bucket_list, exact_sizes, sglang_decode
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.graphs.coverage import Coverage
from cglab.graphs.options import Options
from cglab.graphs.tape_pool import TapePool
from cglab.lab.comparison import Comparison, Profile
from cglab.lab.profiles import save_profile, trace_path
from cglab.lab.prompts import Prompts, encode, sample_prompts
from cglab.lab.sweep import Sweep
from cglab.lab.techniques import Captures, technique
from cglab.measure.ab import interleave
from cglab.measure.memory import Memory, memory_now
from cglab.measure.parity import Parity, compare_logits, compare_tokens, worst
from cglab.measure.profiling import profile
from cglab.models.kv import PagedKV
from cglab.models.loading import load_model
from cglab.runners.base import GraphGroup
from cglab.runners.decode import DecodeRunner

PAGE_SIZE = 16


class Lab:
    """One model on one device, with toggles; made by ``cglab.open``.

    Attributes:
        captures: the toggles; a change takes effect with the next call.
        model, config, tokenizer: what was opened.
        weights: ``trained`` or ``random``.
        engine: requests and the paged cache.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch: int,
        max_context: int | None,
        buckets: Sequence[int] | None,
        padding: bool,
        seed: int,
        debug: bool,
    ) -> None:
        if max_batch < 1:
            raise InputError(f"max_batch must be at least 1, got {max_batch}")
        rule = sglang_decode if padding else exact_sizes
        self.buckets = bucket_list(max_batch, rule, explicit=buckets)
        self.name, self.device, self.dtype = str(name), device, dtype
        self.captures = Captures()
        self._options = {"padding": padding, "debug": debug}
        self._closed = False
        self.group = GraphGroup(device)
        self._before = self._memory()
        self.model, self.config, self.tokenizer, self.weights = load_model(
            name, device=device, dtype=dtype, seed=seed
        )
        context = min(max_context or (512 if device.type == "cpu" else 1024), self.config.max_position)
        pages = -(-context // PAGE_SIZE)
        kv = PagedKV(
            self.config, pages=max_batch * pages + 1, page_size=PAGE_SIZE, rows=max_batch + 1,
            max_context=context, device=device, dtype=dtype,
        )  # fmt: skip
        self.engine = Engine(self.model, kv, device)
        self._runners: dict[str, DecodeRunner] = {}

    @property
    def max_context(self) -> int:
        """Longest request, prompt and new tokens, in tokens."""
        return self.engine.max_context

    def runner(self, mode: str | None = None) -> DecodeRunner:
        """The decode runner of a mode (the toggle's own by default), captured on first use."""
        self._require_open()
        mode = technique("decode").check(mode or self.captures.decode or "eager")
        if mode not in self._runners:
            options = Options(backend=mode, **self._options)  # type: ignore[arg-type]
            runner = DecodeRunner(self.model, self.engine.kv, self.group, self.buckets, options)
            self._runners[mode] = runner
            runner.capture()
        return self._runners[mode]

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Token ids of prompts that are text or token ids already.

        Raises:
            InputError: for text without a tokenizer, or a prompt of another kind.
        """
        return encode(prompts, self.tokenizer, self.name)

    def sample_prompts(self, count: int = 2) -> list[Any]:
        """Prompts that this model can take: code where it has a tokenizer, token ids otherwise."""
        has_text = self.tokenizer is not None
        return sample_prompts(count, vocabulary=self.config.vocab_size, has_text=has_text)

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int | Sequence[int] = 64,
        *,
        stop_at_end: bool = True,
    ) -> Generation:
        """Greedy continuations.

        Args:
            prompts: one text, texts, or lists of token ids.
            max_new_tokens: limit for all, or one for each prompt.
            stop_at_end: end a request at the model's own end token.

        Raises:
            InputError: for a prompt that can never run.
        """
        runner = self.runner()
        stops = self.config.eos_token_ids if stop_at_end else ()
        decode = self.tokenizer.decode if self.tokenizer is not None else None
        return self.engine.generate(self.encode(prompts), max_new_tokens, runner, stops=stops, decode=decode)

    def _workload(self, batch: int | None, context: int | None) -> tuple[int, int]:
        self._require_open()
        return batch or min(4, self.buckets[-1]), context or min(128, self.max_context)

    def describe(self, step: DecodeStep) -> dict[str, Any]:
        """The workload of a step as it is recorded."""
        bucket = next((size for size in self.buckets if size >= step.live), None)
        return {"batch": step.live, "context": step.context, "bucket": bucket, "cache": self.max_context}

    def compare(
        self,
        name: str = "decode",
        arms: Sequence[str] = ("eager", "full"),
        *,
        batch: int | None = None,
        context: int | None = None,
        instances: int = 3,
        repeats: int = 10,
    ) -> Comparison:
        """Measures settings of one toggle in turns, with parity and coverage beside the times.

        Args:
            name: the toggle.
            arms: its values; the first is the reference of the ratios.
            batch: live requests of the step.
            context: tokens that each sees.
            instances: turns of each arm.
            repeats: timed steps in a turn.

        Raises:
            ToggleError: for an unknown toggle or value.
        """
        checked = [technique(name).check(arm) for arm in arms]
        if len(set(checked)) != len(checked):
            raise ToggleError(f"arms are compared with each other, each once; got {checked}")
        batch, context = self._workload(batch, context)
        runners = {arm: self.runner(arm) for arm in checked}
        before = {arm: runner.coverage().copy() for arm, runner in runners.items()}
        with steady_decode(self.engine, batch, context) as step:
            parity = {arm: self.step_parity(arm, step) for arm in checked if arm != "eager"}
            times = interleave(
                {arm: self._timed(runner, step) for arm, runner in runners.items()},
                instances=instances,
                repeats=repeats,
            )
            workload = self.describe(step)
        return Comparison(
            name, self.name, workload, self.group.recorder.name, times, parity,
            {arm: runner.coverage() - before[arm] for arm, runner in runners.items()},
            {arm: runner.captured.memory() for arm, runner in runners.items()},
        )  # fmt: skip

    def sweep(
        self, name: str = "decode", arms: Sequence[str] = ("eager", "full"),
        batches: Sequence[int] | None = None, **options: Any,
    ) -> Sweep:  # fmt: skip
        """``compare`` at several batch sizes, every bucket by default; ``options`` are those of ``compare``."""
        sizes = batches or self.buckets
        return Sweep(tuple(self.compare(name, arms, batch=size, **options) for size in sizes))

    def _timed(self, runner: DecodeRunner, step: DecodeStep) -> Callable[[], float]:
        clock, run = clock_for(self.device, "wall"), partial(runner.run, step.live, **step.inputs)
        return lambda: sample_seconds(run, clock, repeats=1, warmup=0)[0]

    def step_parity(self, mode: str, step: DecodeStep) -> Parity:
        """One captured step against the same step run eager at the padded size (oracle 1), tokens and logits."""
        runner = self.runner(mode)
        tokens, logits = (t.clone() for t in runner.run(step.live, **step.inputs))
        size = runner.captured.pad(step.live)
        if size in runner.captured.captured_sizes:
            want_tokens, want_logits = runner.run_padded_eager(step.live, size, **step.inputs)
        else:  # it ran eager, at its live size
            want_tokens, want_logits = runner.run_live_eager(step.live, **step.inputs)
        same_ids = compare_tokens(tokens.unsqueeze(-1).tolist(), want_tokens.unsqueeze(-1).tolist())
        return worst([compare_logits(logits, want_logits), same_ids])

    def profile(
        self,
        name: str = "decode",
        arms: Sequence[str] = ("eager", "full"),
        *,
        batch: int | None = None,
        context: int | None = None,
        steps: int = 3,
        save: str | Path | None = None,
    ) -> Profile:
        """Traces a few steps of each arm; never used for times.

        Args:
            name: the toggle.
            arms: its values.
            batch: live requests of the step.
            context: tokens that each sees.
            steps: traced steps of each arm.
            save: a folder to keep the Chrome traces in, for ``recorded_profile`` and Perfetto.
        """
        checked = [technique(name).check(arm) for arm in arms]
        batch, context = self._workload(batch, context)
        traces = {}
        with steady_decode(self.engine, batch, context) as step:
            for arm in checked:
                runner = self.runner(arm)
                run, kept = (
                    partial(runner.run, step.live, **step.inputs),
                    save and trace_path(save, name, arm),
                )
                traces[arm] = profile(run, steps=steps, device=self.device, save=kept)
            made = Profile(name, self.name, self.describe(step), traces)
        if save is not None:
            save_profile(made, save, self.device)
        return made

    def coverage(self) -> dict[str, Coverage]:
        """Captured and eager steps since the lab was opened, by mode, with reasons."""
        return {mode: runner.coverage() for mode, runner in self._runners.items()}

    def memory(self) -> dict[str, Any]:
        """Where the memory is: the device, the graph pool, and each bucket's line of the ledger."""
        return {
            "device": self._memory().as_dict(),
            "pool_bytes": self.group.pool.reserved_bytes,
            "buckets": {mode: runner.captured.memory() for mode, runner in self._runners.items()},
        }

    def _memory(self) -> Memory:
        pool = self.group.pool
        return memory_now(self.device, pool if isinstance(pool, TapePool) else None)

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
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self.group.close()
        self.model.to("meta")
        del self.engine, self.model
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._memory() - self._before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = (
            "closed" if self._closed else f"{self.captures}, buckets {self.buckets[0]} to {self.buckets[-1]}"
        )
        return f"Lab({self.name}, {self.weights} weights, {self.device}, {self.dtype}; {state})"
