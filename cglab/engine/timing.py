"""When one request arrived, was admitted, got its tokens and ended, and what users call the distances.

The field's words, as the serving benchmarks of SGLang and vLLM use them: TTFT from arrival to the first token, TPOT
the mean of the others, ITL the gap between two, E2E from arrival to the end. Queueing, which those benchmarks leave
inside TTFT, is told apart. What did not happen is None: a benchmark that starts from 0.0 instead reports medians of
0.0 as soon as first tokens go unseen (SGLang's does where the text of a token is empty, so tokens are counted here).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from cglab.engine.requests import Request


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """What became of one request; times in seconds by the server's clock.

    Attributes:
        index: position in the load.
        prompt_tokens: of the prompt, the shared prefix included.
        reused_tokens: of them, taken from the prefix cache at the last admission.
        finish: ``length``, ``stop``, ``cancelled`` or ``error``; None while in flight at the end.
        error: what the server said when it refused the request; empty otherwise.
        preemptions: how often it lost its memory and began anew.
        arrived_at: when it was submitted.
        admitted_at: when it was first given memory.
        finished_at: when it ended.
        token_times: when each new token was on the host.
    """

    index: int
    prompt_tokens: int
    reused_tokens: int
    finish: str | None
    error: str
    preemptions: int
    arrived_at: float | None
    admitted_at: float | None
    finished_at: float | None
    token_times: tuple[float, ...]

    @property
    def completed(self) -> bool:
        """Whether it came to its own end."""
        return self.finish in ("length", "stop")

    @property
    def queueing(self) -> float | None:
        """Seconds from arrival to admission: the part of TTFT that no faster forward shortens by itself."""
        return _apart(self.arrived_at, self.admitted_at)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None without a token, where a zero would pass for a time."""
        return _apart(self.arrived_at, self.token_times[0] if self.token_times else None)

    @property
    def tpot(self) -> float | None:
        """Mean seconds of every token after the first; None with fewer than two tokens."""
        count = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (count - 1) if count > 1 else None

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end."""
        return _apart(self.arrived_at, self.finished_at)

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens (ITL), one fewer than tokens; tokens of one step are 0 apart."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


def timing_of(request: Request, refusal: str | None = None) -> RequestTiming:
    """What a server wrote on a request.

    Args:
        request: ended, or in flight.
        refusal: why the server did not take it.
    """
    finish = request.finish if refusal is None else "error"
    return RequestTiming(
        request.index, len(request.prompt), request.reused, finish, refusal or "", request.preemptions,
        request.arrived_at, request.admitted_at, request.finished_at, tuple(request.token_times),
    )  # fmt: skip


def _apart(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else later - earlier
