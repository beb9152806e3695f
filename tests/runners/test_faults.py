"""An exception at recorded operations of pico-gqa's decode step: recovery, each time, to the bit and to the byte.

In the normal run: the first operation, the last one, the one after every break, inside every break, and a seeded
sample. All of them under ``soak``.
"""

import gc
import random

import pytest
import torch

from cglab.errors import CaptureError
from cglab.graphs import faults
from cglab.graphs.breaks import Split, capturing
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.models.kv import PagedKV
from cglab.models.loading import load_model
from cglab.runners.base import GraphGroup
from cglab.runners.decode import INPUTS, DecodeRunner

LENGTHS = [9, 5]
backends = pytest.mark.parametrize("backend", ["full", "breakable"])


@pytest.fixture(scope="module")
def models():
    """pico-gqa on each device, opened once."""
    opened = {}

    def get(device):
        if device not in opened:
            opened[device] = load_model("pico-gqa", device=device, dtype=torch.float32)
        return opened[device]

    yield get
    opened.clear()


class Bench:
    """pico-gqa, a cache with two live requests, and one bucket to capture."""

    def __init__(self, loaded, device, backend):
        self.device, self.backend = device, backend
        self.model, config = loaded.model, loaded.config
        self.kv = PagedKV(
            config, pages=9, page_size=4, rows=3, max_context=16, device=device, dtype=torch.float32
        )
        self.kv.full.page_table[1:] = torch.arange(1, 9, device=device).view(2, 4)
        generator = torch.Generator().manual_seed(2)
        for cache in (self.kv.full.keys, self.kv.full.values):
            cache.copy_(torch.randn(cache.shape, generator=generator))
        self.group = GraphGroup(device)
        slots = [(4 * row - 3) * 4 + n - 1 for row, n in zip((1, 2), LENGTHS, strict=True)]
        columns = ([17, 4], [n - 1 for n in LENGTHS], slots, [1, 2], LENGTHS)
        self.values = {n: torch.tensor(c, device=device) for n, c in zip(INPUTS, columns, strict=True)}
        self.start = self.cache()
        self.runner = self.new_runner()
        self.expected = self.eager(self.runner)
        self.after = self.cache()
        self.restore()

    def new_runner(self):
        return DecodeRunner(
            self.model, self.kv, self.group, (2,), Options(backend=self.backend, strict=True, clone=True)
        )

    def cache(self):
        return torch.stack([self.kv.full.keys, self.kv.full.values]).clone()

    def restore(self):
        self.kv.full.keys.copy_(self.start[0])
        self.kv.full.values.copy_(self.start[1])

    def eager(self, runner):
        return runner.run_live_eager(2, **self.values)

    def level(self):
        """Bytes that recordings hold: the pool's blocks, and on a GPU everything allocated."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        return self.group.pool.used_bytes, self.group.pool.reserved_bytes

    def survives(self, fail):
        """One failed capture, then an eager step and a capture that replays, from the same state."""
        with pytest.raises(CaptureError, match="planned fault"):
            fail(self.runner.capture)
        assert not capturing() and torch.is_grad_enabled() and gc.isenabled()
        assert same_bits(self.cache(), self.start), "the failed capture left a trace in the cache"
        got = self.eager(self.runner)
        assert all(map(same_bits, got, self.expected)) and same_bits(self.cache(), self.after), (
            "the eager step after it"
        )
        self.restore()
        self.runner.capture()
        got = self.runner.run(2, **self.values)
        assert all(map(same_bits, got, self.expected)), "the replay of the capture after it"
        assert same_bits(self.cache()[:, :, 4:], self.after[:, :, 4:])
        assert self.runner.coverage().eager == 0
        self.restore()
        self.runner.close()
        self.runner = self.new_runner()

    def close(self):
        self.runner.close()
        self.group.close()


@pytest.fixture
def bench(models, device, backend):
    made = Bench(models(device), device, backend)
    yield made
    made.close()


@pytest.fixture
def device():
    """The tape; the sweep on a GPU is recorded with the results."""
    return torch.device("cpu")


def operations(bench, monkeypatch):
    """How many operations a capture records, and the indices of those that follow a break."""
    after_break = []
    reach = Split.reach

    def spy(self, *args):
        after_break.append(faults._plan.get().seen)
        return reach(self, *args)

    with monkeypatch.context() as patch, faults.planned(None) as plan:
        patch.setattr(Split, "reach", spy)
        bench.runner.capture()
    bench.runner.close()
    bench.runner = bench.new_runner()
    return plan.seen, after_break


def at(index):
    def fail(capture):
        with faults.planned(index) as plan:
            try:
                capture()
            finally:
                assert plan.seen == index + 1, "the capture ended at the fault"

    return fail


@backends
def test_a_fault_at_the_first_the_last_after_every_break_and_at_a_sample(bench, monkeypatch):
    count, after_break = operations(bench, monkeypatch)
    assert count > 100
    assert len(after_break) == (bench.model.config.num_layers if bench.backend == "breakable" else 0)
    chosen = {0, count - 1, *after_break, *random.Random(7).sample(range(count), 6)}
    bench.survives(at(count - 1))  # once, so that what is loaded on first use is there
    level = bench.level()
    for index in sorted(chosen):
        bench.survives(at(index))
        assert bench.level() == level, f"operation {index} of {count}"


@pytest.mark.parametrize("backend", ["breakable"])
def test_a_fault_inside_every_break(bench, monkeypatch):
    import cglab.models.attention as attention

    decode, calls = attention._decode, [0]
    body = decode.body
    layers = bench.model.config.num_layers
    bench.survives(at(5))
    level = bench.level()
    for layer in range(layers):

        def risky(*args, layer=layer, **named):
            calls[0] += 1
            if calls[0] == 2 * layers + layer + 1:  # two warm-ups come first
                raise faults.PlannedFault(f"planned fault in the break of layer {layer}")
            body(*args, **named)

        def fail(capture, risky=risky):
            calls[0] = 0
            with monkeypatch.context() as patch:
                patch.setattr(decode, "body", risky)
                capture()

        bench.survives(fail)
        assert bench.level() == level, f"layer {layer}"


@pytest.mark.soak
@backends
def test_a_fault_at_every_operation(bench, monkeypatch):
    count, _ = operations(bench, monkeypatch)
    bench.survives(at(0))
    level = bench.level()
    for index in range(count):
        bench.survives(at(index))
        assert bench.level() == level, f"operation {index} of {count}"


@backends
def test_a_plan_beyond_the_end_changes_nothing(bench):
    with faults.planned(10**9) as plan:
        bench.runner.capture()
    assert plan.seen > 100 and not faults.is_planned()
    assert all(map(same_bits, bench.runner.run(2, **bench.values), bench.expected))
