"""T8, T9 and T9b: the arms of a sparse prefill against padded eager and against each other, and what they refuse."""

from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cglab.errors import AddressError, InputError
from cglab.graphs.out_forms import same_bits
from cglab.models.indexer import Indexer
from cglab.runners.dsa_policy import measured_floor
from cglab.runners.dsa_prefill import DsaPrefillRunner
from tests.models.latent import TINY
from tests.runners.conftest import worlds as worlds_of
from tests.runners.latent import ARMS, LatentPrefillWorld
from tests.runners.splits import BUCKETS, ROOM, SPLITS, check, check_all, same_cache, splits

BREAKS = {  # of three layers with an indexer, one that shares a selection, and three with experts
    "experts too": {"_prepare_and_select": 3, "_attend": 4, "_route": 3},
    "breaks": {"_prepare_and_select": 3, "_attend": 4},
    "T8": {"_prepare_and_select": 3},
    "T8 and T9": {"_select": 3},
    "T9b": {},
}
arms = pytest.mark.parametrize("arm", ARMS)


@pytest.fixture
def latent_prefills(device):
    """Makes worlds with a prefill runner of latent attention and closes them."""
    yield from worlds_of(device, LatentPrefillWorld)


@pytest.fixture
def worlds(latent_prefills):
    """Makes worlds of an arm."""

    def make(arm, *, floor=0, lazy=True, settings=None, **options):
        settings = {"parts": ARMS[arm], "floor": floor, **ROOM, **(settings or {})}
        one = latent_prefills("breakable", BUCKETS, lazy=lazy, settings=settings, **options)
        one.arm = arm
        return one

    make.made = latent_prefills.made
    return make


@arms
@settings(max_examples=8)
@given(steps=st.lists(splits(), min_size=1, max_size=4))
@example(steps=SPLITS)
def test_p37_p39_one_recording_serves_every_split_and_length_bitwise(worlds, arm, steps):
    check_all(next((world for world in worlds.made if world.arm == arm), None) or worlds(arm), steps)


@arms
def test_what_is_left_of_the_breaks(worlds, arm):
    one = worlds(arm, lazy=False)
    names = [line.split()[1] for line in one.runner.captured.inspect(16) if line.startswith("break ")]
    assert Counter(names) == BREAKS[arm]


def alike(one, reference, spans):
    """Whether a step is the same in two worlds to the bit, the cache too; both are then as they were at first."""
    outcomes = []
    for world in (one, reference):
        start = world.cache()
        outcomes.append((world.step(spans), world.cache()))
        world.restore(start)
    (got, after), (wanted, expected) = outcomes
    return same_bits(got, wanted) and same_cache(after, expected)


def differing(one, reference):
    """Buckets in which some live size is not, to the bit, what it is in another world."""
    steps = [[(1, 7, live - 1), (2, 3, 1)] for live in (2, 3, 4, 5, 8, 9)]
    steps += [[(1, 0, live - 3), (2, 6, 3)] for live in (11, 14, 16)]
    return {
        one.runner.captured.pad(sum(length for *_, length in spans))
        for spans in steps
        if not alike(one, reference, spans)
    }


@pytest.mark.parametrize(
    ("arm", "dtype"),
    [*((arm, torch.float32) for arm in ARMS if arm != "breaks"), ("T9b", torch.bfloat16)],
)
def test_p81_from_the_measured_floor_on_an_arm_is_bitwise_the_one_with_breaks(worlds, arm, dtype):
    """Without padding in every bucket; with padding from the floor on, which is this machine's."""
    options = {"dtype": dtype, "self_check": False}
    reference, recorded = worlds("breaks", **options), worlds(arm, **options)
    assert all(alike(recorded, reference, [(1, 0, size)]) for size in BUCKETS)
    if arm == "experts too":  # S3 has no such arm: its experts are recorded in all of them
        found, wanted = (world.step([(1, 0, 11)]) for world in (recorded, reference))
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        return
    floor = measured_floor(BUCKETS, differing(recorded, reference))
    assert not differing(worlds(arm, floor=floor, **options), reference)


def test_p81_kernels_that_change_with_the_rows_raise_the_floor(worlds, monkeypatch):
    """A library that computes otherwise for up to six rows: buckets of up to eight tokens keep their breaks."""
    prepare = Indexer.prepare

    def by_rows(self, hidden, query_latent, turn):
        rows = prepare(self, hidden, query_latent, turn)
        return rows if len(hidden) > 6 else rows._replace(key=rows.key * (1 + 2**-20))

    monkeypatch.setattr(Indexer, "prepare", by_rows)
    reference, recorded = worlds("breaks", self_check=False), worlds("T8 and T9", self_check=False)
    floor = measured_floor(BUCKETS, differing(recorded, reference))
    assert floor == 16
    assert not differing(worlds("T8 and T9", floor=floor, self_check=False), reference)


@pytest.mark.parametrize("arm", ["T8", "T8 and T9", "T9b"])
def test_p81_below_the_floor_every_part_is_a_break_and_counted_with_its_reason(worlds, arm):
    one = worlds(arm, floor=8, lazy=False)
    for size, wanted in ((16, BREAKS[arm]), (4, BREAKS["breaks"])):
        lines = one.runner.captured.inspect(size)
        assert Counter(line.split()[1] for line in lines if line.startswith("break ")) == wanted
    for spans in ([(1, 0, 16)], [(1, 0, 3)], [(2, 9, 4)]):
        check(one, spans)
    counted = one.runner.coverages()
    assert (counted["prefill"].captured, counted["prefill"].eager) == (3, 0)
    attention, preparation = counted["dsa_attention"], counted["dsa_indexer_prep"]
    assert attention.hits == {"16/prefill": 1} and attention.reasons == {"BELOW_FLOOR": 2}
    assert attention.last_facts["BELOW_FLOOR"] == "bucket 4, floor 8"
    assert preparation.reasons == ({"BACKEND_EAGER": 3} if arm == "T8" else {"BELOW_FLOOR": 2})


@arms
def test_p27_b25_nothing_but_the_requests_own_tokens_is_read(worlds, arm):
    """NaN in every slot that the live requests have not filled: the reserved page, their own tails, all others."""
    one = worlds(arm)
    for spans in ([(4, 11, 2), (2, 0, 1), (7, 3, 3)], [(1, 2, 2)]):
        before = one.cache()
        clean = one.step(spans)
        one.restore(before)
        known = {slot for row, start, length in spans for slot in one.slots_of(row)[: start + length]}
        unknown = [slot for slot in range(one.kv.full.keys.shape[1]) if slot not in known]
        for cache in one.kv.caches().values():
            cache[:, unknown] = float("nan")
        assert same_bits(one.step(spans), clean) and not clean.isnan().any()
        one.restore(before)


@arms
def test_p78_a_padded_step_writes_its_own_slots_and_slot_zero_only(worlds, arm):
    one = worlds(arm)
    one.step([(1, 0, 16)])
    before, spans = one.cache(), [(4, 11, 3), (2, 0, 2)]
    one.step(spans)
    for cache, kept in zip(one.cache(), before, strict=True):
        changed = (cache != kept).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
        assert set(changed) - {0} == set(one.inputs(spans)["out_slots"].tolist())


@arms
def test_p39_p45_keys_are_looked_up_anew_by_the_next_step(worlds, arm):
    """Equal spans over a page table that changed in place: row 1 owns the pages of row 2 now."""
    one = worlds(arm)
    first = check(one, [(1, 9, 4)])
    assert one.runner.keys.tokens == 0
    one.kv.full.page_table[1] = one.kv.full.page_table[2]
    assert not torch.equal(check(one, [(1, 9, 4)]), first)


@arms
def test_p80_a_step_waits_for_all_that_is_loaded_back_before_it_begins(worlds, arm):
    one = worlds(arm)
    start = one.cache()
    wanted = one.step([(1, 9, 4)])
    one.restore(start)
    back = one.cache()
    for cache in one.kv.caches().values():
        cache[:, one.slots_of(1)] = float("nan")

    class Loading:
        def wait(self):
            one.restore(back)

    one.group.expect(Loading())
    assert same_bits(one.step([(1, 9, 4)]), wanted)


@arms
def test_p82_what_a_step_read_may_be_overwritten_once_it_returns(worlds, arm):
    one = worlds(arm)
    spans, values = [(1, 9, 4), (2, 0, 3)], one.inputs([(1, 9, 4), (2, 0, 3)])
    start = one.cache()
    wanted = one.step(spans)
    one.restore(start)
    got = one.step(spans, lambda live, **_: one.runner.run(live, **values))
    for value in values.values():
        value.fill_(1)
    one.kv.full.page_table.fill_(0)
    assert same_bits(got, wanted)


@arms
def test_b81_p37_a_short_step_is_dense_in_every_arm_and_a_recording_never_is(worlds, arm):
    """Dense or sparse is decided once: the captured arm and the eager one have the same answer, to the bit."""
    one = worlds(arm, settings={"dense_short": True})
    live = [(1, 2, 4), (2, 0, 3)]
    before = one.cache()
    got = one.step(live)
    one.restore(before)
    assert one.runner.coverage().reasons == {"SHORT_DENSE": 1}
    assert one.runner.coverage().last_facts["SHORT_DENSE"] == "6 keys at most, 6 are kept"
    assert same_bits(got, one.step(live, one.runner.run_live_eager))
    one.restore(before)
    sparse = worlds(arm).step(live)
    torch.testing.assert_close(got, sparse, rtol=2e-4, atol=2e-5)
    assert not same_bits(got, sparse), "another order of sums"
    check(one, [(1, 3, 4), (2, 0, 3)])  # seven keys: sparse
    assert one.runner.coverage().captured == 1


def test_what_t9b_has_no_room_for_is_eager_with_the_facts(worlds):
    one = worlds("T9b", settings={"max_requests": 2, "max_cached": 20})
    for spans in ([(1, 0, 2), (2, 0, 2), (3, 0, 3)], [(1, 10, 2), (2, 11, 2)], [(1, 0, 16), (2, 0, 1)]):
        before = one.cache()
        got = one.step(spans)
        one.restore(before)
        torch.testing.assert_close(got, one.step(spans, one.runner.run_live_eager), rtol=2e-4, atol=2e-5)
    check(one, [(1, 10, 2), (2, 10, 2)])
    coverage = one.runner.coverage()
    assert coverage.captured == 1
    assert coverage.reasons == {"MORE_REQUESTS": 1, "MORE_KEYS": 1, "ABOVE_LIMIT": 1}


@arms
def test_weights_loaded_in_place_are_followed_and_moved_ones_refused(worlds, arm):
    one, spans = worlds(arm), [(1, 9, 4), (2, 0, 3)]
    before = one.cache()
    first = check(one, spans)
    one.restore(before)
    with torch.no_grad():
        for name, parameter in one.model.named_parameters():
            if "indexer.query" in name or "router.weight" in name or "latent_down" in name:
                parameter.neg_()
    assert not same_bits(check(one, spans), first)
    latent_up = one.model.blocks[3].attention.latent_up.weight
    latent_up.data = latent_up.data.clone()
    with pytest.raises(AddressError, match=r"latent_up"):
        one.step(spans)


def test_a_full_backend_and_another_model_are_refused(worlds, prefills):
    one, plain = worlds("T9b"), prefills("breakable", BUCKETS)
    with pytest.raises(InputError, match="give breakable"):
        LatentPrefillWorld(one.device, "full", BUCKETS, settings={"parts": ARMS["T9b"]})
    with pytest.raises(InputError, match="use PrefillRunner"):
        DsaPrefillRunner(
            plain.model, plain.kv, plain.group, BUCKETS, plain.runner.captured.options, parts=ARMS["T8"]
        )


def test_the_world_has_both_kinds_of_steps():
    longest = {max(start + length for _, start, length in spans) for spans in SPLITS}
    assert min(longest) <= TINY.index_topk < max(longest)
