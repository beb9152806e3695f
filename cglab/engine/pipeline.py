"""A decoder over several stages, one process each, with several micro-batches in flight (S2).

Every rank plans: a schedule is a function of tokens and of the order of calls, and all ranks have the same requests, so
that batches need not be told. A micro-batch has a scheduler of its own over its part of the cache, and admission and
chunks are those of one process; they take turns, and while one is on its way through the stages the others are begun.
What a stage needs of another is waited for under a deadline: a rank that fails closes its connections, and all stop.

A step that only decodes is computed by the same runner, as chunks of one token (P84).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cglab.engine.batches import Batch, SchedulerOptions
from cglab.engine.cache import layout_of
from cglab.engine.inputs import next_tokens, spans_of, step_inputs, write_page_tables
from cglab.engine.links import StageLinks
from cglab.engine.requests import Request, check_request, listed
from cglab.engine.scheduler import Scheduler
from cglab.engine.segments import ForwardSegments
from cglab.errors import InputError, RankError
from cglab.graphs.clocks import clock_for
from cglab.runners.pipeline_stage import PipelineStageRunner


@dataclass
class MicroBatch:
    """A turn of the pipeline: its own scheduler, and the tokens of its batch in flight where this rank chose them."""

    scheduler: Scheduler
    chosen: list[int] | None = None


class Pipeline:
    """One rank's stage and its part in every step.

    Args:
        runner: the stage, captured; the ranks agree here on what all of them replay.
        links: to the other ranks.
        options: the scheduler's; the budget is one forward's, and ``max_running`` is shared by the micro-batches.
        micro_batches: how many are in flight; None for one a stage.

    Attributes:
        lanes: the micro-batches.
        segments: device time of every forward of this stage.
        largest: most tokens of one forward so far.

    Raises:
        InputError: if rank and stage differ, the cache has no part for each micro-batch, or there is none.
        RankError: if another rank is lost, late, or has skipped its capture.
    """

    def __init__(
        self,
        runner: PipelineStageRunner,
        links: StageLinks,
        options: SchedulerOptions,
        *,
        micro_batches: int | None = None,
    ) -> None:
        stage, count = runner.stage, links.count if micro_batches is None else micro_batches
        if (stage.index, stage.count) != (links.rank, links.count) or count < 1:
            raise InputError(
                f"{stage} on rank {links.rank} of {links.count} with {count} micro-batches: give each rank its own "
                "stage, and at least one micro-batch"
            )
        runner.agree(links)
        self.runner, self.links, self.kv, self.model = runner, links, runner.kv, runner.model
        layout = layout_of(self.kv, min(len(self.kv.context_positions), self.model.config.max_position))
        shared = None if options.max_running is None else max(options.max_running // count, 1)
        each = replace(options, max_running=shared)
        self.lanes = [MicroBatch(Scheduler(part, each)) for part in layout.lanes(count)]
        self.now: Callable[[], float] = time.perf_counter
        self.segments = ForwardSegments(clock_for(self.kv.device), now=self.now)
        self.largest = 0

    def run(self, requests: Sequence[Request]) -> None:
        """Runs requests to their end, on all ranks together; afterwards each has its output on every rank.

        Raises:
            RankError: if another rank is lost, late, or was given other requests. This one's connections are closed
                then, as after any other error: the pipeline is over on all ranks.
            InputError: for a request that can never run.
        """
        requests = listed(requests)
        try:
            for request in requests:
                check_request(request)
            self._require_the_same(requests)
            for index, request in enumerate(requests):
                self.lanes[index % len(self.lanes)].scheduler.add(request, self.now())
            while not all(lane.scheduler.idle for lane in self.lanes):
                for lane in self.lanes:
                    self._land(lane)
                    self._launch(lane)
            self.links.settle()
        except BaseException:
            self.links.close()
            raise

    def _require_the_same(self, requests: Sequence[Request]) -> None:
        """Schedules are equal where requests are."""
        told = hash(  # of numbers, which every process hashes alike
            tuple(
                (*r.prompt, r.limit, r.sampling.temperature, r.sampling.seed, *sorted(r.stops))
                for r in requests
            )
        )
        everyone = self.links.gather(torch.tensor([told, len(requests)])).tolist()
        if any(each != everyone[0] for each in everyone):
            raise RankError(
                f"ranks were given different requests ({[count for _, count in everyone]} by rank): "
                "give every rank the same ones, in the same order"
            )

    def _launch(self, lane: MicroBatch) -> None:
        """Begins the micro-batch's next batch, if it has one: takes proxies, computes, hands on."""
        batch = lane.scheduler.plan(self.now())
        if batch is None:
            return
        self.largest = max(self.largest, batch.tokens)
        write_page_tables(self.kv, batch.requests)
        inputs = step_inputs(batch.chunks, self.runner.own, self.kv)
        if not self.runner.stage.first:
            inputs |= self.links.receive(self.runner.taken, batch.tokens)
        output = self._compute(batch, inputs)
        if output is not None:
            lane.chosen = self.links.hand_out(output)

    @torch.no_grad()
    def _compute(self, batch: Batch, inputs: dict[str, Tensor]) -> Tensor | None:
        """Runs the stage on a batch; the next tokens, if it is the last one and there are any."""
        spans = spans_of(batch.chunks)
        with self.segments.timed("stage"):
            output: Any = self.runner.run(spans, **inputs)
            if not self.runner.stage.last:
                self.links.send(self.runner.named(output))
                return None
            ending = [index for index, chunk in enumerate(batch.chunks) if chunk.last]
            if not ending:
                return None
            logits = self.runner.last_logits(output, spans, ending)
            return next_tokens([batch.chunks[index] for index in ending], logits, self.kv)

    def _land(self, lane: MicroBatch) -> None:
        """Ends the micro-batch's batch in flight, if there is one, with its tokens."""
        batch = lane.scheduler.in_flight
        if batch is None:
            return
        count = sum(chunk.last for chunk in batch.chunks)
        tokens: Sequence[int] = ()
        if count:
            tokens = self.links.tokens(count) if lane.chosen is None else lane.chosen
        lane.chosen = None
        lane.scheduler.commit(batch, [[token] for token in tokens], self.now())
