"""Whole requests, in every mode of both phases: captured, padded eager, alone, poisoned (issue: 64 at concurrency 8)."""

from dataclasses import replace

import pytest
import torch

from cglab.engine.load import Load
from cglab.graphs.slots import Slot
from cglab.lab.request_cases import LOAD, PAGE_SIZE, check_requests
from cglab.runners.decode import DecodeRunner

pytestmark = pytest.mark.end_to_end

CPU = torch.device("cpu")
FEW = replace(LOAD, count=12)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_reuse", [True, False], ids=["reuse", "no-reuse"])
def test_64_requests_in_nine_modes_hold_against_three_oracles(prefix_reuse):
    # Without reuse a prefix of one page is enough to be shared wrongly.
    load = LOAD if prefix_reuse else replace(LOAD, shared_prefix=PAGE_SIZE)
    found = list(check_requests(CPU, prefix_reuse=prefix_reuse, load=load))
    assert len(found) == 9 and all(each.ok for each in found), "\n".join(map(str, found))
    assert all(each.preemptions > 0 and each.cases == 64 for each in found)
    assert len({each.steps for each in found}) == 1, "one schedule, whatever the mode"


def test_riders_of_mixed_batches_too():
    (found,) = check_requests(CPU, modes=[("full", "breakable")], load=FEW, mixed=True)
    assert found.ok, str(found)


def test_requests_that_are_drawn_at_a_temperature_too():
    """A draw depends on seed, position and logits: batch, preemption and capture change none of them."""
    load = Load(count=12, concurrency=4, prompt_tokens=(4, 24), new_tokens=(2, 12), temperature=0.8)
    (found,) = check_requests(CPU, modes=[("full", "breakable")], load=load)
    assert found.ok and not found.ties, str(found)


def test_bitwise_in_low_precision():
    (found,) = check_requests(CPU, modes=[("breakable", "full")], load=FEW, dtype=torch.bfloat16)
    assert found.ok, str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_requests_of_latent_attention_too(dtype):
    """Decode in both kinds of recording; prefill with breaks, and without any over a fixed extent (T9b)."""
    modes = [("full", "breakable"), ("breakable", "full")]
    found = list(check_requests(CPU, modes=modes, load=replace(FEW, count=8), dtype=dtype, model="dsa-tiny"))
    assert len(found) == 2 and all(each.ok and each.captured for each in found), "\n".join(map(str, found))
    assert {each.model for each in found} == {"dsa-tiny"}


def test_a_missing_guard_is_noticed(monkeypatch):
    """Padded rows that write to a live slot: the request whose slot it is has another logit sooner or later."""
    slots = DecodeRunner.slots

    def live_slot(self):
        found = slots(self)
        return {**found, "out_slots": Slot(shape=(-1,), dtype=torch.int64, pad=self.kv.page_size)}

    monkeypatch.setattr(DecodeRunner, "slots", live_slot)
    (found,) = check_requests(CPU, modes=[("full", "eager")], load=FEW)
    assert not found.ok and 2 in {each["oracle"] for each in found.mismatches}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype):
    found = list(check_requests(torch.device("cuda", 0), load=FEW, dtype=dtype))
    assert all(each.ok for each in found), "\n".join(map(str, found))
