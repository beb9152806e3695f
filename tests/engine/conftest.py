"""Fixtures of the engine's tests."""

import gc

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


@pytest.fixture(scope="session", autouse=True)
def frozen_heap():
    """Every capture collects garbage first; what was imported is not worth looking through a thousand times."""
    import cglab

    with cglab.capture(lambda x: x.sum(-1).relu(), slots={"x": cglab.Slot()}, buckets=(1,)) as captured:
        captured(x=torch.ones(1, 2))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
