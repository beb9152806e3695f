"""The doctor on the lab's own runners: a step of every technique, in every form, without a false alarm."""

import pytest
import torch

from cglab.graphs.doctor import examined
from cglab.lab.checking import CASES, model_of
from cglab.lab.oracles import StepOracles
from cglab.lab.techniques import TECHNIQUES
from cglab.models.loading import load_model
from cglab.runners.base import Runner


class Examined(Exception):  # noqa: N818 - no error, but the end of a sequence
    """A step was looked at; the rest of its sequence is of no interest."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def reports(monkeypatch):
    """Has the doctor look at the first step of each sequence instead of checking it."""
    found = []

    def examine(self, runner, step, where):
        inputs = {**step.inputs, **runner.derived(step.live)}
        with runner.during(step.live):
            inline = runner.backend == "full"
            found.append(examined(runner.step, (), inputs, vary=runner.vary, inline_breaks=inline))
        raise Examined

    monkeypatch.setattr(StepOracles, "check", examine)
    monkeypatch.setattr(Runner, "capture", lambda self: None)
    return found


def test_every_technique_has_cases():
    assert set(CASES) == {each.name for each in TECHNIQUES.values() if each.available}


@pytest.mark.parametrize("name", CASES)
def test_the_labs_own_runners_are_healthy(device, reports, name):
    oracles = CASES[name](load_model(model_of(name), device=device, dtype=torch.float32), device, 0)
    try:
        for number in range(len(oracles.runners)):
            with pytest.raises(Examined):
                oracles.case(number)
    finally:
        oracles.close()
    assert len(reports) == len(oracles.runners)
    for report in reports:
        assert report.healthy and not report.notes, str(report)
        assert report.operations > 10
