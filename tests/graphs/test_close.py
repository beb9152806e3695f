"""Giving back: weak references die, pools empty, five rounds do not grow, and the interpreter ends cleanly."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

import cglab
from cglab.graphs.captured import _alive

X = {"x": cglab.Slot(pad=0.0)}


class Box:
    """Something that a weak reference can point to."""


@cglab.eager_break
def cut(h, out):
    out.copy_(h * 2)


def step(x):
    h = x + 1
    out = torch.empty_like(h)
    cut(h, out)
    return out - 1


def used(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(device)
    return 0


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_n03_close_gives_back_tensors_pool_and_function(device, backend):
    before = used(device)
    held = torch.ones(1000, 4, device=device)
    watched = [weakref.ref(held)]

    def function(x):
        return step(x) + held[0, 0]  # noqa: F821 - deleted further down, on purpose

    watched.append(weakref.ref(function))
    captured = cglab.capture(
        function, slots=X, buckets=(1, 2, 4), backend=backend, inline_breaks=backend == "full", strict=True
    )
    x = torch.ones(4, 4, device=device)
    captured(x=x)
    pool = captured._captured._pool
    buffer = weakref.ref(captured._captured.buffers._buffers["x"])
    assert pool.reserved_bytes > 0
    captured.close()
    gc.collect()
    assert buffer() is None and pool.reserved_bytes == 0
    if device.type == "cpu":
        assert pool.used_bytes == 0
    assert captured.coverage().steps == 1, "what was counted stays readable"
    del captured, function, held, x
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
    assert used(device) == before


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_n02_made_again_five_times_under_one_name_nothing_grows(device, backend):
    def cell():
        captured = cglab.capture(
            step, slots=X, buckets=(1, 2, 4), backend=backend, inline_breaks=backend == "full"
        )
        captured(x=torch.ones(3, 4, device=device))
        captured.close()

    cell()
    gc.collect()
    objects, bytes_before = len(gc.get_objects()), used(device)
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    for _ in range(5):
        cell()
    gc.collect()
    assert sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()) == tensors
    assert len(gc.get_objects()) - objects < 100, "a few caches, no recordings"
    assert used(device) == bytes_before


def test_without_close_the_last_reference_is_enough(device):
    before = used(device)
    captured = cglab.capture(step, slots=X, buckets=(2,), inline_breaks=True)
    captured(x=torch.ones(2, 4, device=device))
    inner = weakref.ref(captured._captured)
    assert inner() in _alive
    del captured
    gc.collect()
    assert inner() is None
    assert used(device) == before


def test_a_context_manager_closes_on_an_error_too(device):
    with pytest.raises(KeyError), cglab.capture(step, slots=X, buckets=(2,), inline_breaks=True) as captured:
        captured(x=torch.ones(2, 4, device=device))
        pool = captured._captured._pool
        raise KeyError
    gc.collect()
    assert pool.reserved_bytes == 0


def test_close_before_the_first_call_is_fine():
    cglab.capture(step, slots=X, buckets=(2,)).close()


def test_b39_dropping_one_recording_leaves_the_others_right(device):
    with cglab.capture(lambda x: x @ x.t() @ x, slots=X, buckets=(2, 4, 8), padding=False) as captured:
        xs = {n: torch.randn(n, 4, device=device) for n in (2, 4, 8)}
        captured.warm(x=xs[8])
        backend = captured._captured.recordings._backend
        expected = {n: captured(x=x).clone() for n, x in xs.items()}
        backend.drop(backend.keys[1])
        assert captured.captured_sizes == [2, 8]
        for n in (8, 2):
            assert torch.equal(captured(x=xs[n]), expected[n])
        assert torch.equal(captured(x=xs[4]), expected[4]) and captured.coverage().eager == 1


def test_b39_closing_one_capture_leaves_another_on_the_same_stream_right(device):
    def product(x):
        return torch.relu(x @ x.t()) @ x

    first = cglab.capture(product, slots=X, buckets=(4,), clone=True)
    second = cglab.capture(product, slots=X, buckets=(4,), clone=True)
    x = torch.randn(4, 16, device=device)
    expected, _ = first(x=x), second(x=x)
    second.close()
    noise = [torch.randn(64, 64, device=device) for _ in range(20)]
    assert torch.equal(first(x=x), expected)
    first.close()
    del noise


@pytest.mark.parametrize("ending", ["", "import gc; gc.disable()"])
def test_n12_the_interpreter_ends_with_live_captures(device, ending, environment):
    """Graphs alive at exit: crash or hang in the reports."""
    script = f"""
import torch, cglab
captured = cglab.capture(lambda x: x @ x, slots={{"x": cglab.Slot(pad=0.0)}}, buckets=(4,), backend="breakable")
out = captured(x=torch.ones(4, 4, device="{device}"))
keep = [captured, out]
keep.append(keep)
print(captured.coverage())
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 of 1 steps captured\n", "")
