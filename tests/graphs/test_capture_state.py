"""Code that asks torch whether it is captured is told so by the tape too, and takes the way that it takes there."""

import threading

import pytest
import torch

import cglab
from cglab.errors import HostReadError
from cglab.graphs.capture_state import said_to_capture


def is_captured():
    """As libraries ask: a torch without CUDA raises where there is nothing to ask."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


def asks(x):
    """Reads its values on the host unless it is captured, as masks of transformers are made."""
    if not is_captured() and (x > 0).all():
        return x * 2
    return torch.where((x > 0).all(), x * 2, x * 3)


def test_what_reads_values_unless_it_is_captured_is_captured_and_right_on_other_values():
    with cglab.capture(
        asks, slots={"x": cglab.Slot(pad=1.0)}, buckets=(4,), strict=True, clone=True
    ) as captured:
        for x in (torch.ones(4, 2), -torch.ones(4, 2)):
            assert torch.equal(captured(x=x), asks(x))
        assert captured.coverage().captured == 2
    assert not is_captured(), "the answer ends with the capture"


def test_one_that_reads_all_the_same_is_refused():
    with pytest.raises(HostReadError):
        cglab.capture(
            lambda x: asks(x) * bool(x[0, 0]), slots={"x": cglab.Slot()}, buckets=(4,), strict=True
        )(x=torch.ones(4, 2))
    assert not is_captured()


def test_inside_a_break_no_capture_is_under_way():
    recorded, aside = [], []

    @cglab.eager_break
    def look(x):
        aside.append(is_captured())
        return x + 1

    def step(x):
        recorded.append(is_captured())
        return look(x * 2)

    slots = {"x": cglab.Slot(pad=1.0)}
    with cglab.capture(step, slots=slots, buckets=(4,), backend="breakable", strict=True) as captured:
        captured.warm(x=torch.ones(4, 2))
    assert any(recorded) and aside and not any(aside)


def test_the_answer_is_that_of_the_thread_that_records():
    told = []
    with said_to_capture():
        other = threading.Thread(target=lambda: told.append(is_captured()))
        other.start()
        other.join()
    assert told == [False]


@pytest.mark.parametrize("empty", [[], [[]], [[], []]])
def test_a_tensor_of_nothing_is_no_copy_from_the_host(empty):
    """As dynamic caches of transformers begin."""

    def grow(x):
        return torch.cat([torch.tensor(empty).flatten().expand(x.shape[0], 0), x], 1)

    with cglab.capture(grow, slots={"x": cglab.Slot()}, buckets=(4,), strict=True) as captured:
        x = torch.randn(4, 2)
        assert torch.equal(captured(x=x), x)
    assert cglab.doctor(grow, x=torch.randn(4, 2)).healthy
