"""Whether a capture is under way, as code that asks torch is told: by the tape as by a stream capture.

Libraries ask ``torch.cuda.is_current_stream_capturing`` and leave out what a capture would refuse: transformers then
builds its masks without a look at their values. A recorder that answered no would refuse code that a GPU captures.
The answer is this thread's; inside a break, which is eager, it is no.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from cglab.graphs.breaks import capturing

_said: ContextVar[bool] = ContextVar("cglab_said_to_capture", default=False)
_of_stream = torch.cuda.graphs.is_current_stream_capturing


def _answer() -> bool:
    """What ``torch.cuda.is_current_stream_capturing`` returns once it is wrapped."""
    return (_said.get() and capturing()) or _of_stream()


@contextmanager
def said_to_capture() -> Iterator[None]:
    """Within a stage of a capture, code that asks is told that it is captured. Wraps torch's function once."""
    torch.cuda.is_current_stream_capturing = _answer
    token = _said.set(True)
    try:
        yield
    finally:
        _said.reset(token)
