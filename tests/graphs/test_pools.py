"""Pools and groups: what shares memory, what must not, and what a bucket costs."""

import contextlib
import ctypes
import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cglab
from cglab.errors import PoolBusyError
from cglab.graphs import cuda_pool
from cglab.graphs.captured import Captured
from cglab.graphs.options import Options
from cglab.graphs.recorders import recorder_for
from cglab.graphs.slots import Slot
from cglab.graphs.tape_pool import ALIGNMENT, TapePool

SLOT = {"x": Slot((-1, 64), torch.float32, pad=0.0)}


def member(function, device, recorder=None, pool=None, buckets=(1, 2, 4, 8), backend="full", **options):
    return Captured("step", function, SLOT, buckets, device, Options(backend=backend, strict=True, **options),
                    recorder=recorder, pool=pool)  # fmt: skip


def layers(x):
    for i in range(6):
        x = torch.relu(x * 1.5 + i) - x
    return x


def test_p29_b51_largest_first_makes_smaller_buckets_free():
    pool = TapePool()
    recorder = recorder_for("cpu")
    wide = {"x": Slot((-1, 50_000), torch.float32, pad=0.0)}
    with Captured(
        "step", layers, wide, (1, 2, 4, 8), torch.device("cpu"), Options(strict=True), recorder, pool
    ) as step:
        step.capture()
        grown = {line["bucket"]: line["pool_bytes"] for line in step.memory()}
        assert list(grown) == ["8", "4", "2", "1"] and grown["8"] > 0
        assert grown["4"] == grown["2"] == grown["1"] == 0
    ascending = TapePool()
    total = 0
    for size in (1, 2, 4, 8):
        with recorder.take(ascending) as take:
            layers(torch.zeros(size, 50_000))
            take.cut()
        total = ascending.reserved_bytes
    assert total > pool.peak_bytes, "the other way round the pool grows with every size"


def test_b51_one_pool_for_a_family_costs_less_than_one_for_each_shape():
    recorder = recorder_for("cpu")
    wide = {"x": Slot((-1, 40_000), torch.float32, pad=0.0)}
    sizes = tuple(range(2, 13))

    def reserved(pools):
        members = [
            Captured("step", layers, wide, (size,), torch.device("cpu"), Options(strict=True), recorder, pool)
            for size, pool in zip(sizes[::-1], pools, strict=True)
        ]
        for one in members:
            one.capture()
        held = sum({id(pool): pool.reserved_bytes for pool in pools}.values())
        for one in members:
            one.close()
        return held

    shared = TapePool()
    apart = reserved([TapePool() for _ in sizes])
    assert reserved([shared] * len(sizes)) * 3 < apart, "eleven shapes, as in the report"


def test_b52_outputs_of_all_buckets_share_one_buffer(device):
    with cglab.capture(
        lambda x: x * 2, slots={"x": Slot(pad=0.0)}, buckets=(1, 2, 4, 8), padding=False
    ) as captured:
        captured.warm(x=torch.ones(8, 3, device=device))
        outs = {n: captured(x=torch.ones(n, 3, device=device)) for n in (8, 4, 2, 1)}
        assert len({out.data_ptr() for out in outs.values()}) == 1
        if device.type == "cpu":
            assert captured._captured._pool.used_bytes == 0, "no bucket's output keeps a pool block"


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_b40_members_of_a_group_overlap_and_outputs_read_later_do_not(device, backend):
    """Target and draft in one group: the draft reads the target's hidden states after its own replays began."""
    recorder = recorder_for(device)
    pool = recorder.new_pool()
    target = member(layers, device, recorder, pool, backend=backend)
    draft = member(lambda x: torch.tanh(layers(x) * 0.1), device, recorder, pool, backend=backend)
    target.capture()
    draft.capture()
    generator = torch.Generator().manual_seed(4)
    for _ in range(20):
        n = int(torch.randint(1, 9, (1,), generator=generator))
        x = torch.randn(n, 64, generator=generator).to(device)
        hidden = target(x=x)
        for _ in range(3):
            again = draft(x=hidden)
            assert torch.equal(hidden, layers(x)), (
                "in a buffer outside the pool: the draft's replay left it alone"
            )
            assert torch.equal(again, torch.tanh(layers(hidden) * 0.1))
    assert target.counts.eager == draft.counts.eager == 0
    target.close()
    draft.close()


def test_b40_a_shared_pool_really_overlaps_and_separate_pools_never_do():
    def addresses(pools):
        recorder, found = recorder_for("cpu"), []
        for pool in pools:
            with recorder.take(pool) as take:
                y = torch.ones(4, 64) * 2
                found.append(
                    {chunk.address for chunk in pool._chunks if pool.chunk_of(y) is chunk} | {y.data_ptr()}
                )
                del y
                take.cut()
        return found

    shared = TapePool()
    one, two = addresses([shared, shared])
    assert one == two, "dead intermediates of one recording are the next one's memory"
    one, two = addresses([TapePool(), TapePool()])
    assert not one & two


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_b40_interleaved_replays_over_a_poisoned_pool(backend):
    recorder, pool = recorder_for("cpu"), TapePool(poison=True)
    device = torch.device("cpu")

    @cglab.eager_break
    def cut(h, out):
        out.copy_(h.sin())

    def broken(x):
        h = layers(x)
        out = torch.empty_like(h)
        cut(h, out)
        return layers(out) + h

    members = [member(f, device, recorder, pool, backend=backend, inline_breaks=backend == "full")
               for f in (layers, broken, lambda x: broken(x) * 2)]  # fmt: skip
    for one in members:
        one.capture()
    generator = torch.Generator().manual_seed(4)
    for _ in range(30):
        one = members[int(torch.randint(3, (1,), generator=generator))]
        n = int(torch.randint(1, 9, (1,), generator=generator))
        x = torch.randn(n, 64, generator=generator)
        expected = one.function(x=x)
        assert torch.equal(one(x=x), expected)
    for one in members:
        one.close()


def test_p59_a_second_user_of_the_pool_is_refused(device):
    recorder = recorder_for(device)
    pool = recorder.new_pool()
    inner = member(lambda x: x * 3, device, recorder, pool, buckets=(2,))
    inner.capture()

    @cglab.eager_break
    def nested(h, out):
        out.copy_(inner(x=h))

    def step(x):
        out = torch.empty_like(x)
        nested(x + 1, out)
        return out + 1

    outer = member(step, device, recorder, pool, buckets=(2,), backend="breakable")
    with pytest.raises(Exception, match="same graph pool") as caught:
        outer.capture()
    assert isinstance(caught.value, PoolBusyError) or isinstance(caught.value.__cause__, PoolBusyError)
    assert torch.equal(inner(x=torch.ones(2, 64, device=device)), torch.full((2, 64), 3.0, device=device)), (
        "pool free again"
    )
    inner.close()
    outer.close()


def test_p60_borrowed_pool_memory_alive_at_replay_is_refused(device):
    with cglab.capture(lambda x: x * 2, slots={"x": Slot(pad=0.0)}, buckets=(2,)) as captured:
        x = torch.ones(2, 3, device=device)
        captured(x=x)
        borrowed = captured._captured._pool.borrow((16,), torch.float32)
        borrowed.fill_(1)
        with pytest.raises(PoolBusyError, match="1 tensor.s. borrowed .* drop or clone"):
            captured(x=x)
        del borrowed
        gc.collect()
        assert torch.equal(captured(x=x), x * 2)


def test_p60_a_view_of_borrowed_memory_counts_as_alive(device):
    with cglab.capture(lambda x: x * 2, slots={"x": Slot(pad=0.0)}, buckets=(2,)) as captured:
        x = torch.ones(2, 3, device=device)
        captured(x=x)
        part = captured._captured._pool.borrow((16,), torch.float32)[:4]
        with pytest.raises(PoolBusyError, match="borrowed"):
            captured(x=x)
        del part
        gc.collect()
        assert torch.equal(captured(x=x), x * 2)


def test_p60_nothing_is_lent_while_the_pool_works(device):
    recorder = recorder_for(device)
    pool = recorder.new_pool()
    with pool.in_use("a replay"), pytest.raises(PoolBusyError, match="a borrow would run inside a replay"):
        pool.borrow((1,), torch.float32)
    assert pool.borrow((1,), torch.float32).shape == (1,)


# The tape's allocator


def test_blocks_are_aligned_reused_and_merged():
    pool = TapePool()
    a, b, c = (pool.empty((n,), torch.float32) for n in (3, 100, 5))
    assert all(t.data_ptr() % ALIGNMENT == 0 for t in (a, b, c))
    assert pool.used_bytes == 64 + 448 + 64
    places = a.data_ptr(), b.data_ptr()
    del a, b
    assert pool.used_bytes == 64
    joined = pool.empty((128,), torch.float32)
    assert joined.data_ptr() == places[0], "two neighbours became one block"
    del joined, c
    assert pool.used_bytes == 0 and len(pool._free) == 1
    pool.close()
    assert pool.reserved_bytes == 0


def test_a_chunk_with_a_live_block_outlives_close():
    pool = TapePool()
    kept = pool.empty((4,), torch.float32).fill_(3)
    pool.close()
    assert pool.reserved_bytes > 0 and kept.tolist() == [3] * 4
    del kept
    pool.close()
    assert pool.reserved_bytes == 0


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3), (2, 1, 5)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_every_shape_and_type_fits_a_block(shape, dtype):
    pool = TapePool(poison=True)
    tensor = pool.empty(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    if tensor.numel():
        tensor.zero_()
        assert not any(tensor.untyped_storage().tolist())
        assert pool.chunk_of(tensor) is pool._chunks[0]


def test_a_poisoned_pool_fills_what_is_freed():
    pool = TapePool(poison=True)
    kept = pool.empty((8,), torch.float32).zero_()
    freed = pool.empty((8,), torch.float32).zero_()
    alias = pool.chunk_of(freed).alias(freed)
    del freed
    assert alias.isnan().all() and not kept.any()


def test_a_hundred_captures_do_not_grow_the_pool():
    recorder, pool = recorder_for("cpu"), TapePool()
    one = member(layers, torch.device("cpu"), recorder, pool, buckets=(4, 8), self_check=False)
    one.capture()
    reserved = pool.reserved_bytes
    for _ in range(50):
        one.capture()
    assert pool.reserved_bytes == reserved and pool.used_bytes == 0 and len(one.memory()) == 2
    one.close()


def test_p59_a_refused_step_inside_a_replay_leaves_the_inputs_of_that_replay_alone(device):
    def inner(y):
        if captured.captured_sizes:
            with contextlib.suppress(PoolBusyError):
                captured(x=torch.full((2,), 100.0, device=device))
        return y * 1

    body = cglab.eager_break(inner)
    captured = cglab.capture(
        lambda x: body(x * 2) + x, slots={"x": Slot()}, buckets=(2,), backend="breakable"
    )
    for _ in range(2):
        assert captured(x=torch.ones(2, device=device)).tolist() == [3, 3]
    captured.close()


def test_p59_threads_take_turns_from_load_to_result():
    captured = cglab.capture(lambda x: (x * 2).sum(-1), slots={"x": Slot()}, buckets=(4,), clone=True)
    captured(x=torch.ones(4, 2000))
    wrong = []

    def work(value):
        for _ in range(100):
            got = captured(x=torch.full((4, 2000), value))
            if got.tolist() != [value * 4000] * 4:
                wrong.append(got)

    with captured, ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (1.0, 2.0)))
    assert not wrong


def test_a_snapshot_of_a_pool_leaves_the_numbers_of_its_handle_alive(monkeypatch):
    def snapshot(handle):
        """Gives back references that are not its own, as torch 2.11 does."""
        for number in handle:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))
        return [{"address": 64, "total_size": 32}]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    handle = (int("1" * 20), int("2" * 20))
    before = [sys.getrefcount(number) for number in handle]
    for _ in range(50):
        assert cuda_pool.snapshot(handle) == [{"address": 64, "total_size": 32}]
    assert [sys.getrefcount(number) for number in handle] == before
