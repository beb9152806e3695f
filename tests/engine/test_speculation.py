"""Speculative decoding in the engine: plain decoding's tokens in fewer steps, whatever is drafted."""

import functools

import pytest
import torch

from cglab.engine.draft_workload import steady_draft, steady_speculation
from cglab.engine.drafters import AssistantDrafter, BlockDrafter
from cglab.engine.requests import Request, Sampling
from cglab.engine.speculation import Speculation
from cglab.engine.speculator import Speculator
from cglab.errors import InputError, ModelError
from cglab.runners.draft_sampler import DraftSampler
from tests.engine.drafting import (
    LIMITS,
    PROMPTS,
    SAMPLERS,
    Bench,
    Models,
    always,
    check_state,
    last,
    never,
    run,
    scattered,
)
from tests.runners.blocks import block_draft

SHAPES = [Speculation(steps, topk) for steps in (1, 2, 3, 4) for topk in (1, 3)]
ARMS = [
    ("eager", "eager", False),
    ("full", "graph", False),
    ("full", "fused", True),
    ("full", "eager", False),
    ("breakable", "graph", True),
]
BLOCK_ARMS = [
    ("eager", "sampler inside", False),
    ("full", "sampler inside", True),
    ("full", "sampler outside", False),
    ("breakable", "sampler inside", False),
    ("breakable", "sampler outside", True),
]
OUTSIDE = {("seed_step", "eager"), ("draft_sampler", "sampler outside")}
CASES = [(speculation, *arm) for speculation in (Speculation(3, 1), Speculation(3, 3), Speculation(1, 1))
         for arm in ARMS + BLOCK_ARMS * (speculation.topk == 1)]  # fmt: skip
drafters = pytest.mark.parametrize("seed", ["graph", "sampler inside"], ids=["assistant", "block"])


@pytest.fixture
def kind():
    """What these tests run on."""
    return Bench


@functools.cache
def plainly_decoded(device):
    """Plain decoding's tokens of ``PROMPTS`` on one device, with window layers and without."""
    found = {
        windowed: Bench(device, windowed=windowed).engine().generate(PROMPTS, LIMITS).tokens
        for windowed in (False, True)
    }
    assert found[False] != found[True] and all(len(set(tokens)) > 4 for tokens in found[False])
    return found


@pytest.fixture
def plain(device):
    """What plain decoding says on the test's device."""
    return plainly_decoded(device)


@pytest.mark.parametrize(("speculation", "backend", "seed", "windowed"), CASES, ids=str)
def test_no_draft_changes_a_token_captured_or_not(bench, plain, speculation, backend, seed, windowed):
    engine = bench(windowed=windowed, buckets=(2, 4)).engine(speculation, backend=backend, seed=seed)
    result = engine.generate(PROMPTS, LIMITS)
    assert result.tokens == plain[windowed]
    assert result.coverage.steps == 0, "nothing is decoded without a draft"
    steps = len(result.timings.steps)
    names = (
        {"block_draft", "draft_sampler"}
        if seed in SAMPLERS
        else {"draft_loop", "seed_step"} - ({"seed_step"} if seed == "fused" else set())
    )
    assert set(result.speculation) == {"verify"} | names
    for name, coverage in result.speculation.items():
        eager = backend == "eager" or (name, seed) in OUTSIDE
        assert (coverage.steps, coverage.captured) == (steps, 0 if eager else steps)
    assert result.accepted.passes.total() == sum(result.timings.step_batches)
    assert result.as_dict()["accepted"]["passes"] and "tokens per verify pass" in str(result)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("column", [always, never, last, scattered])
@pytest.mark.parametrize("speculation", SHAPES, ids=str)
@pytest.mark.parametrize("seed", ["fused", "sampler inside"], ids=["assistant", "block"])
def test_any_draft_gives_the_tokens_and_the_state_of_plain_decoding(
    bench, plain, speculation, column, windowed, seed
):
    if speculation.topk == 1 and column is last:
        pytest.skip("a chain has one branch")
    if speculation.topk > 1 and seed in SAMPLERS:
        pytest.skip("a block is a chain")

    def place(request, position):
        wanted = column(request, position)
        return wanted if wanted is None else min(wanted, speculation.topk - 1)

    engine = bench(windowed=windowed).engine(speculation, draft=(plain[windowed], place), seed=seed)
    assert run(engine, PROMPTS, LIMITS) == plain[windowed]
    accepted = engine.speculator.accepted
    if column is never:
        assert set(accepted.passes) == {1}
    if column is always and speculation.topk == 1:
        # The last pass of a request drafts beyond what is known.
        cut = sum(times for length, times in accepted.passes.items() if length <= speculation.steps)
        assert cut <= len(PROMPTS)
    if column is last and speculation.steps > 1:
        assert max(accepted.passes) > 1, "and nodes were moved"


@pytest.mark.parametrize("speculation", [Speculation(3), Speculation(3, 3)], ids=str)
def test_b47_the_first_draft_after_a_prompt_of_one_token(bench, speculation):
    """One token in the cache is all that there is to attend to; and a request of one token never drafts."""
    wanted = bench().engine().generate([[4], [9]], [3, 1]).tokens
    engine = bench(buckets=(2,)).engine(speculation, backend="full", seed="graph")
    got = engine.generate([[4], [9]], [3, 1])
    assert got.tokens == wanted
    assert got.accepted.passes.total() == got.speculation["seed_step"].captured in (1, 2)
    assert got.accepted.completions.total() == 1


@pytest.mark.filterwarnings("ignore:.* different sizes ran eager")
def test_b72_a_shrinking_batch_equals_plain_decoding_at_every_size(bench):
    prompts = [[1 + i, 2 + i * i % 40] for i in range(32)]
    limits = [3 + 4 * (i % 8) + i // 16 for i in range(32)]
    sizes = {"rows": 33, "pages": 33 * 12}
    wanted = bench(**sizes).engine(budget=64).generate(prompts, limits)
    for speculation, buckets, seed in (
        (Speculation(3), (1, 2, 4, 8), "graph"),
        (Speculation(2, 3), (1, 2, 4, 8, 16, 32), "graph"),
        (Speculation(3), (1, 2, 4, 8), "sampler inside"),
    ):
        engine = bench(**sizes, buckets=buckets).engine(speculation, backend="full", seed=seed, budget=64)
        got = engine.generate(prompts, limits)
        assert got.tokens == wanted.tokens
        batches = got.timings.step_batches
        assert batches == sorted(batches, reverse=True) and len(set(batches)) > 8
        fitting = [size for size in batches if size <= max(buckets)]
        ran = {min(bucket for bucket in buckets if bucket >= size) for size in fitting}
        assert len(ran) >= len(buckets) - 1  # another draft ends requests in other waves
        above = len(batches) - len(fitting)
        for coverage in got.speculation.values():
            assert coverage.reasons == ({"ABOVE_LARGEST": above} if above else {})
            assert set(buckets) - set(coverage.unused(buckets)) == ran


def test_b77_a_schedule_of_3_2_1_0_drafts_is_plain_decoding(bench, plain):
    for speculation, seed in (
        (Speculation(3), "graph"),
        (Speculation(3, 3), "graph"),
        (Speculation(3), "sampler inside"),
    ):
        engine = bench().engine(speculation, draft=(plain[False], always), seed=seed)
        speculator, seen = engine.speculator, []
        speculator.draft_count = 3
        requests = [Request(i, list(p), n) for i, (p, n) in enumerate(zip(PROMPTS, LIMITS, strict=True))]
        for request in requests:
            engine.submit(request)
        while not engine.idle:
            before = speculator.accepted.copy()
            engine.step()
            since = speculator.accepted - before
            seen += [(speculator.draft_count, since.passes, since.placeholders)]
            speculator.draft_count = (speculator.draft_count - 1) % 4
        assert [request.output for request in requests] == plain[False]
        for count, passes, placeholders in seen:
            assert set(passes) <= set(range(1, count + 2))
            if speculation.topk == 1:
                assert placeholders == (3 - count) * passes.total()
        assert {length for _, passes, _ in seen for length in passes} >= {1, 2, 3, 4}


@drafters
def test_b77_without_a_draft_no_draft_model_is_asked(bench, plain, seed):
    engine = bench().engine(Speculation(3), seed=seed)
    engine.speculator.draft_count = 0
    result = engine.generate(PROMPTS, LIMITS)
    assert result.tokens == plain[False]
    verify = result.speculation.pop("verify")
    assert result.speculation and not any(coverage.steps for coverage in result.speculation.values())
    assert verify.steps == 29 and set(result.accepted.passes) == {1}
    assert result.accepted.proposed == 0 and result.accepted.accept_rate is None


@drafters
def test_b71_b75_uneven_drafts_are_filled_up_with_placeholders_in_one_captured_step(bench, plain, seed):
    engine = bench().engine(Speculation(3), draft=(plain[False], always), backend="full", seed=seed)
    requests = [Request(i, list(PROMPTS[i]), 9, drafts=drafts) for i, drafts in enumerate((3, 1, 2, 0))]
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    before = [len(request.output) for request in requests]
    engine.step()
    grown = [len(request.output) - count for request, count in zip(requests, before, strict=True)]
    assert grown == [4, 2, 3, 1], "a draft of each one's own length, all right"
    while not engine.idle:
        engine.step()
    assert [request.output for request in requests] == [tokens[:9] for tokens in plain[False]]
    assert engine.speculator.runners["verify"].coverage().eager == 0
    assert engine.speculator.accepted.placeholders > 0


@pytest.mark.parametrize("count", [-1, 4, True, 1.0])
def test_a_draft_count_that_cannot_be_is_refused(bench, count):
    speculator = bench().engine(Speculation(3)).speculator
    with pytest.raises(InputError, match="draft_count is 0 to 3"):
        speculator.draft_count = count
    assert speculator.draft_count == 3


def test_b78_only_live_rows_are_accepted(bench, plain):
    """Three requests in a bucket of four: nothing is counted of the fourth row, or written for it."""
    engine = bench(buckets=(4,)).engine(Speculation(3), backend="full")
    result = engine.generate(PROMPTS[:3], 8)
    assert result.tokens == [tokens[:8] for tokens in plain[False][:3]]
    assert result.speculation["verify"].padding == {"4": pytest.approx(1 / 4, abs=0.2)}
    assert result.accepted.passes.total() == sum(result.timings.step_batches)
    assert torch.isnan(engine.speculator.drafter.hidden[0]).all(), "the reserved row"


@pytest.mark.parametrize("pinned", [1.0, 2.5, 3.13, 4.0])
@drafters
def test_p69_pinned_acceptance_forces_the_commit_length_and_everything_that_follows_from_it(
    bench, pinned, seed
):
    engine = bench(rows=5).engine(Speculation(3, pinned=pinned), seed=seed)
    requests = [Request(i, list(prompt), 40) for i, prompt in enumerate(PROMPTS[:3])]
    for request in requests:
        engine.submit(request)
    engine.step()
    while not engine.idle:
        before = [(request.computed, len(request.output)) for request in requests]
        engine.step()
        check_state(engine)  # of the forced tokens
        for request, (computed, length) in zip(requests, before, strict=True):
            if request.finish is None:
                assert (
                    request.computed - computed
                    == len(request.output) - length
                    in (int(pinned), int(pinned) + 1)
                )
    accepted = engine.speculator.accepted
    assert abs(accepted.tokens_per_pass - pinned) < 0.1 and accepted.pinned == pinned
    assert [len(request.output) for request in requests] == [40] * 3


def test_pinned_tokens_are_the_drafts_themselves(bench, plain):
    wrong = [[(token + 7) % 97 for token in tokens] for tokens in plain[False]]
    engine = bench().engine(Speculation(3, pinned=3.0), draft=(wrong, always), budget=32)
    requests = [Request(i, list(prompt), 9) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    for request in requests:
        assert request.output[0] == plain[False][request.index][0]
        assert request.output[1:3] == wrong[request.index][1:3] and len(request.output) == 4


def test_stop_tokens_and_limits_cut_an_accepted_run(bench, plain):
    draft = (plain[False], always)
    stop = plain[False][3][5]
    engine = bench().engine(Speculation(4), draft=draft)
    result = engine.generate(PROMPTS, [7, 6, 12, 30], stops=[stop])
    for tokens, whole, limit, finish in zip(
        result.tokens, plain[False], [7, 6, 12, 30], result.finish, strict=True
    ):
        cut = whole[: min(limit, whole.index(stop) + 1 if stop in whole else limit)]
        assert tokens == cut and finish == ("stop" if cut[-1] == stop else "length")
    accepted = result.accepted
    assert accepted.completions.total() == 4
    committed = sum(length * times for length, times in accepted.passes.items())
    assert committed > sum(len(tokens) - 1 for tokens in result.tokens), "passes are counted before the cut"


@pytest.mark.parametrize(("speculation", "seed", "column"), [(Speculation(3, 3), "graph", scattered),
                                                            (Speculation(3), "sampler inside", always)])  # fmt: skip
def test_a_second_turn_finds_what_was_accepted_in_the_first(bench, plain, speculation, seed, column):
    one = bench()
    engine = one.engine(speculation, draft=(plain[False], column), seed=seed)
    engine.generate(PROMPTS, LIMITS)
    turn = [*PROMPTS[3], *plain[False][3], 5, 6]
    wanted = bench().engine().generate([turn], 4).tokens
    again = engine.scheduler.memory.pages.match(turn[:-1])
    assert len(again) == (len(turn) - 3) // 4
    engine.speculator.phases.prophet.outputs = wanted
    request = Request(0, turn, 4)
    for event in engine.stream([request]):
        if event.finish is None:
            check_state(engine)  # the pages that were found are the draft's as well
    assert [request.output] == wanted and request.reused == 4 * len(again)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(("speculation", "seed"), [(Speculation(3), "graph"), (Speculation(4, 3), "graph"),
                                                   (Speculation(7), "sampler inside")], ids=str)  # fmt: skip
def test_a_request_may_fill_the_room_and_not_one_token_more(bench, speculation, seed, windowed):
    """The last drafts reach the end of the page table and of the rotary table, which has 64 rows."""
    engine = bench(windowed=windowed).engine(speculation, backend="full", seed=seed)
    room = 64 - speculation.lookahead
    prompts = [[1, 2, 3]]
    with pytest.raises(
        InputError, match=rf"do not fit into a context of {room} \({speculation.lookahead} more"
    ):
        engine.generate(prompts, room - 2)
    wanted = bench(windowed=windowed).engine().generate(prompts, room - 3).tokens
    assert engine.generate(prompts, room - 3).tokens == wanted


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(("mixed", "budget"), [(False, 8), (False, 5), (True, 8)])
def test_requests_that_gave_way_or_rode_along_end_with_the_same_tokens(bench, mixed, windowed, budget):
    """With a budget of 5 a chunk of one that comes back ends right before its newest token."""
    prompts = [[i + 1, 7, 9] for i in range(6)] + [[3] * 17]
    limits = [14] * 7
    wanted = bench(windowed=windowed).engine().generate(prompts, limits).tokens
    for speculation, column, seed in ((Speculation(3), always, "graph"), (Speculation(2, 3), scattered, "graph"),
                                      (Speculation(3), always, "sampler inside")):  # fmt: skip
        engine = bench(windowed=windowed, pages=17, rows=6).engine(
            speculation, draft=(wanted, column), mixed=mixed, budget=budget, seed=seed
        )
        requests = [Request(i, list(p), n) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]
        for request in requests:
            engine.submit(request)
        while not engine.idle:
            engine.step()
            check_state(engine)
            engine.scheduler.check_invariants()
        assert [request.output for request in requests] == wanted
        assert sum(request.preemptions for request in requests) > 0
    assert engine.scheduler.memory.rows.free == engine.scheduler.memory.rows.total


def test_a_cancelled_request_and_a_failed_step_leave_the_others_right(bench, plain, monkeypatch):
    engine = bench().engine(Speculation(3), draft=(plain[False], always))
    requests = [Request(i, list(p), n) for i, (p, n) in enumerate(zip(PROMPTS, LIMITS, strict=True))]
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    prophet, whole = engine.speculator.phases.prophet, engine.speculator.phases.prophet.run

    def cancels(*args, **inputs):
        engine.cancel(requests[0])
        return whole(*args, **inputs)

    monkeypatch.setattr(prophet, "run", cancels)
    engine.step()
    monkeypatch.undo()
    assert (
        requests[0].finish == "cancelled" and requests[0].output == plain[False][0][: len(requests[0].output)]
    )
    late = Request(4, list(PROMPTS[1]), 20)
    prophet.outputs = [*plain[False], plain[False][1]]
    engine.submit(late)  # in the row that came free, with a state of its own
    engine.step()
    check_state(engine)
    while not engine.idle:
        engine.step()
    assert [r.output for r in requests[1:]] == plain[False][1:] and late.output == plain[False][1]
    engine.submit(Request(5, [1], 9))
    engine.step()
    monkeypatch.setattr(engine.speculator, "_move", lambda *_: 1 / 0)
    prophet.outputs.append([])
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.scheduler.check_invariants()
    assert engine.scheduler.idle


@drafters
def test_p66_only_greedy_requests_are_taken_so_a_sampler_has_no_parameters_to_be_staged(bench, seed):
    engine = bench().engine(Speculation(3), seed=seed)
    with pytest.raises(
        InputError, match=r"prompt 0 is sampled at temperature 0.7, and drafts are accepted greedily"
    ):
        engine.submit(Request(0, [1], 4, Sampling(0.7)))
    assert engine.idle


@pytest.mark.parametrize("drafts", [-1, 1.5, True])
def test_a_number_of_drafts_that_makes_no_sense_is_refused(bench, drafts):
    with pytest.raises(InputError, match="may use .* drafts a step"):
        bench().engine(Speculation(3)).submit(Request(0, [1], 4, drafts=drafts))


def test_a_draft_for_another_target_is_refused(device):
    one, other = Models(device), Models(device)
    drafter = AssistantDrafter(other.assistant, other.kv, None, Speculation(3))
    with pytest.raises(ModelError, match="bound to another target"):
        Speculator(one.target, drafter, one.kv, None, Speculation(3))


@pytest.mark.parametrize(
    "speculation", [Speculation(2), Speculation(4), Speculation(3, 2, tokens=4)], ids=str
)
def test_a_speculation_that_is_no_block_is_refused(device, speculation):
    draft = block_draft(Models(device).target)
    with pytest.raises(InputError, match=r"blocks of 4 are no draft.*give Speculation\(steps=3\)"):
        BlockDrafter(draft, None, speculation)


@pytest.mark.parametrize(("seed", "kinds"), [("graph", ["seed_step", "draft_loop", "verify"]),
                                             ("fused", ["draft_loop", "verify"]),
                                             ("sampler inside", ["block_draft", "verify"]),
                                             ("sampler outside", ["block_draft", "verify"])])  # fmt: skip
def test_every_forward_is_a_segment_of_its_own_kind(bench, seed, kinds):
    engine = bench().engine(Speculation(3), seed=seed)
    engine.generate([[1, 2]], 3)
    found = [segment.kind for segment in engine.segments.drain()]
    assert found[:1] == ["prefill"] and found[1 : 1 + len(kinds)] == kinds
    assert len(found) == 1 + 2 * len(kinds)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(("backend", "seed"), [arm[:2] for arm in BLOCK_ARMS])
def test_p83_a_sampler_outside_of_the_graph_is_timed_as_forward_or_shows_as_idle(
    bench, monkeypatch, backend, seed, timed
):
    """Whether a segment is open while the sampler runs: in a graph it always is; no segments nest."""
    engine = bench().engine(Speculation(3), backend=backend, seed=seed, timed=timed)
    engine.generate([[1, 2]], 5)
    runner, open_then = engine.speculator.drafter.runners["block_draft"], []
    sample = DraftSampler.__call__
    watched = lambda self, hidden: open_then.append(engine.segments._open) or sample(self, hidden)  # noqa: E731
    monkeypatch.setattr(DraftSampler, "__call__", watched)
    engine.segments.drain()
    steps = len(engine.generate([[1, 2]], 5).timings.steps)
    found = [segment.kind for segment in engine.segments.drain()]
    assert found == ["prefill"] + ["block_draft", "verify"] * steps
    inside = runner.sampler.why_eager is None
    if inside and backend != "eager":
        assert open_then == [] and runner.sampling().eager == 0, "replayed"
    else:
        assert open_then == [inside or timed] * steps and runner.sampling().captured == 0


@pytest.mark.parametrize(("seed", "phases"), [("graph", ["seed_step", "draft_loop", "verify"]),
                                              ("fused", ["draft_loop", "verify"]),
                                              ("sampler inside", ["block_draft", "verify"]),
                                              ("sampler outside", ["block_draft", "verify"])])  # fmt: skip
def test_each_phase_of_a_step_can_be_held_and_repeated(bench, seed, phases):
    engine = bench().engine(Speculation(3), backend="full", seed=seed)
    runners = engine.speculator.runners
    assert [*runners] == phases
    for name in phases:
        with steady_draft(engine, name, 2, 12) as step:
            first, again = ([leaf.clone() for leaf in runners[name].run(step.live, **step.inputs) if leaf is not None]
                            for _ in range(2))  # fmt: skip
            assert all(map(torch.equal, first, again)) and first
        assert runners[name].coverage().captured == 2 and runners[name].coverage().eager == 0
    before = engine.speculator.accepted.copy()
    with steady_speculation(engine, 2, 12) as step:
        assert step() == step()
    assert engine.speculator.accepted.passes == before.passes
    assert engine.scheduler.memory.rows.free == engine.scheduler.memory.rows.total


@pytest.mark.parametrize(("speculation", "seed"), [(Speculation(3), "graph"), (Speculation(3, 3), "graph"),
                                                   (Speculation(3), "sampler inside"),
                                                   (Speculation(3), "sampler outside")], ids=str)  # fmt: skip
def test_a_step_reads_the_device_once(bench, monkeypatch, speculation, seed):
    engine = bench().engine(speculation, seed=seed)
    engine.submit(Request(0, [1, 2], 9))
    engine.step()
    reads = []
    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "numpy"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda tensor, *args, read=read, name=name: reads.append(name) or read(tensor, *args),
        )
    engine.step()
    assert reads == ["tolist"]
    monkeypatch.undo()
    engine.abandon([])
