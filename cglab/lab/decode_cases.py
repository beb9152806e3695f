"""Random sequences of decode batches: requests come, grow by what was generated, and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cglab.engine.batches import DecodeBatch
from cglab.engine.inputs import step_inputs, write_page_tables
from cglab.engine.requests import Request
from cglab.graphs.options import Options
from cglab.lab.oracles import MAX_CONTEXT, Outcome, R, Step, StepOracles
from cglab.runners.decode import DecodeRunner

BUCKETS = (1, 2, 4, 8)
LARGEST_BATCH = 10  # above the largest bucket, so that eager steps are among the cases
STEPS = (2, 5)


class RequestBatches(StepOracles[R]):
    """Sequences of batches of requests that decode, whatever a step of them computes."""

    requests = LARGEST_BATCH
    heights = (*BUCKETS[1:], 2 * BUCKETS[-1])

    def resize(self, requests: list[Request], count: int) -> None:
        """Ends random requests or admits new ones until ``count`` run; their KV is what the cache holds."""
        vocabulary = self.loaded.config.vocab_size
        while len(requests) > count:
            self.memory.release(requests.pop(int(self.random.integers(len(requests)))))
        while len(requests) < count:
            length = int(self.random.integers(1, MAX_CONTEXT - 2 * STEPS[1] * (1 + self.lookahead)))
            prompt = self.random.integers(0, vocabulary, length).tolist()
            request = Request(len(requests), prompt, MAX_CONTEXT)
            self.memory.admit(request, spare=0)
            self.memory.grow(request, length)
            self.memory.advance(request, length)
            requests.append(request)
            self.extend(request, [int(self.random.integers(vocabulary))])

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        """New tokens of a request, all but the last in the cache, and pages for the next step."""
        request.output += tokens
        self.memory.advance(request, request.length - 1 - request.computed)
        self.memory.grow(request, request.length + self.lookahead)


class DecodeOracles(RequestBatches[DecodeRunner]):
    """The decode runner, full and breakable, padded and exact."""

    technique = "decode"
    filler: ClassVar[Mapping[str, int]] = {"seq_lens": 1}

    def make_runners(self) -> dict[tuple[str, bool], DecodeRunner]:
        """Full and breakable, padded and exact."""
        return {
            (mode, padding): DecodeRunner(
                self.loaded.model,
                self.kv,
                self.group,
                BUCKETS,
                Options(mode, padding=padding, strict=True, lazy=True),
            )
            for mode in ("full", "breakable")
            for padding in (True, False)
        }

    def sequence(self, runner: DecodeRunner, where: dict[str, Any]) -> None:
        """A few steps; between them requests end or come."""
        requests: list[Request] = []
        try:
            for step in range(int(self.random.integers(*STEPS))):
                self.resize(requests, int(self.random.integers(1, LARGEST_BATCH + 1)))
                at = where | {"step": step, "live": len(requests)}
                write_page_tables(self.kv, requests)
                inputs = step_inputs(DecodeBatch(tuple(requests)).chunks, runner.inputs, self.kv)
                tokens = self.check(runner, Step(len(requests), len(requests), inputs), at)
                for request, token in zip(requests, tokens, strict=True):
                    self.extend(request, [token])
        finally:
            for request in requests:
                self.memory.release(request)

    def results(self, runner: DecodeRunner, output: Any, step: Step) -> Outcome:
        """Tokens and logits."""
        return {"tokens": output[0], "logits": output[1]}
