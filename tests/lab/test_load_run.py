"""``lab.load``: one call for latency, coverage by phase, occupancy and tokens that can be compared."""

import pytest

import cglab
from cglab.engine.load import Load
from cglab.errors import ClosedError, InputError
from cglab.lab.comparison import TAPE_NOTE

LOAD = Load(7, 3, (2, 20), (0, 9), shared_prefix=16, seed=3)


@pytest.fixture(scope="module")
def lab():
    with cglab.open(
        "pico-gqa", device="cpu", max_batch=4, max_context=64, buckets=[4], prefill_buckets=[8, 16, 48],
        token_budget=48,
    ) as opened:  # fmt: skip
        yield opened


@pytest.fixture(scope="module")
def runs(lab):
    """Captured on first use, then warm, then eager."""
    first, warm = lab.load(LOAD), lab.load(LOAD)
    lab.captures.prefill = lab.captures.decode = "eager"
    return first, warm, lab.load(LOAD)


def test_every_arm_answers_alike_and_says_how_it_ran(runs):
    first, warm, eager = runs
    assert warm.parity(eager).verdict == first.parity(warm).verdict == "bitwise"
    assert warm.arms == {"prefill": "breakable", "decode": "full"}
    assert warm.coverage["decode"].share == 1.0 and warm.coverage["prefill"].captured > 0
    assert eager.coverage["prefill"].reasons.keys() == {"BACKEND_EAGER"}
    for run in runs:
        steps = {phase: counts.steps for phase, counts in run.coverage.items()}
        kinds = [step.kind for step in run.steps]
        assert steps == {phase: kinds.count(phase) for phase in ("prefill", "decode")}


def test_b55_a_run_that_waited_for_captures_says_so(runs):
    first, warm, eager = runs
    assert first.captured_buckets > 0 and "run it again" in first.note
    assert (warm.captured_buckets, warm.note) == (0, TAPE_NOTE) == (eager.captured_buckets, eager.note)


def test_words_table_and_record_say_the_same(runs):
    warm = runs[1]
    frame = warm.coverage_frame().set_index("phase")
    assert frame.loc["prefill", "steps"] == warm.coverage["prefill"].steps
    assert frame.loc["decode", "occupancy"] == warm.as_dict()["occupancy_by_kind"]["decode"]
    ttft = warm.as_frame().set_index("measure").loc["TTFT", "p50"]
    assert ttft == warm.as_dict()["latency"]["ttft_ms_p50"] and f"{ttft:.4g}" in str(warm)
    assert f"{warm.occupancy:.1f} %" in str(warm) and "prefill=breakable" in str(warm)
    assert 0 < warm.occupancy < 100


def test_a_load_of_first_tokens_needs_no_decode_runner():
    with cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=32, token_budget=16) as lab:
        lab.captures.prefill = "eager"
        run = lab.load(Load(2, 2, 5, 1))
        assert run.coverage.keys() == {"prefill"} == set(run.occupancy_by_kind)
        assert not lab.coverage("decode")


def test_other_requests_are_no_parity_and_a_refused_load_has_no_occupancy(lab, runs):
    other = lab.load(Load(2, 1, 5, 2))
    with pytest.raises(InputError, match="different requests"):
        other.parity(runs[1])
    refused = lab.load(Load(2, 1, 60, 60))
    assert refused.latency.errors == 2 and refused.occupancy is None
    assert "forward occupancy none timed" in str(refused)


def test_a_closed_lab_runs_no_load():
    lab = cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=32)
    lab.close()
    with pytest.raises(ClosedError):
        lab.load(LOAD)
