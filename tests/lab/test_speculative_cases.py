"""Whole requests drafted and verified: as plain decoding has them, and captured as eager, in every form."""

from itertools import combinations, product

import pytest
import torch

from cglab.engine.acceptance import AcceptLengths
from cglab.engine.speculator import Speculator
from cglab.errors import InputError
from cglab.lab.benches import BENCHES
from cglab.lab.parity_benches import speculation
from cglab.lab.speculative_cases import FORMS, Form, check_speculation
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.seed_step import SeedRunner
from cglab.runners.verify import VerifyRunner

CPU = torch.device("cpu")
PAIRWISE = (
    Form("eager", "eager", "full", 1, True),
    Form("graph", "full", "full", 1, True),
    Form("fused", "full", "eager", 1, True),
    Form("eager", "full", "eager", 1, False),
    Form("fused", "eager", "full", 1, False),
    Form("eager", "full", "full", 3, True),
    Form("fused", "eager", "eager", 3, True),
    Form("graph", "eager", "eager", 3, False),
    Form("graph", "full", "full", 3, False),
    Form("fused", "full", "full", 3, False),
    Form("eager", "eager", "eager", 1, True, True),
    Form("eager", "full", "full", 1, True, True),
    Form("graph", "full", "eager", 1, False, True),
    Form("graph", "eager", "full", 1, False, True),
    Form("graph", "full", "full", 1, True, True),
    Form("eager", "eager", "full", 1, False, True),
)
BLOCK = PAIRWISE[14]
FEW = {"prompts": 4, "new_tokens": 10}


@pytest.mark.parametrize(("block", "count"), [(False, 48), (True, 16)])
def test_every_pair_of_settings_is_among_the_few(block, count):
    forms, few = ([form for form in each if form.block == block] for each in (FORMS, PAIRWISE))
    values = [sorted({form[place] for form in forms}, key=str) for place in range(5)]
    for one, other in combinations(range(5), 2):
        covered = {(form[one], form[other]) for form in few}
        assert covered == set(product(values[one], values[other])), (Form._fields[one], Form._fields[other])
    assert len(forms) == len(set(forms)) == count


def test_b44_b47_b71_p41_p43_drafting_gives_the_tokens_of_plain_decoding_and_captures_are_bitwise():
    for form, found, accepted in check_speculation(CPU, forms=PAIRWISE, **FEW):
        assert found.ok and found.compared_tokens == 4 * 10, str(found)
        assert form.block or accepted.tokens_per_pass > 1.5, form
        if form[:3] == ("graph", "full", "full"):
            assert found.captured == found.steps > 0


def test_captures_are_bitwise_in_low_precision_too():
    forms = (Form("graph", "full", "full"), Form("fused", "full", "full", 3), BLOCK)
    for _, found, _ in check_speculation(CPU, forms=forms, dtype=torch.bfloat16, prompts=5, new_tokens=8):
        assert found.ok and found.captured == found.steps, str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captures_are_bitwise_on_a_gpu(dtype):
    forms = (Form("graph", "full", "full"), Form("fused", "full", "full", 3), BLOCK)
    checked = check_speculation(torch.device("cuda"), forms=forms, dtype=dtype, prompts=12, new_tokens=40)
    for _, found, _ in checked:
        assert found.ok and found.captured == found.steps, str(found)


@pytest.mark.parametrize(("prompts", "new_tokens"), [(0, 9), (25, 9), (-1, 9), (3, 1), (3, 0)])
def test_a_batch_that_never_drafts_or_fits_no_bucket_is_told_before_a_model_is_loaded(
    monkeypatch, prompts, new_tokens
):
    monkeypatch.setattr("cglab.lab.speculative_cases.load_model", None)
    with pytest.raises(InputError, match="give 1 to 24 prompts, the largest bucket, and 2 tokens"):
        next(check_speculation(CPU, prompts=prompts, new_tokens=new_tokens))


def found_by(oracle, form=FORMS[-1]):
    ((_, found, _),) = check_speculation(CPU, forms=[form], prompts=3, new_tokens=8)
    assert not found.ok
    return oracle in {each["oracle"] for each in found.mismatches}


def test_a_draft_that_is_accepted_though_the_target_says_otherwise_is_caught(monkeypatch):
    monkeypatch.setattr(Speculator, "_accept", lambda self, request, deepest, *_: [0, 1])
    assert found_by(2, Form("eager", "eager", "eager"))


@pytest.mark.parametrize("runner", [SeedRunner, DraftLoopRunner, VerifyRunner])
def test_a_captured_step_that_is_not_the_eager_one_is_caught(monkeypatch, runner):
    eager = runner.run_padded_eager

    def other(self, live, size, **values):
        output = eager(self, live, size, **values)
        return type(output)(
            *(each.clone().add_(1) if index == 2 else each for index, each in enumerate(output))
        )

    monkeypatch.setattr(runner, "run_padded_eager", other)
    assert found_by(1, Form("graph", "full", "full"))


def test_accept_lengths_that_differ_are_caught(monkeypatch):
    told = AcceptLengths.as_dict
    asked = iter(range(10))
    monkeypatch.setattr(AcceptLengths, "as_dict", lambda self: told(self) | {"passes": next(asked)})
    assert found_by(1, Form("eager", "eager", "eager"))


def test_the_bench_records_every_form_with_its_accept_length():
    records = list(BENCHES["speculation"].run(CPU, quick=True, dtypes=[torch.float32]))
    assert all(record.metrics["ok"] for record in records)
    assert all(record.metrics["tokens_per_pass"] > 1.5 for record in records if "seed" in record.arm)
    assert {record.arm for record in records} == {
        f"{part}, verify=full"
        for part in ("seed=graph, loop=full", "seed=fused, loop=full", "sampler=graph, draft=full")
    }
    assert sorted(record.workload["topk"] for record in records) == [1, 1, 1, 3, 3]


def test_the_bench_takes_some_of_the_forms_and_refuses_none():
    records = list(speculation(CPU, quick=True, dtypes=(torch.float32,), topk=(3,)))
    assert {(record.workload["topk"], record.workload["padding"]) for record in records} == {(3, True)}
    blocks = list(speculation(CPU, quick=True, dtypes=(torch.float32,), drafts=("block",)))
    assert blocks and all(record.arm.startswith("sampler=") and record.metrics["ok"] for record in blocks)
    with pytest.raises(InputError, match="no form has topk in"):
        next(speculation(CPU, quick=True, topk=(3,), drafts=("block",)))
    for options in ({"topk": (1, 2)}, {"drafts": ("assistant", "blok")}):  # one good value hides no bad one
        with pytest.raises(InputError, match="no form has (2|blok); there are drafts=assistant with topk=1"):
            next(speculation(CPU, quick=True, **options))
