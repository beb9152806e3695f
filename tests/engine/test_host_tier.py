"""Prefixes that come back from host memory: the same tokens and bits, awaited in full before a step, in no capture."""

import pytest
import torch

from cglab.engine.engine import Engine
from cglab.engine.host_tier import HostTier, LayerLoads
from cglab.engine.requests import Request
from cglab.engine.speculation import Speculation
from cglab.errors import InputError, PoolBusyError
from cglab.graphs.breaks import Aside, capturing, staged
from cglab.graphs.out_forms import same_bits
from cglab.lab.through import Through
from cglab.runners.base import GraphGroup
from tests.engine.drafting import Bench, check_state
from tests.engine.latent import ONE, NextNBench

LONG = [(7 * i * i + 3) % 97 for i in range(26)]
"""Six pages of prefix and a bit."""
OTHERS = [[(11 * i + n) % 97 for i in range(22)] for n in (1, 2)]
"""Two of them push it out of a cache of twelve pages."""
PROMPTS = [LONG, *OTHERS, [*LONG[:23], 5, 6], LONG]
BENCHES = {"dense": (Bench, None), "latent": (NextNBench, None), "latent with NextN": (NextNBench, ONE)}
benches = pytest.mark.parametrize("kind", BENCHES)


@pytest.fixture
def make(device):
    """Makes engines over small caches, and closes what they need."""
    made = []

    def make(kind, *, host=16, pages=13, **options):
        bench, speculation = BENCHES[kind]
        made.append(bench(device, pages=pages, rows=4))
        engine = made[-1].engine(speculation, host=host, **options)
        engine.bench = made[-1]
        return engine

    yield make
    for each in made:
        each.close()


def replaying(engine):
    """The engine's prefill runner, which replays whatever it is given."""
    if isinstance(engine.bench, Bench):
        engine.phases.prefill_buckets = (2, 4, 8, 16)
        runner = engine.phases.prefill("breakable")
        engine.phases.prefill = lambda: runner
    return engine.phases.prefill()


class Kept(Engine):
    """Keeps the logits of every token that a prefill gives."""

    def forward(self, batch):
        computed = super().forward(batch)
        self.logits = [*getattr(self, "logits", []), computed.logits.clone()]
        return computed


def ask(engine, prompts=PROMPTS, limit=4):
    """The prompts one after the other; their requests."""
    requests = [Request(i, list(prompt), limit) for i, prompt in enumerate(prompts)]
    for request in requests:
        for _ in engine.stream([request]):
            engine.scheduler.check_invariants()
    return requests


@benches
@pytest.mark.parametrize("backend", ["eager", "full"])
def test_a_prefix_that_was_evicted_comes_back_and_gives_the_same_tokens(make, kind, backend):
    wanted = [request.output for request in ask(make(kind, host=0, pages=65))]
    engine = make(kind, backend=backend)
    requests = ask(engine)
    assert [request.output for request in requests] == wanted
    assert [request.restored for request in requests] == [0, 0, 0, 20, 4], "and part of it was on the device"
    assert requests[4].reused == 24
    assert engine.host.copied["restored"] == 6 and engine.host.copied["kept"] >= 6
    assert engine.host.nbytes == 16 * sum(
        cache.nbytes // cache.shape[1] * 4
        for cache in [
            *engine.kv.caches().values(),
            *(engine.draft_kv.caches().values() if kind.endswith("N") else []),
        ]
    )


@benches
def test_s3_captured_is_bitwise_padded_eager_with_pages_that_come_back(make, kind):
    """The same requests on two caches: every prefill replayed, and every prefill run eager at its padded size."""

    def padded(runner, live, inputs):
        runner.capture_for(runner.rows(live))
        return runner.run_padded_eager(live, runner.captured.pad(runner.rows(live)), **inputs)

    logits = []
    for how in (None, padded):
        engine = make(kind, backend="full", budget=8)
        engine.__class__ = Kept
        runner = replaying(engine)
        if how is not None:
            through = Through(runner, how)
            engine.phases.prefill = lambda through=through: through
        requests = ask(engine)
        assert sum(request.restored for request in requests) == 24
        assert how is not None or (runner.coverage().captured > 0 and runner.coverage().eager == 0)
        logits.append(engine.logits)
    assert len(logits[0]) == len(logits[1])
    assert all(same_bits(*pair) for pair in zip(*logits, strict=True))


@benches
def test_p80_layers_come_one_by_one_and_all_of_them_before_the_step_or_its_capture(make, kind, monkeypatch):
    """What runs first sees every layer; and no copy is part of the recording that this step makes."""
    engine = make(kind, backend="full")
    runner = replaying(engine)
    ask(engine, PROMPTS[:3])
    order, load, step = [], HostTier._load, runner.step

    def noted(self, pairs, *given):
        assert not capturing()
        order.append(len(pairs))
        load(self, pairs, *given)

    def replayed(key, replay=runner.captured.replay):
        order.append("replayed")
        return replay(key)

    monkeypatch.setattr(HostTier, "_load", noted)
    recordings = runner.captured.recordings
    monkeypatch.setattr(recordings, "_function", lambda **given: order.append("captured") or step(**given))
    monkeypatch.setattr(runner.captured, "replay", replayed)
    ask(engine, [LONG[:23]], limit=1)  # three tokens are left, of a bucket that was never used
    layers = {"dense": [2, 2], "latent": [2, 2], "latent with NextN": [4, 2]}[kind]
    assert order[:2] == layers, "keys and values of each layer; the draft's one layer comes with the first"
    assert order[2] == "captured" and order[-1] == "replayed" and set(order[2:]) == {"captured", "replayed"}


def test_p80_a_step_that_did_not_wait_would_read_what_is_not_there(make, monkeypatch):
    """The guard taken away: on a CPU nothing has come then, on a GPU it may have."""
    engine = make("latent")
    if engine.kv.device.type == "cuda":
        pytest.skip("copies on another stream may come in time all the same")
    ask(engine, PROMPTS[:3])
    engine.kv.full.keys[:, 4:] = float("nan")
    monkeypatch.setattr(GraphGroup, "settle", lambda self: None)
    engine.submit(Request(0, list(PROMPTS[3]), 1))
    batch = engine.plan()
    assert batch.requests[0].restored == 20
    assert not engine.forward(batch).logits.isfinite().all()
    monkeypatch.undo()
    assert engine.forward(batch).logits.isfinite().all(), "and now it has come"
    engine.abandon(batch.requests)


def test_what_comes_back_is_what_was_there_to_the_bit(make):
    engine = make("latent with NextN")
    (first,) = ask(engine, [LONG])
    caches = [*engine.kv.caches().values(), *engine.draft_kv.caches().values()]
    pages = engine.scheduler.memory.pages.match(LONG)
    slots = torch.tensor([page * 4 + i for page in pages for i in range(4)], device=engine.kv.device)
    before = [cache[:, slots].clone() for cache in caches]
    ask(engine, OTHERS)
    for cache in caches:
        cache[:, 4:] = float("nan")  # whatever is on the device is lost
    engine.scheduler.memory.pages.evict(99)
    engine.host.books._transfers.kept.clear()
    engine.submit(Request(9, LONG, 1))
    engine.plan()
    engine.phases.prefill().group.settle()
    (request,) = engine.scheduler.running
    slots = torch.tensor(
        [page * 4 + i for page in request.pages[:6] for i in range(4)], device=engine.kv.device
    )
    restored = request.restored // 4
    for cache, old in zip(caches, before, strict=True):
        assert restored > 0 and same_bits(cache[:, slots[: restored * 4]], old[:, : restored * 4])
    engine.abandon([request])
    assert first.finish == "length"


@pytest.mark.parametrize("seed", ["graph", "sampler inside"])
def test_drafts_of_every_kind_find_their_state_again(device, seed):
    """An assistant reads the target's pages, a block draft has its own at the same slots."""
    bench = Bench(device, pages=17, rows=4)
    try:
        wanted = bench.engine(budget=32).generate([LONG], 6).tokens[0]
        engine = bench.engine(Speculation(3), seed=seed, host=32, backend="full", budget=32)
        for index, prompt in enumerate([LONG, *OTHERS, LONG]):
            request = Request(index, list(prompt), 6)
            for event in engine.stream([request]):
                if event.finish is None:
                    check_state(engine)
            if prompt is LONG:
                assert request.output == wanted
        assert request.restored > 0
    finally:
        bench.close()


def test_weights_that_changed_leave_nothing_there(make):
    engine = make("dense")
    ask(engine, PROMPTS[:3])
    assert engine.host.books.used > 0
    engine.model.blocks[0].attention.output.weight.mul_(1.5)
    (request,) = ask(engine, [LONG])
    assert request.reused == 0


def test_a_copy_that_fails_ends_its_batch_and_leaves_no_prefix_that_never_came(make, monkeypatch):
    engine = make("dense")
    wanted = [request.output for request in ask(engine)]
    ask(engine, OTHERS)
    load, failures = HostTier._load, [ZeroDivisionError]

    def fails_once(*given):
        if failures:
            raise failures.pop()
        load(*given)

    monkeypatch.setattr(HostTier, "_load", fails_once)
    with pytest.raises(ZeroDivisionError):
        ask(engine, [LONG])
    assert engine.idle and engine.scheduler.memory.pages.cached == 0 == engine.host.books.used
    assert [request.output for request in ask(engine)] == wanted


def test_copies_inside_a_capture_are_refused(make):
    engine = make("dense")
    ask(engine, PROMPTS[:2])
    engine.scheduler.memory.pages.evict(1)
    with staged(Aside()), pytest.raises(PoolBusyError, match="inside a capture"):
        engine.host.move()


def test_a_page_that_leaves_again_before_any_step_is_written_first(make):
    """Nobody has waited for it yet, and what was in its place before must not be kept under its name."""
    engine = make("dense")
    host, keys = engine.host, engine.kv.full.keys
    first, second, third = (keys[:, page * host.page_size :][:, : host.page_size] for page in (1, 2, 3))
    first.fill_(7)
    host.books.keep(b"first", 1)
    host.move()
    host.books.restore(b"first", 2)
    host.move()
    host.books.keep(b"second", 2)
    host.move()
    host.books.restore(b"second", 3)
    host.move()
    host.group.settle()
    assert (second == 7).all() and (third == 7).all()


def test_an_arrival_that_fails_is_asked_again(device):
    came = []
    loads = LayerLoads(
        iter([lambda: came.append(1), lambda: came.append(2) if len(came) > 1 else 1 / 0]), None
    )
    with pytest.raises(ZeroDivisionError):
        loads.wait()
    came.append("again")
    loads.wait()
    assert came == [1, "again", 2]


def test_host_memory_where_no_prefix_is_kept_is_refused(device):
    bench = Bench(device)
    windows = Bench(device, windowed=True)
    try:
        with pytest.raises(InputError, match="none is kept: switched off by prefix_reuse=False"):
            bench.engine(host=4, prefix_reuse=False)
        with pytest.raises(InputError, match="sliding windows: True"):
            windows.engine(host=4)
        kv = bench.engine().kv
        with pytest.raises(InputError, match="give at least 1 page"):
            HostTier([kv], GraphGroup(device), 0)
    finally:
        bench.close()
        windows.close()
