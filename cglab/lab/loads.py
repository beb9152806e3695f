"""Three loads that servers see, as different in their sizes as loads come.

Prefix reuse, chunking and the number of requests that run make the sizes of the steps out of them; so what a bucket
planner needs is recorded from a run (``SizeTrace``), not derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cglab.engine.load import Load

LOADS: Mapping[str, Load] = MappingProxyType({
    "chat": Load(48, 16, (16, 512), (16, 128)),
    "summarisation": Load(16, 8, (2048, 8000), (32, 96)),
    "agentic": Load(48, 16, (64, 1024), (16, 64), shared_prefix=8192),
})  # fmt: skip
"""Mixed short prompts; long prompts and short answers; one long shared prefix with a little new each time."""

QUICK_LOADS: Mapping[str, Load] = MappingProxyType({
    "chat": Load(8, 4, (4, 40), (2, 8)),
    "summarisation": Load(4, 2, (60, 140), (2, 5)),
    "agentic": Load(8, 4, (4, 30), (2, 6), shared_prefix=96),
})  # fmt: skip
"""The same in small, for a CPU."""
