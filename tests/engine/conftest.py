"""Fixtures of the engine's tests."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device of each recorder."""
    return torch.device(request.param)


@pytest.fixture
def bench(device, kind):
    """Makes benches of a module's kind and closes them."""
    made = []

    def make(**sizes):
        made.append(kind(device, **sizes))
        return made[-1]

    yield make
    for each in made:
        each.close()
