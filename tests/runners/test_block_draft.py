"""The block draft's step, and the target's steps that feed it: captured against eager, and what padding never touches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.errors import AddressError, CaptureError, InputError, ModelError, TokenRangeError
from cglab.graphs.coverage import Reason
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.models.attention import DecodeAttention
from cglab.models.block_draft import BlockDraft
from cglab.models.decoder import Taps
from cglab.models.draft_cache import Feeder, draft_cache
from cglab.models.loading import random_model
from cglab.models.spans import Span
from cglab.runners import block_draft as block_draft_module
from cglab.runners.block_draft import LEAST_FREE, BlockDraftRunner, Drafted, little_memory
from cglab.runners.draft_sampler import DraftSampler
from cglab.runners.prefill import PrefillRunner
from cglab.runners.verify import VerifyRunner

from .blocks import BLOCK, UNTIED, BlockWorld, FedPrefillWorld, FedVerifyWorld, WindowFedPrefillWorld

backends = pytest.mark.parametrize("backend", ["full", "breakable"])
paddings = pytest.mark.parametrize("padding", [True, False], ids=["padded", "exact"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
samplers = pytest.mark.parametrize("in_graph", [True, False], ids=["graph", "eager"])
MADE = {
    "sampler inside": (BlockWorld, {"in_graph": True}),
    "sampler outside": (BlockWorld, {"in_graph": False}),
    "verify": (FedVerifyWorld, {}),
}


@pytest.fixture
def make(device):
    """Makes worlds of a kind and closes them."""
    made = []

    def make(kind, backend="full", *args, **options):
        world, settings = MADE[kind] if isinstance(kind, str) else (kind, options.pop("settings", {}))
        made.append(world(device, backend, *args, settings=settings, **options))
        made[-1].runner.capture()
        return made[-1]

    make.made = made
    yield make
    for one in made:
        one.close()


def leaves(output):
    return [leaf for leaf in output if leaf is not None]


def check(one, committed, seed=0):
    """One captured step equals padded eager to the bit: outputs, and both caches but for slot 0."""
    got, wanted, after, expected = one.both(one.inputs(committed, seed), len(committed))
    assert all(map(same_bits, leaves(got), leaves(wanted))), committed
    assert all(same_bits(a[:, 1:], b[:, 1:]) for a, b in zip(after, expected, strict=True)), committed
    return got


@pytest.mark.parametrize("kind", MADE)
@backends
@dtypes
@paddings
def test_every_live_size_of_every_bucket_is_bitwise(make, kind, backend, dtype, padding):
    one = make(kind, backend, dtype=dtype, padding=padding)
    sizes = (8, 1, 7, 2, 6, 3, 5, 4) if padding else (8, 1, 2, 4)
    for live in sizes:
        check(one, [1 + (3 * live + 2 * i) % 9 for i in range(live)], live)
    assert one.runner.coverage().captured == len(sizes) and one.runner.coverage().eager == 0


@pytest.mark.parametrize("kind", MADE)
@backends
@settings(max_examples=10)
@given(steps=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=8), min_size=1, max_size=6))
def test_p15_batches_that_grow_and_shrink_are_bitwise(make, kind, backend, steps):
    one = make.made[0] if make.made else make(kind, backend)
    for number, committed in enumerate(steps):
        check(one, committed, number)
    assert one.runner.coverage().eager == 0


@backends
@dtypes
def test_a_fed_prefill_is_bitwise(make, backend, dtype):
    one = make(FedPrefillWorld, backend, (4, 8, 16), dtype=dtype)
    for spans in ([(1, 0, 16)], [(1, 0, 3), (2, 0, 4), (3, 0, 6)], [(4, 11, 2), (2, 3, 1)], [(5, 7, 5)]):
        got, wanted, after, expected = one.both(spans)
        assert same_bits(got, wanted), spans
        assert all(same_bits(a[:, 1:], b[:, 1:]) for a, b in zip(after, expected, strict=True)), spans
    assert one.runner.coverage().captured == 4


def spelt_out(one, ids, positions, attend):
    """Keys and values of the draft's layers for tokens that the target computes now, without a feeder."""
    taps = Taps(BLOCK.context_layers)
    one.model(ids, positions, attend, taps)
    context = one.draft.context_norm(one.draft.fuse(taps.features()))
    turn = one.model.rotary[positions]
    return [block.attention.context(context, turn) for block in one.draft.blocks]


@backends
@pytest.mark.parametrize("world", [FedPrefillWorld, WindowFedPrefillWorld], ids=["full-attention", "windows"])
def test_p68_a_prefill_stores_each_live_token_in_the_drafts_cache_and_no_padded_one(make, backend, world):
    one = make(world, backend, (4, 8, 16))
    one.step([(1, 0, 16)])
    spans, before = [(4, 11, 3), (2, 0, 2)], one.draft_kv.full.keys.clone()
    one.step(spans)
    changed = (one.draft_kv.full.keys != before).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    slots = one.inputs(spans)["out_slots"].tolist()
    assert set(changed) - {0} == set(slots), "five tokens in a bucket of eight"


@backends
def test_a_fed_step_stores_what_the_targets_residual_stream_gives(make, backend):
    one = make("verify", backend)
    values = one.inputs([5, 3, 8], seed=4)
    before = one.cache()
    one.runner.run(3, **values)
    stored = [pair.clone() for pair in (one.draft_kv.full.keys, one.draft_kv.full.values)]
    one.restore(before)
    positions = (values["seq_lens"].unsqueeze(1) - 4 + torch.arange(4, device=one.device)).flatten()
    wanted = spelt_out(one, values["input_ids"], positions, one.runner.attend(values, width=4))
    for layer, pair in enumerate(wanted):
        for cache, fresh in zip(stored, pair, strict=True):
            torch.testing.assert_close(cache[layer, values["out_slots"]], fresh, rtol=1e-4, atol=1e-5)


@backends
def test_a_block_sees_a_context_alike_whichever_step_has_stored_it(make, backend):
    """Twelve tokens by a prefill, or eight by a prefill and four by a verify step: the draft's tokens are the same."""
    one = make(FedPrefillWorld, backend, (4, 8, 16))
    about, options = (one.model, one.kv, one.group), Options(backend=backend, strict=True, clone=True)
    verify = VerifyRunner(*about, (1,), options, width=4, steps=3, hidden=False, feeder=one.feeder)
    sampler = DraftSampler(one.model, 4, in_graph=False)
    draft = BlockDraftRunner(one.draft, one.draft_kv, one.group, (2,), options, sampler=sampler)
    ids = torch.arange(12, device=one.device)
    try:
        for span in ((1, 0, 12), (2, 0, 8)):
            inputs = {**one.inputs([span]), "input_ids": ids[: span[2]]}
            one.runner.run([Span(*span)], **inputs)
        last = torch.tensor(one.slots_of(2)[8:12], device=one.device)
        where = {"request_rows": torch.tensor([2]), "seq_lens": torch.tensor([12])}
        where = {name: value.to(one.device) for name, value in where.items()}
        verify.run(1, input_ids=ids[8:], out_slots=last, **where)
        ours, others = (one.draft_kv.full.keys[:, one.slots_of(row)[:12]] for row in (1, 2))
        torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-5)
        slots = torch.tensor([one.slots_of(row)[12:] for row in (1, 2)], device=one.device).flatten()
        rows = torch.tensor([1, 2], device=one.device)
        block = {"input_ids": torch.full_like(rows, 3), "request_rows": rows, "seq_lens": rows * 0 + 16}
        first, second = draft.run(2, **block, out_slots=slots).hidden.unflatten(0, (2, 4))
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
        one.draft_kv.full.values[:, one.slots_of(2)[8]] += 1
        other = draft.run(2, **block, out_slots=slots).hidden[4:]
        assert (other - first).abs().max() > 1e-2, "each token of the context counts"
        assert (draft.coverage().captured, verify.coverage().captured) == (2, 1)
    finally:
        draft.close()
        verify.close()


@backends
@torch.no_grad()
def test_a_block_is_the_newest_token_and_masks_which_all_see_each_other(make, backend):
    """Against the draft called by hand: ids, positions, slots and the mask of a block spelt out."""
    one = make("sampler outside", backend)
    committed = [9, 5, 1]
    values, before = one.inputs(committed), one.cache()
    got = one.runner.run(3, **values).hidden
    one.restore(before)
    ids = [token for newest in values["input_ids"].tolist() for token in (newest, 96, 96, 96)]
    positions = [count + i for count in committed for i in range(4)]
    attend = DecodeAttention(
        one.draft_kv, request_rows=values["request_rows"], seq_lens=values["seq_lens"], width=4,
        out_slots=values["out_slots"], tree=torch.ones(3, 4, 4, dtype=torch.bool, device=one.device),
    )  # fmt: skip
    by_hand = one.draft(*(torch.tensor(column, device=one.device) for column in (ids, positions)), attend)
    torch.testing.assert_close(got, by_hand, rtol=1e-3, atol=1e-4)


@samplers
@backends
def test_p12_p13_a_padded_block_reads_and_writes_what_its_requests_own(make, in_graph, backend):
    """NaN wherever no live request has a token, but in their blocks' own slots, which are written first."""
    one = make("sampler inside" if in_graph else "sampler outside", backend)
    one.runner.run(8, **one.inputs([12] * 8))
    committed, before = [9, 5, 1], one.draft_kv.full.keys.clone()
    values = one.inputs(committed)
    clean = one.runner.tokens(one.runner.run(3, **values))
    changed = (one.draft_kv.full.keys != before).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    assert set(changed) - {0} == set(values["out_slots"].tolist())
    known = {slot for row, c in enumerate(committed, 1) for slot in one.slots_of(row)[: c + 4]}
    unknown = [slot for slot in range(one.draft_kv.full.keys.shape[1]) if slot not in known]
    for cache in one.draft_kv.caches().values():
        cache[:, unknown] = float("nan")
    assert torch.equal(one.runner.tokens(one.runner.run(3, **values)), clean)
    tails = {
        name: view[len(view) // 4 * 3 :].unique().tolist()
        for name, view in one.runner.captured.buffers.view(4).items()
    }
    assert tails == {"input_ids": [0], "out_slots": [0], "request_rows": [0], "seq_lens": [4]}


def test_p04_a_block_of_another_size_is_refused(make):
    one = make("sampler inside", "full", (1, 2))
    values = one.inputs([5, 3])
    with pytest.raises(InputError, match="3 slots a request are no block of 4"):
        one.runner.run(2, **{**values, "out_slots": values["out_slots"][:6]})


@samplers
def test_p62_the_tokens_of_a_step_are_that_steps_whether_it_replayed_or_not(make, in_graph):
    """Replays and an eager step above the largest bucket in turn, on other inputs each."""
    one = make("sampler inside" if in_graph else "sampler outside", "full", (1, 2))
    seen = []
    for live, seed in ((2, 0), (3, 1), (2, 2), (3, 3), (1, 4)):
        values, before = one.inputs([4, 5, 6][:live], seed), one.cache()
        got = one.runner.tokens(one.runner.run(live, **values))
        one.restore(before)
        hidden = one.runner.run_live_eager(live, **values)
        assert torch.equal(got, one.runner.tokens(hidden)), (live, seed)
        seen.append(got.tolist())
    assert len({str(tokens) for tokens in seen}) == len(seen)
    assert one.runner.coverage().reasons == {"ABOVE_LARGEST": 2}
    with pytest.raises(InputError, match="no drafts of this runner"):
        one.runner.tokens(Drafted(None, None))
    sampling = one.runner.sampling()
    assert sampling.reasons == ({"ABOVE_LARGEST": 2} if in_graph else {"BACKEND_EAGER": 10})


def test_p71_without_memory_for_a_capture_the_draft_runs_eager_and_says_so(make, monkeypatch):
    assert little_memory(None) is None and little_memory(LEAST_FREE) is None
    assert little_memory(LEAST_FREE - 1).reason is Reason.LITTLE_MEMORY
    monkeypatch.setattr(block_draft_module, "free_memory", lambda device: LEAST_FREE // 2)
    one = make("sampler inside")
    values = one.inputs([5, 3])
    tokens = one.runner.tokens(one.runner.run(2, **values))
    assert torch.equal(tokens, one.runner.run_live_eager(2, **values).chosen)
    assert one.runner.coverage().reasons == {"LITTLE_MEMORY": 1}
    assert one.runner.coverage().last_facts == {"LITTLE_MEMORY": "0.50 GiB free, 1 wanted"}


@pytest.mark.parametrize("moved", ["embedding", "head", "fuse", "page_table"])
def test_p85_what_was_borrowed_may_not_move(make, moved):
    one = make("sampler inside", "full", (1, 2))
    feeds = make("verify", "full", (1, 2))
    for world in (one, feeds):
        values = world.inputs([5, 3])
        if moved == "page_table":
            world.draft_kv.full.page_table = world.draft_kv.full.page_table.clone()
        else:
            owner = world.draft if moved == "fuse" else world.model
            weight = getattr(owner, moved).weight
            weight.data = weight.data.clone()
        with pytest.raises(AddressError, match=moved):
            world.runner.run(2, **values)


def test_a_runner_of_another_target_cache_or_size_is_refused(make):
    one = make("sampler inside", "full", (1,))
    other = random_model(UNTIED, device=one.device, dtype=torch.float32, seed=5)
    about, options = (one.kv, one.group, (1,), Options()), Options()
    with pytest.raises(ModelError, match="bound to another target"):
        VerifyRunner(other, *about, width=4, steps=3, feeder=one.feeder)
    own_pages = Feeder(one.draft, draft_cache(BLOCK.stack, one.kv, dtype=torch.float32))
    own_pages.kv.full.page_table = one.kv.full.page_table.clone()
    with pytest.raises(InputError, match="page tables of its own"):
        PrefillRunner(one.model, *about, feeder=own_pages)
    with pytest.raises(InputError, match="a block draft is a chain and topk is 2"):
        VerifyRunner(one.model, *about, width=4, steps=3, topk=2, feeder=one.feeder)
    for sampler in (DraftSampler(one.model, 3), DraftSampler(other, 4)):
        with pytest.raises(InputError, match="of another target"):
            BlockDraftRunner(one.draft, one.draft_kv, one.group, (1,), options, sampler=sampler)


def test_p61_a_draft_that_hands_out_no_hidden_states_cannot_be_captured(make, device, monkeypatch):
    """Recorded without them, the sampler would leave tokens of the capture for ever."""
    for output, told in ((None, "NoneType"), (torch.zeros(5, 32, device=device), "[5, 32]")):
        with monkeypatch.context() as patch:
            patch.setattr(BlockDraft, "forward", lambda *args, output=output: output)
            with pytest.raises((CaptureError, InputError)) as error:
                make("sampler inside")
        assert f"the draft returned {told}" in str(error.value)


@samplers
def test_b73_a_token_that_the_vocabulary_does_not_have_is_told(make, in_graph, monkeypatch):
    one = make(BlockWorld, "eager", (1, 2), settings={"in_graph": in_graph}, debug=True)
    monkeypatch.setattr(DraftSampler, "_best", lambda self, scores: scores.argmax(-1) + 97)
    with pytest.raises(TokenRangeError, match="the vocabulary has 0 to 96"):
        one.runner.tokens(one.runner.run(1, **one.inputs([4])))
