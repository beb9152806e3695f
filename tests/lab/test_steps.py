"""The step of a technique, held still, and how its outputs are compared."""

import pytest
import torch

import cglab
from cglab.errors import InputError
from cglab.lab.available import unavailable
from cglab.lab.steps import SIZES, compare_outputs, fixed_step
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.parity import Verdict

OPENED = {
    "draft_sampler": {"draft": "random-block"},
    **dict.fromkeys(("verify", "draft_loop", "seed_step"), {"draft": "pico-gqa-assistant"}),
    **dict.fromkeys(("dsa_attention", "dsa_indexer_prep"), {"name": "dsa-tiny"}),
    "draft_extend": {"name": "dsa-tiny", "draft": "nextn"},
}
"""How a lab is opened that has a technique; plainly for all others."""


@pytest.mark.parametrize("name", [name for name in TECHNIQUES if name in SIZES])
def test_every_technique_that_runs_in_a_lab_has_a_step_that_its_eager_arm_takes(name):
    options = {"name": "pico-gqa", **OPENED.get(name, {})}
    with cglab.open(**options, device="cpu", max_batch=2, max_context=48) as lab:
        with fixed_step(lab.engine, name, {}, lab.sizes) as step:
            lab.phases.arm(name, "eager").run(step.live, **step.inputs)
        assert step.rows >= 1 and set(SIZES[name]) <= set(step.workload)


def test_a_technique_without_a_step_is_one_that_no_lab_of_one_process_has():
    assert [name for name in TECHNIQUES if name not in SIZES] == ["pp_prefill"]
    assert unavailable("pp_prefill", None) is not None


def test_outputs_of_one_number_a_row_are_compared_as_those_of_many_are():
    numbers, tokens = torch.rand(3), torch.arange(3)
    assert compare_outputs([tokens, numbers], [tokens, numbers.clone()]).verdict is Verdict.BITWISE
    other = numbers.clone()
    other[2] += 1
    assert compare_outputs([tokens, numbers], [tokens, other]).verdict is Verdict.CORRUPTED
    with pytest.raises(InputError, match="one shape"):
        compare_outputs([numbers], [numbers[:2]])
