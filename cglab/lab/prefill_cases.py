"""Random sequences of prefill batches: chunks of several requests, some after cached tokens, some a single token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.inputs import spans_of, step_inputs, write_page_tables
from cglab.engine.requests import Request
from cglab.graphs.options import Options
from cglab.lab.oracles import MAX_CONTEXT, Outcome, Step, StepOracles
from cglab.runners.prefill import PrefillRunner

BUCKETS = (4, 8, 16, 32)
LARGEST = 40  # tokens; above the largest bucket, so that eager steps are among the cases
MOST_REQUESTS = 5
STEPS = (2, 4)


class PrefillOracles(StepOracles[PrefillRunner]):
    """The prefill runner, breakable and full, padded and exact."""

    technique = "prefill"
    requests = MOST_REQUESTS
    heights = (*BUCKETS[1:], 2 * BUCKETS[-1])

    def make_runners(self) -> dict[tuple[str, bool], PrefillRunner]:
        """Breakable and full, padded and exact."""
        return {
            (mode, padding): PrefillRunner(
                self.loaded.model,
                self.kv,
                self.group,
                BUCKETS,
                Options(mode, padding=padding, strict=True, lazy=True),
            )
            for mode in ("breakable", "full")
            for padding in (True, False)
        }

    def sequence(self, runner: PrefillRunner, where: dict[str, Any]) -> None:
        """A few steps; each takes the next chunk of requests that came, or of new ones."""
        requests: list[Request] = []
        try:
            for step in range(int(self.random.integers(*STEPS))):
                chunks = self._chunks(requests, runner)
                write_page_tables(self.kv, requests)
                tokens = sum(chunk.length for chunk in chunks)
                at = where | {"step": step, "tokens": tokens, "spans": len(chunks)}
                self.check(runner, Step(spans_of(chunks), tokens, self.inputs(runner, chunks)), at)
                for chunk in chunks:
                    self.memory.advance(chunk.request, chunk.length)
        finally:
            for request in requests:
                self.memory.release(request)

    def inputs(self, runner: PrefillRunner, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """What the runner reads of a batch, by slot."""
        return step_inputs(chunks, runner.inputs, self.kv)

    def _chunks(self, requests: list[Request], runner: PrefillRunner) -> list[Chunk]:
        """A random number of tokens, split at random over random requests; at times a captured size exactly."""
        draw = self.random.integers
        exact = not runner.captured.options.padding or draw(3) == 0
        left = int(draw(1, LARGEST + 1)) if not exact or draw(4) == 0 else int(self.random.choice(BUCKETS))
        for request in [request for request in requests if draw(2)]:
            requests.remove(request)
            self.memory.release(request)
        for index in range(len(requests), int(draw(1, MOST_REQUESTS + 1))):
            prompt = self.random.integers(0, self.loaded.config.vocab_size, MAX_CONTEXT).tolist()
            request = Request(index, prompt, 1)
            self.memory.admit(request, spare=0)
            # Some find tokens of theirs in the cache: whatever it holds there is what they were.
            cached = int(draw(MAX_CONTEXT // 2)) if draw(2) else 0
            self.memory.grow(request, cached)
            self.memory.advance(request, cached)
            requests.append(request)
        chunks = []
        for request in self.random.permutation(len(requests)).tolist():
            room = min(left, MAX_CONTEXT - requests[request].computed)
            last = request == len(requests) - 1
            length = room if last or draw(4) == 0 else int(draw(0, room + 1))
            if length:
                self.memory.grow(requests[request], requests[request].computed + length)
                chunks.append(Chunk(requests[request], requests[request].computed, length, last=False))
                left -= length
        return chunks or self._chunks(requests, runner)

    def results(self, runner: PrefillRunner, output: Any, step: Step) -> Outcome:
        """Hidden states of every token; logits and greedy tokens after the last of each request."""
        logits = runner.last_logits(output, step.live)
        return {"hidden": output, "logits": logits, "tokens": logits.argmax(-1)}
