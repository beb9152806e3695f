"""Parity of the whole matrix: its plan, and verdicts with planted rounding and planted corruption."""

from math import inf, isfinite, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import ToggleError
from cglab.lab import parity_matrix
from cglab.lab.deviations import Deviation, arm_verdict, furthest
from cglab.lab.parity_matrix import RECORDERS, ParityMatrix, plan_matrix, run_matrix
from cglab.lab.techniques import TECHNIQUES
from cglab.measure.drift import Drift
from cglab.measure.parity import Verdict
from cglab.models.ops import OPS

CPU = torch.device("cpu")
HERE = {"mode": "full", "padding": True, "case": 2, "step": 1}


def checked(cases=4, device=CPU, **options):
    planned, not_run = plan_matrix(device, ["decode"])
    planned = [part for part in planned if part.device == device]
    return run_matrix(planned, not_run, cases=cases, **options)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_part_of_the_matrix_is_planned_or_has_a_reason(device):
    planned, not_run = plan_matrix(torch.device(device))
    parts = [(each.technique, each.recorder, each.ops) for each in planned]
    for each in not_run:
        assert each.why
        parts += [
            (each.technique, each.recorder, form) for form in (OPS if each.ops == "any" else [each.ops])
        ]
    assert sorted(parts) == sorted(
        (name, where, form) for name in TECHNIQUES for where in RECORDERS for form in OPS
    )
    assert {each.recorder for each in planned} == set(RECORDERS[: 1 + (device == "cuda")])


def test_without_a_device_the_plan_says_whether_there_is_none_or_it_was_not_asked_for(monkeypatch):
    for present, told in ((False, "no CUDA device"), (True, "CGLAB_DEVICE")):
        monkeypatch.setattr(parity_matrix.torch.cuda, "is_available", lambda present=present: present)
        _, not_run = plan_matrix(CPU, ["decode"])
        assert [told in each.why for each in not_run if each.recorder == "cuda"] == [True]


def test_what_is_right_is_bitwise_in_every_arm_and_what_the_cases_do_not_reach_is_told():
    found = checked(cases=3)
    assert found.ok and found.worst is Verdict.BITWISE
    assert [(row.backend, row.padding) for row in found.rows] == [
        ("full", True), ("full", False), ("breakable", True)
    ]  # fmt: skip
    assert all(row.drift == row.bound == 0 and not row.detail and row.captured for row in found.rows)
    assert "3 cases replayed no step of 1 of 4 arms" in found.not_run[-1].why
    assert "breakable exact" in found.not_run[-1].why
    assert found.as_frame()["verdict"].tolist() == ["bitwise"] * 3


@pytest.mark.gpu
def test_on_a_gpu_both_recorders_are_planned_and_every_form_of_its_own_is_bitwise():
    device = torch.device("cuda", torch.cuda.current_device())
    assert {part.recorder for part in plan_matrix(device)[0]} == set(RECORDERS)
    found = checked(device=device)
    assert found.ok and found.worst is Verdict.BITWISE and {row.ops for row in found.rows} == set(OPS)


def test_b45_planted_rounding_is_drift_of_a_known_size_and_holds():
    found = checked(cases=2, plant="rounding")
    assert found.ok and {row.verdict for row in found.rows} == {Verdict.DRIFT}
    for row in found.rows:
        assert 0 < row.drift < row.bound < 1e-3 and "logits differ in bits, by" in row.detail
        assert "row" in row.detail and "padded eager" in row.detail


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        ("stale-tail", "poisoned padding"),
        ("live-slot-in-padding", "slot"),
        ("untrimmed-output", "rows came out"),
    ],
)
def test_b45_planted_corruption_is_corrupted_with_row_or_slot_where_there_is_padding_alone(plant, told):
    found = checked(cases=2, plant=plant)
    assert not found.ok and found.worst is Verdict.CORRUPTED
    by_padding = {row.padding: row.verdict for row in found.rows}
    assert by_padding == {True: Verdict.CORRUPTED, False: Verdict.BITWISE}
    assert any(told in row.detail for row in found.rows)


def test_nothing_shown_does_not_hold():
    planned, _ = plan_matrix(CPU, ["decode"])
    unshown = ParityMatrix((), (), tuple(planned))
    assert not unshown.ok and unshown.worst is None
    with pytest.raises(ToggleError, match="at least 1"):
        checked(cases=0)


@pytest.fixture
def drift():
    """Rounding of logits of 0.25 between two correct ways, so that 1.0 is still one."""
    made = Drift()
    made.allow("logits", torch.tensor([1.0]), torch.tensor([1.25]))
    return made


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Deviation(1, HERE | {"row": 3}, "logits", "logits", 1.0), Verdict.DRIFT),
        (Deviation(1, HERE | {"row": 3}, "logits", "logits", 1.1), Verdict.CORRUPTED),
        (Deviation(1, HERE, "logits", "logits", nan), Verdict.CORRUPTED),
        (Deviation(1, HERE, "no number at all"), Verdict.CORRUPTED),
        (Deviation(2, HERE, "beyond its own bound", "logits", 0.5), Verdict.CORRUPTED),
        (Deviation(3, HERE, "padding that is read", "logits", 1e-9), Verdict.CORRUPTED),
        (Deviation(2, {}, "of all arms"), Verdict.CORRUPTED),
        (Deviation(1, HERE | {"padding": False}, "of another arm"), Verdict.BITWISE),
    ],
)
def test_only_rounding_of_the_same_padded_work_is_drift(drift, found, verdict):
    assert arm_verdict([found], drift, "full", padding=True).verdict is verdict


def test_the_verdict_tells_the_first_corruption_and_the_first_slot(drift):
    deviations = [
        Deviation(1, HERE | {"row": 1}, "logits", "logits", 0.5),
        Deviation(3, HERE | {"row": 2}, "logits", "logits", 9.0),
        Deviation(3, HERE | {"slot": 17}, "kv.keys", "kv", 4.0),
    ]
    told = arm_verdict(deviations, drift, "full", padding=True)
    assert (told.drift, told.bound) == (9.0, 1.0)
    assert told.detail == (
        "case 2, step 1, row 2: logits (oracle 3, poisoned padding); "
        "case 2, step 1, slot 17: kv.keys (oracle 3, poisoned padding)"
    )


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)), data=st.data(),
    off=st.sampled_from([1e-3, 7.0, inf, nan]), slots=st.booleans(),
)  # fmt: skip
def test_the_row_or_slot_that_is_off_is_found(shape, data, off, slots):
    place = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    want = torch.zeros(shape)
    got = want.clone()
    got[place] = off
    far, where = furthest(got, want, first_slot=16 if slots else None)
    assert where == ({"slot": 16 + place[1]} if slots else {"row": place[0]})
    assert far == pytest.approx(off) if isfinite(off) else far == inf


def test_results_of_another_shape_and_the_same_values_have_no_place():
    assert furthest(torch.zeros(2), torch.zeros(3)) == (inf, {})
    assert furthest(torch.tensor([1.0, inf]), torch.tensor([1.0, inf])) == (0.0, {})
