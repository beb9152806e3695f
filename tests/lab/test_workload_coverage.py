"""Coverage of a whole workload: what ran captured, what eager steps cost, and what to capture next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.errors import ClosedError, ToggleError
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.lab.step_times import Group, Spent, StepTimes
from cglab.lab.workload_coverage import ADVICE, predicted_gain, workload_coverage

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class FakeRunner:
    """Counts as a runner does, and computes nothing."""

    technique = "decode"

    def __init__(self):
        self.counts = Coverage()
        self.tried = 0

    def tries(self):
        return self.tried

    def coverage(self):
        return self.counts


class FakeRegion:
    """A forward of known length that ends when it is told to, or is waited for."""

    def __init__(self, seconds, *, done=True):
        self.length, self.done = seconds, done

    @property
    def seconds(self):
        self.done = True
        return self.length


@pytest.fixture
def runners():
    return {"full": FakeRunner(), "eager": FakeRunner()}


@pytest.fixture
def times(runners):
    return StepTimes(lambda phase: runners if phase == "decode" else {})


def summed(times, facts=None):
    return workload_coverage("pico", "cuda", times.groups(), times.parts(), facts or {})


def test_a_forward_is_the_latest_runners_and_the_first_of_each_is_counted_and_not_timed(runners, times):
    for _ in range(3):
        runners["full"].counts.hit("4", 4, 3)
        times.note("decode", FakeRegion(0.5))
    runners["eager"].counts.miss(Miss(Reason.BACKEND_EAGER), 3)  # a comparison's, in no forward
    runners["full"].counts.hit("4", 4, 3)
    times.note("decode", FakeRegion(0.5))
    assert times.groups() == {Group("decode", "full", "4", 4, 3): Spent(4, 3, 1.5)}


def test_a_step_that_captured_a_bucket_is_not_timed(runners, times):
    full = runners["full"]
    for full.tried in (0, 1, 1, 2, 2):
        full.counts.hit("4", 4, 4)
        times.note("decode", FakeRegion(1.0))
    (spent,) = times.groups().values()
    assert (spent.steps, spent.timed) == (5, 2)


def test_forwards_of_runners_that_are_elsewhere_are_none_of_the_labs(times):
    times.note("stage", FakeRegion(1.0))
    assert times.groups() == {} and str(summed(times)).startswith("0 steps")


def test_nothing_is_waited_for_before_somebody_asks(runners, times):
    regions = [FakeRegion(1.0, done=False) for _ in range(4)]
    for region in regions:
        runners["full"].counts.hit("4", 4, 4)
        times.note("decode", region)
    assert not any(region.done for region in regions)
    (spent,) = times.groups().values()
    assert spent.seconds == 3.0 and all(region.done for region in regions[1:])


REASONS = ("ABOVE_LARGEST", "BACKEND_EAGER", "EMPTY_BATCH")


@given(
    st.dictionaries(
        st.builds(
            lambda label, size, live: Group("decode", "full", label if not size else str(size), size, live),
            st.sampled_from(REASONS), st.sampled_from([0, 2, 4]), st.integers(1, 8),
        ),
        st.integers(1, 9).flatmap(
            lambda steps: st.builds(Spent, st.just(steps), st.integers(0, steps), st.floats(0.1, 9.0))
        ),
    )
)  # fmt: skip
def test_shares_and_costs_add_up_to_all_steps_and_all_time(groups):
    found = workload_coverage("pico", "cuda", groups, {}, {})
    steps = sum(spent.steps for spent in groups.values())
    assert sum(each.steps for each in found.techniques) == steps
    assert sum(each.captured for each in found.techniques) + sum(each.steps for each in found.costs) == steps
    for each in found.techniques:
        eager = sum(cost.seconds or 0.0 for cost in found.costs)
        if each.seconds is None:
            assert each.time_share is None and all(cost.seconds is None for cost in found.costs)
        else:
            assert each.seconds * (1 - each.time_share) == pytest.approx(eager, abs=1e-9)
    known = [cost.seconds for cost in found.costs if cost.seconds is not None]
    assert known == sorted(known, reverse=True)
    assert [cost.seconds is None for cost in found.costs] == sorted(
        cost.seconds is None for cost in found.costs
    )


EAGER = Group("decode", "eager", "BACKEND_EAGER", 0, 3)


def test_the_gain_is_predicted_from_the_captured_step_of_the_nearest_larger_bucket():
    groups = {
        EAGER: Spent(6, 5, 5.0),
        Group("decode", "full", "2", 2, 2): Spent(9, 9, 0.9),  # too small for 3 rows
        Group("decode", "full", "4", 4, 4): Spent(2, 2, 0.8),
        Group("decode", "full", "8", 8, 5): Spent(2, 2, 1.6),
        Group("prefill", "full", "4", 4, 4): Spent(2, 2, 0.0),  # another technique's
    }
    assert predicted_gain("decode", "BACKEND_EAGER", groups) == (pytest.approx(5.0 - 5 * 0.4), 5)


@pytest.mark.parametrize(
    "captured",
    [
        {},
        {Group("decode", "full", "2", 2, 2): Spent(9, 9, 0.9)},
        {Group("decode", "full", "4", 4, 4): Spent(1)},
        {Group("decode", "full, fused", "4", 4, 4): Spent(2, 2, 0.8)},
        {Group("decode", mode, "4", 4, 4): Spent(2, 2, 0.8) for mode in ("full", "breakable")},
    ],
    ids=["none", "smaller", "untimed", "with more in it", "of two modes"],
)
def test_without_a_captured_step_that_was_timed_the_gain_is_not_measured(captured):
    found = workload_coverage("pico", "cuda", {EAGER: Spent(6, 5, 5.0), **captured}, {}, {})
    (cost,) = found.costs
    assert cost.predicted_gain is None and found.next_capture is cost
    assert "predicted gain: not measured" in str(found)


def test_next_is_what_gains_most_and_never_what_would_lose_or_what_nothing_would_capture():
    groups = {
        Group("decode", "full", "ABOVE_LARGEST", 0, 4): Spent(2, 2, 9.0),
        Group("verify", "eager", "BACKEND_EAGER", 0, 4): Spent(2, 2, 2.0),
        Group("prefill", "full", "SHORT_DENSE", 0, 4): Spent(2, 2, 50.0),
        Group("decode", "full", "8", 8, 8): Spent(2, 2, 10.0),
        Group("verify", "full", "8", 8, 8): Spent(2, 2, 0.5),
        Group("prefill", "full", "8", 8, 8): Spent(2, 2, 0.5),
    }
    found = workload_coverage("pico", "cuda", groups, {}, {"verify/BACKEND_EAGER": "mode eager"})
    assert [each.technique for each in found.costs] == ["prefill", "decode", "verify"]
    assert found.costs[1].predicted_gain == pytest.approx(-1.0) and found.costs[0].advice is None
    assert found.next_capture == found.costs[2]
    assert str(found.next_capture).endswith("predicted gain: 1500 ms of 2 steps")
    assert found.as_frame()["technique"].tolist() == ["decode", "verify", "prefill"]
    assert found.reasons_frame()["facts"].tolist() == ["", "", "mode eager"]


def test_advice_is_for_reasons_that_there_are():
    assert set(ADVICE) <= {reason.name for reason in Reason}


def test_html_is_escaped():
    found = workload_coverage(
        "<b>", "tape", {EAGER: Spent(1)}, {}, {"decode/BACKEND_EAGER": "<script>x</script>"}
    )
    page = found._repr_html_()
    assert (
        "<script>" not in page and "&lt;script&gt;x&lt;/script&gt;" in page and "no graph speed-ups" in page
    )


@DEVICES
def test_a_lab_sums_up_what_its_engine_ran_and_no_comparison(device):
    with cglab.open("pico-gqa", device=device, buckets=(1, 2), max_batch=3, max_context=64) as lab:
        assert lab.coverage().techniques == () and lab.coverage().next_capture is None
        lab.generate([[5, 6, 7]] * 2, 4, stop_at_end=False)
        lab.compare("decode", batch=1, context=8, repeats=1)
        found = lab.coverage()
        decode, prefill = found.techniques
        assert (decode.technique, decode.captured, decode.steps, decode.time_share) == ("decode", 3, 3, 1.0)
        assert (prefill.technique, prefill.captured, prefill.steps) == ("prefill", 2, 2), (
            "and the comparison's prompt"
        )
        assert not found.costs
        lab.captures.decode = "eager"
        lab.generate([[5, 6, 7]] * 3, 4, stop_at_end=False)
        found, (cost,) = lab.coverage(), lab.coverage().costs
        assert (cost.technique, cost.reason, cost.steps) == ("decode", "BACKEND_EAGER", 3)
        assert cost.seconds > 0 and cost.predicted_gain is None, "no bucket of 3 was timed"
        assert found.as_dict()["next"]["advice"].startswith("capture it")
        assert bool(found.note) == (device == "cpu"), "times of the tape are no graph's"
        assert set(lab.coverage("decode")) == {"full", "eager"}, "by mode, comparisons included, as ever"
        with pytest.raises(ToggleError, match="good names"):
            lab.coverage("decod")
    with pytest.raises(ClosedError):
        lab.coverage()


@DEVICES
def test_techniques_within_another_step_are_counted_and_their_time_is_not_apart(device):
    sizes = {"buckets": (1,), "max_batch": 1, "max_context": 64, "bucket_floor": 1}
    with cglab.open("dsa-tiny", device=device, **sizes) as lab:
        lab.generate([[5, 6, 7] * 8], 2, stop_at_end=False)
        lab.captures.dsa_attention = "eager"
        lab.generate([[8, 6, 7] * 8], 2, stop_at_end=False)
        shares = {each.technique: each for each in lab.coverage().techniques}
        costs = {each.technique: each for each in lab.coverage().costs}
    assert (shares["prefill"].captured, shares["prefill"].steps) == (2, 2)
    assert (shares["dsa_attention"].captured, shares["dsa_attention"].steps) == (1, 2)
    assert shares["dsa_attention"].time_share is None and costs["dsa_attention"].seconds is None
    assert costs["dsa_attention"].reason == "BACKEND_EAGER" and costs["dsa_attention"].steps == 1
