"""Random sequences of prefill batches through the stages of a pipeline, each stage against the oracles.

A stage is checked on what the stage before it hands over of the same batch, computed eagerly at its live size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.inputs import spans_of, step_inputs
from cglab.graphs.options import Options
from cglab.lab.oracles import Outcome, Step
from cglab.lab.prefill_cases import BUCKETS, PrefillOracles
from cglab.lab.sparse_prefill import stage_runner
from cglab.models.decoder import part_of
from cglab.models.dsa import SELECTION
from cglab.models.stages import cut
from cglab.runners.pipeline_stage import PipelineStageRunner
from cglab.runners.prefill import PrefillRunner

STAGES = 2


class PipelineOracles(PrefillOracles):
    """Both stages of a pipeline over one cache, padded and exact."""

    technique = "pp_prefill"
    filler: ClassVar[Mapping[str, int]] = {SELECTION: -1}

    def make_runners(self) -> dict[tuple[str, bool], PrefillRunner]:
        """Both stages, padded and exact."""
        stages = cut(self.loaded.config.num_layers, STAGES)
        parts = [part_of(self.loaded.model, stage) for stage in stages]
        made = {
            (f"breakable, stage {part.stage.index}", padding): stage_runner(
                part, self.kv, self.group, BUCKETS, Options("breakable", padding=padding, strict=True)
            )
            for part in parts
            for padding in (True, False)
        }
        self._first = made["breakable, stage 0", True]
        return {**made}

    def inputs(self, runner: PrefillRunner, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """Columns of the batch, and what the first stage hands to the second."""
        if not isinstance(runner, PipelineStageRunner) or runner.stage.first:
            return super().inputs(runner, chunks)
        handed = self._first.run_live_eager(spans_of(chunks), **step_inputs(chunks, self._first.own, self.kv))
        return step_inputs(chunks, runner.own, self.kv) | self._first.named(handed)

    def results(self, runner: PrefillRunner, output: Any, step: Step) -> Outcome:
        """What the first stage hands on; of the last one hidden states, logits and greedy tokens."""
        if isinstance(runner, PipelineStageRunner) and not runner.stage.last:
            handed = runner.named(output)
            chosen = {SELECTION: handed.pop(SELECTION)} if SELECTION in handed else {}
            return {
                "hidden": torch.cat([*handed.values()], -1),
                "tokens": step.inputs["out_slots"][:0],
                **chosen,
            }
        return super().results(runner, output, step)
