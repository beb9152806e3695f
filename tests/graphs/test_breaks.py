"""Breaks: what runs live between segments, what is frozen, what is owned."""

import weakref

import pytest
import torch

import cglab
from cglab.errors import BreakRefusedError, CaptureError, OutputStructureError
from cglab.graphs.breaks import Aside, capturing, staged
from cglab.graphs.recorders import recorder_for

X = {"x": cglab.Slot(pad=0.0)}


@cglab.eager_break
def double_into(h, out):
    out.copy_(h * 2)


@cglab.eager_break
def doubled(h):
    return h * 2


def with_break(x):
    h = x + 1
    out = torch.empty_like(h)
    double_into(h, out)
    return out - 3


def breakable(function, device, rows=(4,), slots=X, **options):
    captured = cglab.capture(function, slots=slots, buckets=rows, backend="breakable", strict=True, **options)
    captured.warm(x=torch.ones(rows[-1], 3, device=device))
    return captured


def test_outside_of_a_capture_a_break_is_a_call(device):
    assert torch.equal(with_break(torch.ones(2, device=device)), torch.ones(2, device=device))
    assert torch.equal(doubled.run_eager(torch.ones(2, device=device)), torch.full((2,), 2.0, device=device))
    assert doubled.__name__ == "doubled"


def test_a_break_ends_a_segment_runs_live_and_starts_the_next(device):
    runs = []

    @cglab.eager_break
    def live(h, out):
        runs.append(capturing())
        out.copy_(h * 2)

    def step(x):
        h = x + 1
        out = torch.empty_like(h)
        live(h, out)
        return out - 3

    with breakable(step, device) as captured:
        assert captured.memory()[0]["breaks"] == 1
        assert any(line.startswith("break ") for line in captured.inspect(4))
        runs.clear()
        for scale in (1.0, 4.0):
            x = torch.full((4, 3), scale, device=device)
            assert torch.equal(captured(x=x), (x + 1) * 2 - 3)
        assert runs == [False, False], "once a replay, eager"


def test_two_breaks_side_by_side_make_an_empty_segment(device):
    def step(x):
        h = x + 1
        double_into(h, h)
        double_into(h, h)
        return h + 0

    with breakable(step, device) as captured:
        assert captured.memory()[0]["breaks"] == 2
        x = torch.full((4, 3), 5.0, device=device)
        assert torch.equal(captured(x=x), (x + 1) * 4)


def test_a_break_in_a_full_capture_is_refused_by_name_unless_recorded_inline(device):
    captured = cglab.capture(with_break, slots=X, buckets=(4,), strict=True)
    with pytest.raises(BreakRefusedError, match="'double_into'.*full capture") as caught:
        captured(x=torch.ones(4, 3, device=device))
    assert caught.value.place.code == "double_into(h, out)" and "breakable" in caught.value.advice
    captured.close()
    with cglab.capture(with_break, slots=X, buckets=(4,), strict=True, inline_breaks=True) as captured:
        x = torch.full((4, 3), 5.0, device=device)
        assert torch.equal(captured(x=x), with_break(x)) and captured.memory()[0]["breaks"] == 0


def test_p50_tensors_are_frozen_by_place_and_live_values_are_read_in_the_body(device):
    state = {"scale": 2.0}
    window = torch.ones(4, 3, device=device)

    @cglab.eager_break
    def scaled(h, frozen, out):
        out.copy_(h * state["scale"] + frozen)

    def step(x):
        out = torch.empty_like(x)
        scaled(x * 1, state["scale"] * window, out)
        return out + 0

    with breakable(step, device) as captured:
        x = torch.full((4, 3), 3.0, device=device)
        assert torch.equal(captured(x=x), x * 2 + 2)
        state["scale"] = 10.0
        assert torch.equal(captured(x=x), x * 10 + 2), "the body reads 10, the argument was computed with 2"
        window.fill_(5)
        assert torch.equal(captured(x=x), x * 10 + 10), "in place at the same address: seen"


def test_p51_a_returned_tensor_is_owned_and_copied_into(device):
    made = []

    @cglab.eager_break
    def fresh(h):
        out = h * 2
        made.append(weakref.ref(out))
        return out

    def step(x):
        return fresh(x + 1) + 10

    with breakable(step, device) as captured:
        for scale in (1.0, 2.0, 3.0):
            x = torch.full((4, 3), scale, device=device)
            assert torch.equal(captured(x=x), (x + 1) * 2 + 10), (
                "a new tensor every time, seen by the next segment"
            )
        assert not any(ref() is not None for ref in made), "the recording keeps a copy and none of theirs"


def test_p51_nested_outputs_are_copied_leaf_by_leaf(device):
    @cglab.eager_break
    def many(h):
        return {"a": h + 1, "b": [h * 2, (h * 3, 7)], "none": None}

    def step(x):
        out = many(x * 1)
        return out["a"] + out["b"][0] + out["b"][1][0] * out["b"][1][1]

    with breakable(step, device) as captured:
        for scale in (1.0, 2.0):
            x = torch.full((4, 3), scale, device=device)
            assert torch.equal(captured(x=x), step(x))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (lambda h: (h, h), r"returned (?s:.*) at replay, \* at capture"),
        (lambda h: h[:1], r"returned a \(1, 3\)"),
        (lambda h: h.double(), "torch.float64 tensor at replay"),
        (lambda h: 4, "returned 4 at replay"),
    ],
)
def test_p33_p36_a_break_whose_result_changes_its_kind_is_refused(device, later, message):
    result = [lambda h: h * 2]

    @cglab.eager_break
    def change(h):
        return result[0](h)

    with breakable(lambda x: change(x * 1) + 1, device) as captured:
        result[0] = later
        with pytest.raises(OutputStructureError, match=message):
            captured(x=torch.ones(4, 3, device=device))
        result[0] = lambda h: h * 5
        assert torch.equal(
            captured(x=torch.ones(4, 3, device=device)), torch.full((4, 3), 6.0, device=device)
        )


def test_p36_a_python_value_that_changes_is_told_instead_of_frozen(device):
    step_number = [0]

    @cglab.eager_break
    def count(h):
        return step_number[0]

    with breakable(lambda x: x * 2 + count(x), device) as captured:
        assert torch.equal(
            captured(x=torch.ones(4, 3, device=device)), torch.full((4, 3), 2.0, device=device)
        )
        step_number[0] = 1
        with pytest.raises(OutputStructureError, match="recorded with the first"):
            captured(x=torch.ones(4, 3, device=device))


def test_p52_empty_and_host_tensors_cross_a_break_as_they_are(device):
    host = torch.tensor([3.0])
    seen = []

    @cglab.eager_break
    def odd(h, empty, lengths, numbers):
        seen.append((empty.shape, lengths is not None, numbers))
        h.mul_(lengths.to(h.device))

    def step(x):
        h = x + 1
        odd(h, x[:0], host, [1, "a", None])
        return h + 0

    with breakable(step, device) as captured:
        assert torch.equal(
            captured(x=torch.ones(4, 3, device=device)), torch.full((4, 3), 6.0, device=device)
        )
        host.fill_(5)
        assert torch.equal(
            captured(x=torch.ones(4, 3, device=device)), torch.full((4, 3), 10.0, device=device)
        )
        assert seen[-1] == ((0, 3), True, [1, "a", None])


def test_p53_p54_padded_rows_of_a_break_are_zeroed_and_nothing_runs_for_no_rows(device):
    """What an attention break must do; the runner's own is tested with the model."""
    live, calls = [4], []

    @cglab.eager_break
    def attend(h, out):
        out[live[0] :].zero_()
        if live[0]:
            calls.append(live[0])
            out[: live[0]].copy_(h[: live[0]] * 2)

    def step(x):
        h = x + 1
        out = torch.full_like(h, float("nan"))
        attend(h, out)
        return out + 1, out.sum()

    with breakable(step, device) as captured:
        calls.clear()
        for n in (2, 0, 3):
            live[0] = n
            rows, total = captured(x=torch.ones(4, 3, device=device))
            assert rows[n:].eq(1).all() and rows[:n].eq(5).all() and total == 12 * n
        assert calls == [2, 3]


def test_b23_intermediates_across_a_break_survive_a_smaller_bucket_in_the_same_pool(device):
    """Large first, small into the same pool, then replay the large one: its bridge must not be foreign data."""

    @cglab.eager_break
    def bridge(h):
        return h.cos()

    def step(x):
        a = x + 1
        b = bridge(a)
        c = a * 2  # a crosses the break as an intermediate
        return b + c + a.sum()

    with breakable(step, device, rows=(2, 4, 8), padding=False) as captured:
        generator = torch.Generator().manual_seed(1)
        for n in (8, 2, 8, 4, 2, 8):
            x = torch.randn(n, 3, generator=generator).to(device)
            assert torch.equal(captured(x=x), step(x))


def test_b23_break_arguments_own_no_pool_block():
    """Pool intermediates are frozen as aliases: the block goes back, the bytes stay readable."""
    recorder = recorder_for("cpu")
    pool = recorder.new_pool()
    x = torch.ones(4, 3)
    with recorder.take(pool) as take:
        h = x + 1
        alias = take.alias(h)
        outside = take.alias(x)
        del h
        take.cut()
    assert pool.used_bytes == 0
    assert alias.data_ptr() >= pool._chunks[0].address and torch.equal(alias, torch.full((4, 3), 2.0))
    assert outside.data_ptr() == x.data_ptr() and outside is not x, "a later `.data =` does not move it"


def test_p58_leaving_an_inner_scope_restores_the_outer_one():
    assert not capturing()
    with staged(Aside()):
        assert capturing()
        with staged(None):
            assert not capturing()
            with staged(Aside()):
                assert capturing()
            assert not capturing()
        assert capturing()
        with pytest.raises(CaptureError, match="inside another capture"), staged(Aside()):
            pass
        assert capturing(), "the refused scope left the outer one alone"
        with pytest.raises(ZeroDivisionError), staged(None):
            _ = 1 / 0
        assert capturing()
    assert not capturing()


def test_p58_a_break_that_calls_another_captured_step_is_replayed_inside(device):
    """A break is eager: inside, a captured function with a pool of its own may be replayed, and breaks are calls."""
    inner = cglab.capture(lambda x: x * 3, slots=X, buckets=(4,), clone=True)
    inner(x=torch.ones(4, 3, device=device))

    @cglab.eager_break
    def call(h, out):
        out.copy_(doubled(inner(x=h)))

    def step(x):
        out = torch.empty_like(x)
        call(x + 1, out)
        return out + 1

    with breakable(step, device) as captured:
        for scale in (1.0, 3.0):
            x = torch.full((4, 3), scale, device=device)
            assert torch.equal(captured(x=x), (x + 1) * 6 + 1)
        assert inner.coverage().eager == 0
    inner.close()


def test_breaks_bind_like_methods(device):
    class Layer:
        scale = 3.0

        @cglab.eager_break
        def apply(self, h, out):
            out.copy_(h * self.scale)

    layer = Layer()

    def step(x):
        out = torch.empty_like(x)
        layer.apply(x + 0, out)
        return out + 0

    assert isinstance(Layer.apply, type(doubled))
    with breakable(step, device) as captured:
        layer.scale = 5.0
        assert torch.equal(
            captured(x=torch.ones(4, 3, device=device)), torch.full((4, 3), 5.0, device=device)
        )


@pytest.mark.parametrize("where", ["break", "after it"])
def test_b15_an_exception_in_or_after_a_break_leaves_the_process_usable(device, where):
    armed = [True]

    @cglab.eager_break
    def risky(h):
        if armed[0] and where == "break":
            raise ValueError("in the break")
        h.add_(1)

    def step(x):
        h = x * 2
        risky(h)
        if armed[0] and where == "after it":
            raise ValueError("after it")
        return h + 1

    captured = cglab.capture(step, slots=X, buckets=(4,), backend="breakable", strict=True)
    with pytest.raises(CaptureError, match=where):
        captured(x=torch.ones(4, 3, device=device))
    assert not capturing()
    armed[0] = False
    captured.warm(x=torch.ones(4, 3, device=device))
    assert torch.equal(captured(x=torch.ones(4, 3, device=device)), torch.full((4, 3), 4.0, device=device))
    captured.close()


def test_an_exception_in_a_break_at_replay_frees_the_pool_for_the_next_step(device):
    armed = [False]

    @cglab.eager_break
    def risky(h):
        if armed[0]:
            raise ValueError("at replay")
        h.add_(1)

    def step(x):
        h = x * 2
        risky(h)
        return h + 1

    with breakable(step, device) as captured:
        armed[0] = True
        with pytest.raises(ValueError, match="at replay"):
            captured(x=torch.ones(4, 3, device=device))
        armed[0] = False
        assert torch.equal(
            captured(x=torch.ones(4, 3, device=device)), torch.full((4, 3), 4.0, device=device)
        )


def test_p51_a_break_that_returns_a_view_of_live_state_never_writes_into_it(device):
    table, row = torch.arange(4.0, device=device) * 10, [0]

    @cglab.eager_break
    def look_up(_):
        return table[row[0] : row[0] + 1]

    with cglab.capture(
        lambda x: x * 2 + look_up(x), slots={"x": cglab.Slot()}, buckets=(2,), backend="breakable"
    ) as captured:
        for row[0] in (0, 2, 1):
            assert captured(x=torch.ones(2, device=device)).tolist() == [2 + 10 * row[0]] * 2
    assert table.tolist() == [0, 10, 20, 30]


def test_p51_a_break_that_hands_on_another_argument_than_at_capture_is_refused(device):
    first = [True]

    @cglab.eager_break
    def choose(a, b):
        return a if first[0] else b

    with cglab.capture(
        lambda x: choose(x * 2, x * 3) + 1, slots={"x": cglab.Slot()}, buckets=(2,), backend="breakable"
    ) as captured:
        assert captured(x=torch.ones(2, device=device)).tolist() == [3, 3]
        first[0] = False
        with pytest.raises(OutputStructureError, match="one of its arguments"):
            captured(x=torch.ones(2, device=device))


def test_breaks_run_without_gradients_at_replay_as_at_capture(device):
    weight, seen = torch.nn.Parameter(torch.ones(2, device=device)), []

    @cglab.eager_break
    def weigh(y):
        seen.append(torch.is_grad_enabled())
        return y * weight

    with cglab.capture(
        lambda x: weigh(x * 2), slots={"x": cglab.Slot()}, buckets=(2,), backend="breakable"
    ) as captured:
        for _ in range(3):
            captured(x=torch.ones(2, device=device))
    assert not any(seen)


def test_t6_a_step_captured_in_inference_mode_replays_outside_of_it(device):
    @cglab.eager_break
    def treble(y, out):
        out.copy_(y * 3)

    @cglab.eager_break
    def more(y):
        return y + 1

    def step(x):
        out = torch.empty_like(x)
        treble(x * 2, out)
        return more(out) * 1

    with cglab.capture(step, slots={"x": cglab.Slot()}, buckets=(2,), backend="breakable") as captured:
        with torch.inference_mode():
            captured(x=torch.ones(2, device=device))
        assert captured(x=torch.ones(2, device=device) * 2).tolist() == [13, 13]
        assert captured.coverage().captured == 2


def test_a_lazily_conjugated_intermediate_crosses_a_break(device):
    @cglab.eager_break
    def twice(y):
        return y * 2

    with cglab.capture(
        lambda x: twice((x + 1).conj()), slots={"x": cglab.Slot()}, buckets=(2,), backend="breakable"
    ) as captured:
        x = torch.tensor([1j, 2j], device=device)
        for _ in range(2):
            assert torch.equal(captured(x=x), (x + 1).conj() * 2)
        assert captured.coverage().captured == 2
