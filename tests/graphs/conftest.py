"""The two recorders behind one fixture: a test that takes ``device`` runs on the tape and, where there is one, on a GPU."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device of each recorder."""
    return torch.device(request.param)
