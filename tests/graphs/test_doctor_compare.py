"""Two runs compared: what was planted between them is told, where it was planted, and nothing else."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import Place
from cglab.graphs.doctor_compare import baked, differences
from cglab.graphs.doctor_watch import Run, Step

OPERATIONS = ("aten.add.Tensor", "aten.mul.Tensor", "aten.relu.default")


def place(line):
    return Place("model.py", line, "step", f"line {line}")


@st.composite
def runs(draw):
    """Operations of a run with loops: lines come again, operations too."""
    lines = draw(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 6)), min_size=1, max_size=30))
    return [Step(name, place(line), ("float32[2, 3]", "2"), (64 * line,)) for name, line in lines]


@given(runs())
def test_a_run_does_not_differ_from_itself(steps):
    assert differences(steps, list(steps)) == []


@given(runs(), st.data())
def test_operations_of_one_run_alone_are_one_branch_told_by_the_first(steps, data):
    at = data.draw(st.integers(0, len(steps)))
    extra = [replace(steps[0], place=place(90 + i)) for i in range(data.draw(st.integers(1, 3)))]
    longer = [*steps[:at], *extra, *steps[at:]]
    for before, after in ((steps, longer), (longer, steps)):
        (found,) = differences(before, after)
        assert (found.kind, found.at, found.step.place.line) == ("BakedBranch", at, 90)


@given(runs(), st.data())
def test_another_number_is_told_at_its_operation_and_shapes_that_follow_are_not(steps, data):
    at = data.draw(st.integers(0, len(steps) - 1))
    after = [replace(step, values=("float32[9, 3]", "2")) if i > at else step for i, step in enumerate(steps)]
    after[at] = replace(steps[at], values=("float32[2, 3]", "3"))
    (found,) = differences(steps, after)
    assert (found.kind, found.at) == ("BakedValue", at)
    assert "2 in one call and 3 in another" in found.fact


@given(runs(), st.data())
def test_of_shapes_alone_the_first_is_told(steps, data):
    at = data.draw(st.integers(0, len(steps) - 1))
    after = [
        replace(step, values=("float32[9, 3]", "2")) if i >= at else step for i, step in enumerate(steps)
    ]
    (found,) = differences(steps, after)
    assert (found.kind, found.at) == ("BakedValue", at)


def told(first, second, third, **options):
    given_runs = [Run(steps=steps, until=until) for steps, until in (first, second, third)]
    return [(each.kind, each.place.line) for each in baked(*given_runs, **{"varied": True, **options})]


@given(runs(), st.data())
def test_three_runs_tell_a_first_call_from_every_call_and_from_other_values(steps, data):
    at = data.draw(st.integers(0, len(steps)))
    plain = (steps, None)
    extra = ([*steps[:at], replace(steps[0], place=place(90)), *steps[at:]], None)
    assert told(plain, plain, plain) == []
    assert told(extra, plain, plain) == told(plain, extra, extra) == [("LazyInitialisation", 90)]
    assert told(plain, plain, extra) == [("BakedBranch", 90)]
    assert told(extra, plain, extra) == [("BakedBranch", 90)]
    assert told(plain, plain, extra, varied=False) == []


@given(runs(), st.data())
def test_what_comes_after_a_host_read_is_no_finding_of_its_own(steps, data):
    at = data.draw(st.integers(0, len(steps) - 1))
    until = data.draw(st.integers(0, len(steps)))
    changed = [*steps[:at], replace(steps[at], values=("float32[2, 3]", "3")), *steps[at + 1 :]]
    found = told((steps, until), (steps, until), (changed, until))
    assert found == ([("BakedValue", steps[at].place.line)] if at < until else [])


@given(runs(), st.data())
def test_b22_memory_that_moves_with_every_call_is_told_and_what_the_first_call_made_is_not(steps, data):
    at = data.draw(st.integers(0, len(steps) - 1))
    moved = [*steps[:at], replace(steps[at], outside=(7,)), *steps[at + 1 :]]
    line = steps[at].place.line
    assert told((steps, None), (steps, None), (moved, None)) == [("MovedInput", line)]
    assert told((moved, None), (steps, None), (steps, None)) == []
