"""Decode steps of SGLang's ModelRunner, each timed from token ids on the host to the next ids on the host.

    python token_latency.py SOCKET BENCHMARK_ARGUMENTS...

SGLang is set up, and its steps are called, by its own ``sglang.benchmark.one_batch``; that one's figure starts with
ids on the device and ends before they are read, which is another boundary than the lab's. So its measured run is
replaced here: whoever listens on SOCKET asks line by line, and other arms can take their turns in between.

| asked | answered |
| --- | --- |
| ``{"do": "begin", "prompts": [[...]]}`` | ``seconds`` of the prompts' one prefill, ``tokens`` after it |
| ``{"do": "step", "tokens": [...]}`` | ``seconds`` of one decode step, its ``tokens`` |
| ``{"do": "launch", "calls": n}`` | ``seconds`` of one forward of ``n`` in a row, inputs prepared, nothing read |
| ``{"do": "end"}`` | nothing: the process ends |
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any


class Steps:
    """One batch at a time on the runner of the benchmark."""

    def __init__(self, runner: Any, one_batch: Any, torch: Any) -> None:
        self.runner, self.one_batch, self.torch = runner, one_batch, torch
        self.batch: Any = None
        self.first: Any = None

    def begin(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Forgets the batch before and computes these prompts of one length."""
        self.runner.clear()
        requests = self.one_batch.prepare_synthetic_inputs_for_latency_test(
            len(prompts), len(prompts[0]), prompts
        )
        self.runner.synchronize()
        started = time.perf_counter()
        tokens, _, self.batch = self.runner.extend(requests)
        told = tokens.tolist()
        return {"seconds": time.perf_counter() - started, "tokens": told}

    def step(self, tokens: list[int]) -> dict[str, Any]:
        """The next token of each request after these."""
        self.runner.synchronize()
        started = time.perf_counter()
        ids = self.torch.tensor(tokens).to(self.batch.device, non_blocking=True)
        told = self.runner.decode(ids, self.batch)[0].tolist()
        return {"seconds": time.perf_counter() - started, "tokens": told}

    def launch(self, calls: int) -> dict[str, Any]:
        """The forward of the next step over and over; each writes the same keys and values at the same places."""
        inner, seen = self.runner.torch_runner, []
        forward = inner.forward

        def noted(batch: Any, *arguments: Any, **named: Any) -> Any:
            seen.append((batch, arguments, named))
            return forward(batch, *arguments, **named)

        inner.forward = noted
        try:
            self.runner.decode(self.torch.zeros(len(self.batch.reqs), device=self.batch.device), self.batch)
        finally:
            del inner.forward
        batch, arguments, named = seen[-1]
        self.runner.synchronize()
        started = time.perf_counter()
        with self.torch.no_grad():
            for _ in range(calls):
                forward(batch, *arguments, **named)
        self.runner.synchronize()
        return {"seconds": (time.perf_counter() - started) / calls}


def serve(steps: Steps, address: str, facts: dict[str, Any]) -> None:
    """Tells the facts, then answers until it is told to end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw", encoding="utf-8") as lines:

            def tell(answer: dict[str, Any]) -> None:
                lines.write(json.dumps(answer) + "\n")
                lines.flush()

            tell(facts)
            for line in lines:
                asked = json.loads(line)
                what = asked.pop("do")
                if what == "end":
                    return
                tell(getattr(steps, what)(**asked))


def main(address: str, arguments: list[str]) -> None:
    """Runs the benchmark with its measured run replaced."""
    import torch
    from sglang.benchmark import one_batch

    def measured(_name: str, runner: Any, *_arguments: Any, **_named: Any) -> None:
        inner = runner.torch_runner
        facts = {
            "tokens": inner.max_total_num_tokens,
            "attention": type(inner.attn_backend).__name__,
            "torch": torch.__version__,
        }
        serve(Steps(runner, one_batch, torch), address, facts)
        sys.exit(0)

    one_batch.latency_test_run_once = measured
    sys.argv = ["one_batch", *arguments]
    one_batch.cli_main()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
