"""Whether compiled kernels were found on disk or had to be made: without it, seconds of a first use say little."""

from __future__ import annotations

import sys
from typing import Any, Self


class KernelCacheWatch:
    """Counts, within its ``with`` blocks, what compilers looked for in their caches on disk.

    Graphs are those of ``torch.compile``, counted by Inductor; kernels are Triton's own, compiled in this process.
    Where neither is loaded nothing is compiled, and nothing is counted.

    Attributes:
        hits: graphs and kernels that were there.
        misses: those that were compiled.
    """

    def __init__(self) -> None:
        self.hits = self.misses = 0
        self._knobs: Any = None
        self._before: Any = None

    def __enter__(self) -> Self:
        hits, misses = _graphs()
        self.hits, self.misses = self.hits - hits, self.misses - misses
        self._knobs = getattr(getattr(sys.modules.get("triton"), "knobs", None), "compilation", None)
        if self._knobs is not None:
            self._before, self._knobs.listener = self._knobs.listener, self._kernel
        return self

    def __exit__(self, *_: object) -> None:
        if self._knobs is not None:
            self._knobs.listener = self._before
        hits, misses = _graphs()
        self.hits, self.misses = self.hits + hits, self.misses + misses

    def _kernel(self, *, cache_hit: bool, **facts: Any) -> None:
        self.hits, self.misses = self.hits + cache_hit, self.misses + (not cache_hit)
        if self._before is not None:
            self._before(cache_hit=cache_hit, **facts)

    @property
    def state(self) -> str:
        """``nothing compiled``, ``warm``, ``cold``, or ``partly warm``."""
        if not self.hits and not self.misses:
            return "nothing compiled"
        return "warm" if not self.misses else "partly warm" if self.hits else "cold"


def _graphs() -> tuple[int, int]:
    """Graphs of ``torch.compile`` so far, found and compiled; a graph found whole is not looked for again in parts."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0, 0
    inductor, whole = dynamo.counters["inductor"], dynamo.counters["aot_autograd"]
    hits = max(inductor["fxgraph_cache_hit"], whole["autograd_cache_hit"])
    return hits, inductor["fxgraph_cache_miss"]
