"""The two recorders behind one fixture: a test that takes ``device`` runs on the tape and, where there is one, on a GPU."""

import gc

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def frozen_heap():
    """Every capture collects garbage first; what was imported is not worth looking through a thousand times."""
    import cglab

    with cglab.capture(lambda x: x.sum(-1).relu(), slots={"x": cglab.Slot()}, buckets=(1,)) as captured:
        captured(x=torch.ones(1, 2))  # brings in what torch loads late
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device of each recorder."""
    return torch.device(request.param)
