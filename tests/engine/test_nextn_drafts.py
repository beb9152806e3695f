"""A NextN layer in the engine: plain decoding's tokens, a cache that is right after every step, and shared pages."""

import functools
from typing import NamedTuple

import pytest
import torch

from cglab.engine.nextn_drafter import NextNDrafter
from cglab.engine.pages import ROOT, PageStore
from cglab.engine.requests import Request
from cglab.engine.speculation import Speculation
from cglab.errors import InputError
from tests.engine.drafting import LIMITS, PROMPTS, always, never, run, scattered
from tests.engine.latent import ONE, NextNBench


@pytest.fixture
def kind():
    """What these tests run on."""
    return NextNBench


@functools.cache
def plainly_decoded(device):
    """Plain decoding's tokens of ``PROMPTS`` on one device."""
    bench = NextNBench(device)
    found = bench.engine().generate(PROMPTS, LIMITS).tokens
    bench.close()
    assert all(len(set(tokens)) > 4 for tokens in found)
    return found


@pytest.fixture
def plain(device):
    """What plain decoding says on the test's device."""
    return plainly_decoded(device)


@pytest.mark.parametrize("backend", ["eager", "full", "breakable"])
def test_no_draft_changes_a_token_captured_or_not(bench, plain, backend):
    """Several chunks, requests of other lengths, and what the random layer itself drafts."""
    one = bench()
    engine = one.engine(ONE, backend=backend)
    result = engine.generate(PROMPTS, LIMITS)
    assert result.tokens == plain and result.coverage.steps == 0
    steps = len(result.timings.steps)
    extends = result.speculation["draft_extend"]
    assert result.speculation["verify"].steps == steps < extends.steps, "one after every pass of the target"
    assert (extends.eager == 0) == (backend != "eager")
    assert result.accepted.passes.total() == sum(result.timings.step_batches)


@pytest.mark.parametrize("column", [always, never, scattered])
@pytest.mark.parametrize("backend", ["eager", "full"])
def test_whatever_is_accepted_the_layers_cache_and_next_draft_are_those_of_each_request_alone(
    bench, plain, column, backend
):
    one = bench()
    engine = one.engine(ONE, draft=(plain, column), backend=backend)
    assert run(engine, PROMPTS, LIMITS, one.check_state) == plain
    passes = engine.speculator.accepted.passes
    assert (2 in passes, passes[1] <= len(PROMPTS)) == {
        always: (True, True),
        never: (False, False),
        scattered: (True, False),
    }[column], "the last pass of a request may draft beyond what is known"


@pytest.mark.parametrize("mixed", [False, True])
def test_requests_that_gave_way_or_rode_along_end_with_the_same_tokens(bench, mixed):
    """Some that gave way come back in chunks, of which one ends right before their newest token."""
    prompts, limits = [[i + 1, 7, 9] for i in range(6)] + [[3] * 17], [14] * 7
    wanted = bench().engine().generate(prompts, limits).tokens
    one = bench(pages=17, rows=6)
    engine = one.engine(ONE, draft=(wanted, scattered), mixed=mixed, budget=8)
    requests = [Request(i, list(p), n) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
        one.check_state(engine)
        engine.scheduler.check_invariants()
    assert [request.output for request in requests] == wanted
    assert sum(request.preemptions for request in requests) > 0


def test_a_shared_page_is_known_by_the_token_after_it_too(bench):
    """Two prompts that part right after a page: its last key in the layer's cache depends on where they go."""
    one = bench()
    shared, wanted = [9, 8, 7, 6, 5, 4, 3, 2], {}
    for last in (1, 20):
        wanted[last] = bench().engine().generate([[*shared, last, 30]], 6).tokens[0]
    engine = one.engine(ONE)
    reused = []
    for index, last in enumerate((1, 20, 1, 20)):
        request = Request(index, [*shared, last, 30], 6)
        engine.submit(request)
        while not engine.idle:
            engine.step()
            one.check_state(engine)
            reused.append(request.reused) if request.decoding else None
        assert request.output == wanted[last]
    assert sorted(set(reused)) == [0, 4, 8], "the second page is another's until each has one"


@pytest.mark.parametrize("pinned", [1.0, 1.5, 2.0])
def test_p69_forced_tokens_are_what_the_layer_goes_on_from(bench, pinned):
    one = bench()
    engine = one.engine(Speculation(1, pinned=pinned))
    outputs = run(engine, PROMPTS[:3], [20] * 3, one.check_state)
    assert [len(output) for output in outputs] == [20] * 3
    assert abs(engine.speculator.accepted.tokens_per_pass - pinned) < 0.1


def test_b71_without_counted_drafts_the_layer_is_kept_up_all_the_same(bench, plain):
    one = bench()
    engine = one.engine(ONE, draft=(plain, always))
    assert run(engine, PROMPTS[:2], LIMITS[:2], one.check_state, drafts=0) == plain[:2]
    assert set(engine.speculator.accepted.passes) == {1}


def test_every_forward_is_a_segment_of_its_own_kind_and_the_first_token_leaves_before_the_extend(
    bench, monkeypatch
):
    engine = bench().engine(ONE)
    order, forward, extend = [], engine.forward, NextNDrafter._extend

    class Told(NamedTuple):
        tokens: torch.Tensor

        def tolist(self):
            order.append("told")
            return self.tokens.tolist()

    def computed(batch):
        found = forward(batch)
        return found._replace(tokens=Told(found.tokens))

    monkeypatch.setattr(engine, "forward", computed)
    monkeypatch.setattr(
        NextNDrafter, "_extend", lambda self, *given: order.append("extend") or extend(self, *given)
    )
    engine.generate([[1, 2]], 3)
    assert order[:2] == ["told", "extend"], "S3: the tail of a step is no part of the time to its token"
    kinds = [segment.kind for segment in engine.segments.drain()]
    assert kinds[:4] == ["prefill", "draft_extend", "verify", "draft_extend"]


@pytest.mark.parametrize("speculation", [Speculation(3), Speculation(1, 2, tokens=3)], ids=str)
def test_more_than_one_token_of_a_layer_is_refused(bench, speculation):
    one = bench()
    with pytest.raises(InputError, match=r"drafts one token a step.*give Speculation\(steps=1\)"):
        NextNDrafter(one.layer, one.cache()[0], None, speculation)


def test_pages_with_an_overlap_are_found_as_far_as_their_overlap_is_known():
    store = PageStore(9, 2, overlap=1)
    first, second = store.take(2)
    store.publish(first, ROOT, [1, 2, 3])
    store.publish(second, first, [3, 4, 5])
    assert store.match([1, 2, 3, 4, 5]) == [first, second]
    assert store.match([1, 2, 3, 4]) == store.match([1, 2, 3, 4, 6]) == [first]
    assert store.match([1, 2]) == store.match([1, 2, 9]) == []
