"""The NextN draft extend: captured against eager, what padding never touches, and the seed that a break publishes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.errors import AddressError, InputError
from cglab.graphs.coverage import Reason
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.lab.poison import poison
from cglab.models.indexer import KeyRanges
from cglab.models.sparse import Breaks, LiveKeys, SparseAttention
from cglab.runners import draft_extend
from cglab.runners.block_draft import LEAST_FREE
from cglab.runners.draft_extend import DraftExtendRunner

from .extends import ExtendWorld
from .test_dsa_prefill import ARMS

BUCKETS = (2, 4, 8, 16)
BROKEN = {name: parts for name, parts in ARMS.items() if parts.select}
arms = pytest.mark.parametrize("arm", BROKEN)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def make(device):
    """Makes worlds and closes them."""
    made = []

    def make(backend="breakable", buckets=BUCKETS, *, arm="T8 and T9", floor=0, **options):
        about = {"parts": ARMS[arm], "floor": floor}
        made.append(ExtendWorld(device, backend, buckets, settings=about, **options))
        made[-1].runner.capture()
        return made[-1]

    make.made = made
    yield make
    for one in made:
        one.close()


def check(one, spans):
    """One captured extend equals padded eager to the bit: hidden states, the seed, and the cache but for slot 0."""
    before = one.cache()
    got, seed, after = one.step(spans), one.runner.seed.clone(), one.cache()
    one.restore(before)
    one.runner.seed.fill_(-7)
    size = one.runner.captured.pad(sum(length for _, _, length in spans))
    wanted = one.step(spans, lambda live, **values: one.runner.run_padded_eager(live, size, **values))
    assert same_bits(got, wanted), spans
    assert all(same_bits(a[:, 1:], b[:, 1:]) for a, b in zip(after, one.cache(), strict=True)), spans
    rows = [row for row, _, _ in spans]
    assert torch.equal(seed[rows], one.runner.seed[rows]), spans
    return got


def spans_of(lengths, starts=(0, 11, 3, 5, 1, 7, 2, 6)):
    """Requests of rows 1, 2, ... with so many new tokens; some have tokens in the cache, as many as fit."""
    return [(row, min(starts[row - 1], 16 - length), length) for row, length in enumerate(lengths, 1)]


@arms
@dtypes
def test_every_live_size_of_every_bucket_is_bitwise(make, arm, dtype):
    """Around every bucket edge, below and above the six keys that are kept, fresh and cached, alone and together."""
    one = make(arm=arm, dtype=dtype)
    cases = [[(1, 0, n)] for n in range(1, 17)] + [[(2, 8, n)] for n in range(1, 9)]
    cases += [
        spans_of(lengths) for lengths in ((1, 1), (2, 1, 2), (1,) * 8, (2,) * 8, (5, 4, 3, 2, 1), (7, 1))
    ]
    for spans in cases:
        check(one, spans)
    assert one.runner.coverage().captured == len(cases) and one.runner.coverage().eager == 0


@settings(max_examples=15)
@given(steps=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=6))
def test_p15_batches_that_grow_and_shrink_are_bitwise(make, steps):
    one = make.made[0] if make.made else make()
    for lengths in steps:
        check(one, spans_of(lengths))
    assert one.runner.coverage().eager == 0


@arms
def test_a_live_extend_is_the_padded_one_but_for_rounding(make, arm):
    one = make(arm=arm)
    for spans in ([(1, 0, 3)], [(1, 3, 8), (2, 0, 3)], [(3, 0, 1), (4, 9, 4)]):
        before = one.cache()
        got = one.step(spans)
        one.restore(before)
        live = one.step(spans, one.runner.run_live_eager)
        torch.testing.assert_close(got, live, atol=1e-5, rtol=1e-5)
        assert torch.equal(
            one.runner.drafts(got, one.spans(spans)), one.runner.drafts(live, one.spans(spans))
        )


def test_t10_chunks_of_a_prompt_leave_what_the_whole_prompt_leaves(make):
    """Twelve tokens at once; or five, one and six, which are other buckets."""
    one = make()
    whole = one.step([(1, 0, 12)])
    cache = one.draft_kv.full.keys[:, one.slots_of(1)[:12]].clone()
    parts = [one.step([(1, start, length)]).clone() for start, length in ((0, 5), (5, 1), (6, 6))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.draft_kv.full.keys[:, one.slots_of(1)[:12]], cache, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_p36_the_seed_is_published_at_each_replay_and_is_the_selection_of_each_last_token(make):
    """As Python's assignment it would be that of the capture; beside it, the same step run plainly."""
    one, seen = make(), []
    for spans in ([(1, 0, 9), (2, 11, 3)], [(2, 3, 5)], [(1, 9, 2), (3, 0, 4), (2, 8, 1)]):
        before, others = one.cache(), one.runner.seed.clone()
        one.step(spans)
        seed = one.runner.seed.clone()
        one.restore(before)
        values, live = one.inputs(spans), one.spans(spans)
        attend = SparseAttention(
            one.draft_kv, out_slots=values.pop("out_slots"), keys=LiveKeys(KeyRanges.of(live, one.kv.full)),
            breaks=Breaks(), index_topk=6,
        )  # fmt: skip
        one.layer(**values, attend=attend)
        ends = torch.tensor([span.length for span in live]).cumsum(0) - 1
        rows = [span.row for span in live]
        assert torch.equal(seed[rows].cpu(), attend.selected[ends.to(one.device)].cpu())
        idle = [row for row in range(1, 9) if row not in rows]
        assert torch.equal(seed[idle], others[idle]), "what others were given stays"
        seen.append(seed[2].tolist())
    assert len({str(each) for each in seen}) == 3 and one.runner.coverage().captured == 3


def test_p78_padded_rows_store_nothing_and_select_nothing(make):
    one = make()
    one.step([(1, 0, 16)])
    spans, before = [(4, 8, 3), (2, 0, 2)], one.cache()
    one.step(spans)
    slots = set(one.inputs(spans)["out_slots"].tolist())
    for cache, old in zip(one.draft_kv.caches().values(), before, strict=True):
        changed = (cache != old).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
        assert set(changed) - {0} == slots, "five tokens in a bucket of eight"


def test_oracle_3_poisoned_padding_reaches_no_live_row(make):
    one = make()
    spans = [(1, 3, 2), (2, 0, 3)]
    clean, seed, before = one.step(spans), one.runner.seed[1:3].clone(), one.cache()
    one.restore(before)
    with poison(one.runner, one.draft_kv, one.spans(spans), one.inputs(spans)):
        dirty = one.step(spans)
    assert same_bits(clean, dirty) and torch.equal(seed, one.runner.seed[1:3])


@pytest.mark.parametrize("moved", ["embedding", "join", "page_table", "seed"])
def test_p85_what_was_recorded_may_not_move_but_weights_may_be_loaded_in_place(make, moved):
    one = make(buckets=(4,))
    spans = [(1, 0, 3)]
    old = one.step(spans)
    for weight in (one.model.embedding.weight, one.layer.join.weight):
        weight.mul_(1.5)
    check(one, spans)
    assert not torch.equal(one.step(spans), old)
    if moved == "page_table":
        one.draft_kv.full.page_table = one.kv.full.page_table.clone()
    elif moved == "seed":
        one.runner.seed = one.runner.seed.clone()
    else:
        owner = one.model if moved == "embedding" else one.layer
        weight = getattr(owner, moved).weight
        weight.data = weight.data.clone()
    with pytest.raises(AddressError, match=moved):
        one.step(spans)


def test_an_extend_above_the_limit_or_switched_off_runs_eager_and_says_why(make):
    one = make(buckets=(4, 8))
    live = one.step([(1, 0, 9)])
    assert one.runner.coverage().last_facts == {Reason.ABOVE_LIMIT.name: "9 tokens, captured up to 8"}
    off = make(buckets=(4, 16), kill_switch="CGLAB_DISABLE_NEXTN_GRAPH=1")
    assert same_bits(live, off.step([(1, 0, 9)]))
    assert off.runner.coverage().last_facts == {Reason.KILL_SWITCH.name: "CGLAB_DISABLE_NEXTN_GRAPH=1"}


def test_p71_without_memory_for_a_capture_the_extend_runs_eager_and_says_so(make, monkeypatch):
    monkeypatch.setattr(draft_extend, "free_memory", lambda device: LEAST_FREE // 2)
    one = make()
    one.step([(1, 0, 2)])
    assert one.runner.coverage().last_facts == {Reason.LITTLE_MEMORY.name: "0.50 GiB free, 1 wanted"}


@pytest.mark.parametrize(
    ("backend", "arm", "told"),
    [
        ("full", "T8 and T9", "backend full would record a selection"),
        ("breakable", "T9b", "publish the seed of its"),
    ],
)
def test_p37_an_extend_whose_selection_is_recorded_is_refused(make, backend, arm, told):
    one = make("eager")
    with pytest.raises(InputError, match=told):
        DraftExtendRunner(one.layer, one.draft_kv, one.group, (4,), Options(backend), parts=ARMS[arm])


def test_p81_below_the_floor_all_parts_stay_breaks(make):
    one = make(floor=8)
    assert all(check(one, [(1, 0, n)]).isfinite().all() for n in (3, 7, 12))
    attends = [sum("_attend" in line for line in one.runner.captured.inspect(size)) for size in (4, 8, 16)]
    assert attends == [1, 0, 0]
