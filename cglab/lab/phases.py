"""The runners of a lab: one for each phase and mode, made when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cglab.engine.load import Load
from cglab.errors import ClosedError
from cglab.graphs.buckets import bucket_list, sglang_prefill
from cglab.graphs.coverage import Coverage
from cglab.graphs.options import Options
from cglab.lab.techniques import Captures, technique
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.runners.base import GraphGroup, Runner
from cglab.runners.decode import DecodeRunner
from cglab.runners.prefill import PrefillRunner

PREFILL_LIMIT = 512
"""Tokens up to which prefill steps are captured by default: beyond it a graph wins nothing, and padding costs.

It is the crossover of one request at a time, ``qwen3-8b`` on an H200: the record of ``cglab bench ttft`` (arm
``breakable``, metric ``limit``). A smaller model wins further up; ``prefill_buckets`` says so for a lab.
"""


def prefill_sizes(token_budget: int, explicit: Sequence[int] | None = None) -> list[int]:
    """Token counts of prefill steps to capture: the user's own, or SGLang's list.

    Args:
        token_budget: most tokens of one step.
        explicit: the user's; None takes SGLang's list up to the budget, or to ``PREFILL_LIMIT`` if that is lower.

    Raises:
        BucketError: as ``bucket_list``.
    """
    if explicit is not None:
        return bucket_list(token_budget, explicit=explicit)
    return bucket_list(min(token_budget, PREFILL_LIMIT), sglang_prefill)


class LabPhases:
    """Runners by phase, on whatever the toggles say; ``engine.Phases`` for a lab.

    Args:
        model: the decoder.
        kv: its cache.
        group: pool and shared buffers of all runners: none holds another's output across a replay.
        captures: the toggles.
        buckets: batch sizes of decode steps.
        prefill_buckets: token counts of prefill steps.
        options: padding and the rest; the backend is the toggle's.
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
    ) -> None:
        self.model, self.kv, self.group, self.captures = model, kv, group, captures
        self.buckets, self.prefill_buckets, self.options = buckets, prefill_buckets, options
        self._decode: dict[str, DecodeRunner] = {}
        self._prefill: dict[str, PrefillRunner] = {}
        self._closed = False

    def decode(self, mode: str | None = None, *, sampling: bool = False) -> DecodeRunner:
        """The decode runner of a mode (the toggle's own by default), captured on first use."""
        mode = self._mode("decode", mode)
        name = mode if not sampling else f"{mode}, sampling"
        if name not in self._decode:
            options = replace(self.options, backend=mode)
            runner = DecodeRunner(self.model, self.kv, self.group, self.buckets, options, sampling=sampling)
            runner.capture()
            self._decode[name] = runner  # not before: one that was interrupted is captured anew
        return self._decode[name]

    def prefill(self, mode: str | None = None) -> PrefillRunner:
        """The prefill runner of a mode (the toggle's own by default); a bucket is captured on its first use."""
        mode = self._mode("prefill", mode)
        if mode not in self._prefill:
            options = replace(self.options, backend=mode, lazy=True)
            runner = PrefillRunner(self.model, self.kv, self.group, self.prefill_buckets, options)
            runner.capture()
            self._prefill[mode] = runner
        return self._prefill[mode]

    def for_load(self, load: Load) -> dict[str, Runner[Any]]:
        """The runners that a load needs, by phase; one without a second token never decodes."""
        needed: dict[str, Runner[Any]] = {"prefill": self.prefill()}
        if load.most_new_tokens > 1:
            needed["decode"] = self.decode(sampling=load.temperature > 0)
        return needed

    def runner(self, name: str, mode: str | None = None) -> Runner[Any]:
        """The runner of a technique, by the toggle's name."""
        return self.prefill(mode) if technique(name).name == "prefill" else self.decode(mode)

    def _mode(self, name: str, mode: str | None) -> str:
        if self._closed:
            raise ClosedError("the lab was closed and captures nothing any more; open it again")
        return technique(name).check(mode or getattr(self.captures, name) or "eager")

    @property
    def made(self) -> dict[str, dict[str, Runner[Any]]]:
        """Runners so far, by technique and mode."""
        return {"decode": dict(self._decode), "prefill": dict(self._prefill)}

    def coverage(self, name: str) -> dict[str, Coverage]:
        """What the runners of a technique counted since they were made, by mode."""
        made = self.made.get(technique(name).name, {})
        return {mode: runner.coverage() for mode, runner in made.items()}

    def ledgers(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of every runner's bucket ledger, by mode; those of prefill are told apart by name."""
        return {
            mode if name == "decode" else f"{name} {mode}": runner.captured.memory()
            for name, made in self.made.items()
            for mode, runner in made.items()
        }

    def close(self) -> None:
        """Gives recordings and buffers back; the group is closed by whoever made it."""
        self._closed = True
        runners: list[Runner[Any]] = [*self._decode.values(), *self._prefill.values()]
        for runner in runners:
            runner.close()
        self._decode.clear()
        self._prefill.clear()
