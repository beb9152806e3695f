"""Interleaved A/B: order, verdicts, confirmation, and arms that fail."""

import json
import subprocess
import sys

import pytest

from cglab.errors import InputError
from cglab.measure.ab import interleave, schedule
from cglab.measure.statistics import false_positive_rate


class Machine:
    """Arms on a machine that gets slower with every call."""

    def __init__(self, drift=0.0):
        self.calls = []
        self.drift = drift

    def arm(self, name, seconds):
        def run():
            self.calls.append(name)
            return seconds * (1 + self.drift * len(self.calls)) * (1 + 0.001 * (len(self.calls) % 3))

        return run


def test_order_is_balanced():
    assert "".join(name for _, name in schedule(("A", "B"), 0, 3)) == "ABBAAB"
    assert "".join(name for _, name in schedule(("A", "B", "C"), 0, 4)) == "ABCCBAABCCBA"
    machine = Machine()
    result = interleave(
        {"A": machine.arm("A", 1.0), "B": machine.arm("B", 1.0)}, instances=3, repeats=2, warmup=1
    )
    assert "".join(machine.calls) == "AAABBBBBBAAAAAABBB"
    assert result.order == ((0, "A"), (0, "B"), (1, "B"), (1, "A"), (2, "A"), (2, "B"))


def test_warm_up_calls_are_no_samples():
    def first_slow():
        first_slow.calls += 1
        return 9.0 if first_slow.calls % 5 in (1, 2) else 1.0

    first_slow.calls = 0
    result = interleave({"A": lambda: 1.0, "B": first_slow}, repeats=3, warmup=2)
    assert result["B"].instances == ((1.0,) * 3,) * 3
    assert result["B"].verdict == "no difference"


def test_equal_arms_on_a_drifting_machine_show_no_difference():
    machine = Machine(drift=0.0005)
    arms = {"A": machine.arm("A", 1.0), "B": machine.arm("B", 1.0)}
    result = interleave(arms, instances=4, repeats=20, warmup=0)
    assert result["B"].verdict == "no difference"
    assert result["B"].ratio == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("seconds", "verdict"), [(0.5, "faster"), (1.5, "slower"), (1.01, "no difference")])
def test_verdicts_against_the_first_arm(seconds, verdict):
    machine = Machine()
    result = interleave({"eager": machine.arm("e", 1.0), "full": machine.arm("f", seconds)}, repeats=5)
    assert result["full"].verdict == verdict
    assert result["full"].ratio == pytest.approx(seconds, rel=0.01)
    assert result["full"].interval.low <= result["full"].median <= result["full"].interval.high
    assert result["eager"].verdict is None
    assert result["eager"].ratio is None


def test_a_flagged_difference_is_measured_again_with_more_instances():
    machine = Machine()
    result = interleave({"A": machine.arm("A", 1.0), "B": machine.arm("B", 0.5)}, repeats=2, confirm=5)
    assert len(result["A"].instances) == len(result["B"].instances) == result.instances == 5
    assert result.false_positive_rate == false_positive_rate(5) < 0.01
    quiet = interleave({"A": lambda: 1.0, "B": lambda: 1.0}, repeats=2, confirm=5)
    assert quiet.instances == 3
    assert quiet.false_positive_rate == false_positive_rate(3)


def test_a_difference_that_more_instances_do_not_show_is_none():
    def lucky():
        lucky.calls += 1
        return 0.9 if lucky.calls <= 6 else 1.0

    lucky.calls = 0
    result = interleave({"A": lambda: 1.0, "B": lucky}, repeats=2, warmup=0, confirm=5)
    assert result["B"].verdict == "no difference"


def test_an_arm_that_fails_keeps_its_error_and_the_others_their_samples():
    def fails_late():
        fails_late.calls += 1
        if fails_late.calls == 6:
            raise RuntimeError("out of memory")
        return 2.0

    fails_late.calls = 0
    arms = {"A": lambda: 1.0, "broken": fails_late, "C": lambda: 0.5}
    result = interleave(arms, repeats=4, warmup=0)
    assert result.failed == {"broken": "RuntimeError: out of memory"}
    assert result["broken"].instances == ((2.0,) * 4, (2.0,))
    assert result["broken"].verdict == "undecided"
    assert len(result["A"].instances) == len(result["C"].instances) == 5
    assert result["C"].verdict == "faster"
    assert "out of memory" in str(result)


def test_a_base_that_fails_leaves_the_others_undecided():
    def broken():
        raise ValueError("no graph")

    result = interleave({"A": broken, "B": lambda: 1.0}, repeats=2)
    assert result["A"].median is None
    assert result["B"].verdict == "undecided"
    assert result["B"].ratio is None
    assert len(result["B"].instances) == 3


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, None, "1"])
def test_an_arm_that_returns_no_time_fails(value):
    result = interleave({"A": lambda: 1.0, "B": lambda: value}, repeats=2)
    assert "positive number" in result["B"].error


def test_wrong_arguments_are_refused():
    arms = {"A": lambda: 1.0, "B": lambda: 1.0}
    for wrong in ({"instances": 2}, {"repeats": 0}, {"warmup": -1}):
        with pytest.raises(InputError, match="at least"):
            interleave(arms, **wrong)
    with pytest.raises(InputError, match="two arms"):
        interleave({"A": lambda: 1.0})
    with pytest.raises(InputError, match="the arms are A, B"):
        _ = interleave(arms)["C"]


def test_plain_values_frame_and_text():
    seen = []
    result = interleave(
        {"A": lambda: 1e-3, "B": lambda: 5e-4},
        repeats=2,
        progress=lambda name, instance: seen.append((name, instance)),
    )
    assert tuple(reversed([turn[::-1] for turn in seen])) == tuple(reversed(result.order))
    plain = json.loads(json.dumps(result.as_dict()))
    assert plain["arms"][1]["verdict"] == "faster"
    frame = result.as_frame()
    assert list(frame["arm"]) == ["A", "B"]
    assert frame["median_ms"][1] == pytest.approx(0.5)
    assert "x0.500 of A: faster" in str(result)
    assert "errs in" in str(result)


def test_import_loads_no_frame_library(environment):
    modules = "ab statistics parity trace trace_file profiling prediction memory records claims published"
    code = f"import sys\nfor name in {modules.split()}: __import__('cglab.measure.' + name)\n"
    code += (
        "print([name for name in ('pandas', 'plotly', 'transformers', 'ipywidgets') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
