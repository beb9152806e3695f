"""The doctor on the lab's own runners: a step of every technique, in every form, without a false alarm."""

import pytest
import torch

from cglab.lab.checking import CASES, model_of
from cglab.lab.oracles import StepOracles
from cglab.lab.step_doctor import examine_step
from cglab.lab.techniques import TECHNIQUES
from cglab.models.loading import load_model
from cglab.runners.base import Runner


class Examined(Exception):  # noqa: N818 - no error, but the end of a sequence
    """A step was looked at; the rest of its sequence is of no interest."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def looked_at(monkeypatch):
    """Hands the first step of each sequence to a function, instead of checking it; nothing is captured."""

    def have(look):
        def examine(self, runner, step, where):
            look(runner, step)
            raise Examined

        monkeypatch.setattr(StepOracles, "check", examine)
        monkeypatch.setattr(Runner, "capture", lambda self: None)

    return have


def first_steps(name, device):
    """One step in each form of a technique; padding is no matter of what a step computes."""
    oracles = CASES[name](load_model(model_of(name), device=device, dtype=torch.float32), device, 0)
    modes = [mode for mode, _ in oracles.runners]
    try:
        for mode in dict.fromkeys(modes):
            with pytest.raises(Examined):
                oracles.case(modes.index(mode))
    finally:
        oracles.close()
    return len(set(modes))


def test_every_technique_has_cases():
    assert set(CASES) == set(TECHNIQUES)


@pytest.mark.parametrize("name", CASES)
def test_the_labs_own_runners_are_healthy(device, looked_at, name):
    reports = []
    looked_at(lambda runner, step: reports.append(examine_step(runner, step.live, step.inputs)))
    assert first_steps(name, device) == len(reports)
    for report in reports:
        assert report.healthy and not report.notes, str(report)
        assert report.operations > 10


def test_b05_a_length_that_is_read_beside_a_runners_step_is_found(device, looked_at):
    reports = []

    def look(runner, step):
        sound = runner.step

        def spoilt(**inputs):
            longest = int(inputs["seq_lens"].max())
            return *sound(**inputs), longest

        runner.step = spoilt
        reports.append(examine_step(runner, step.live, step.inputs))

    looked_at(look)
    first_steps("decode", device)
    for report in reports:
        (found,) = report.findings
        assert (found.kind, found.place.function) == ("HostReadError", "spoilt")
