"""The decoder with latent attention against transformers' own, and its arms against each other."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

import cglab
from cglab.errors import InputError
from cglab.models import mla
from cglab.models.dsa_config import DsaConfig
from cglab.models.experts import Router
from cglab.models.indexer import KeyRanges
from cglab.models.loading import load_model, random_model
from cglab.models.mla import attend_selected, dense_when_short
from cglab.models.spans import Span
from cglab.models.sparse import Breaks, LiveKeys, SparseAttention
from tests.models.latent import ARMS, TINY, LatentRequests

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "index_n_heads": 16, "index_head_dim": 16,
    "index_topk": 6, "indexer_types": ["full", "full", "shared", "full"], "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "eos_token_id": 0,
}  # fmt: skip
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def theirs(**fields):
    """A transformers model whose every parameter is random, norms and the routers' biases too."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig(**SMALL | fields, attn_implementation="eager")
    model = GlmMoeDsaForCausalLM(config).eval()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if "inv_freq" not in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True, "n_shared_experts": 2},
        {"index_topk": 64, "first_k_dense_replace": 4},
    ],
    ids=["sparse", "tied", "dense"],
)
@torch.no_grad()
def test_logits_equal_those_of_transformers(fields, tmp_path):
    oracle = theirs(**fields)
    oracle.save_pretrained(tmp_path)
    ours = load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert ours.weights == "trained" and isinstance(ours.config, DsaConfig)
    ids = torch.randint(0, 97, (40,))
    expected = oracle(ids.unsqueeze(0)).logits[0]
    requests = LatentRequests(ours.model, 1, 48)
    hidden = [requests.step({0: part}) for part in ids.split((17, 1, 22))]
    torch.testing.assert_close(ours.model.logits(torch.cat(hidden)), expected, **CLOSE)


@pytest.fixture
def tiny():
    """A function that makes a small random model, with fields of its shape replaced."""

    def make(dtype=torch.float32, device="cpu", **fields):
        return random_model(replace(TINY, **fields), device=device, dtype=dtype, seed=1)

    return make


def tokens(*lengths):
    return [torch.randint(0, 97, (length,)) for length in lengths]


STEPS = [{0: 9, 1: 3}, {2: 11, 0: 1}, {1: 8, 0: 2, 2: 1}, {0: 1, 1: 1, 2: 1}]
"""Fresh, cached, mixed and decode; below ``index_topk`` and above it."""


def life(model, step, **options):
    """Hidden states of all steps, and the cache after them."""
    torch.manual_seed(5)
    requests = LatentRequests(model, 3, 24)
    chunks = [{request: tokens(length)[0] for request, length in lengths.items()} for lengths in STEPS]
    return [getattr(requests, step)(chunk, **options) for chunk in chunks], requests.kv


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_arm_is_bitwise_the_one_with_all_breaks(tiny, arm, dtype):
    model = tiny(dtype)
    expected, kept = life(model, "step", breaks=ARMS["all breaks"])
    found, held = life(model, "step", breaks=ARMS[arm])
    assert all(map(torch.equal, found, expected))
    for name, cached in kept.caches().items():
        assert held.caches()[name][:, 1:].equal(cached[:, 1:])


@pytest.mark.parametrize("arm", ARMS)
def test_p78_padding_stores_to_slot_0_only_and_changes_no_live_row(tiny, arm):
    model = tiny()
    expected, kept = life(model, "step")
    found, held = life(model, "step", breaks=ARMS[arm], padding=5, junk=13)
    for row, other in zip(found, expected, strict=True):
        torch.testing.assert_close(row, other, **CLOSE)
    for name, cached in kept.caches().items():
        torch.testing.assert_close(held.caches()[name][:, 1:], cached[:, 1:], **CLOSE)
    # A break stores of live rows alone; what is recorded stores of all, padding to the reserved slot.
    assert held.full.keys[:, 0].any() == (not ARMS[arm].attend)
    assert held.full.values[:, 0].any() == (not ARMS[arm].prepare)


@pytest.mark.parametrize("arm", ARMS)
def test_padding_is_masked_before_it_is_routed(tiny, arm):
    model, routed = tiny(), []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, routing: routed.append(routing.group_ends(8)[1]))
    life(model, "step", breaks=ARMS[arm])
    alone, routed = routed, []
    life(model, "step", breaks=ARMS[arm], padding=5)
    assert len(routed) == 3 * len(STEPS) and all(map(torch.equal, routed, alone))


@pytest.mark.parametrize("arm", [arm for arm in ARMS if ARMS[arm].select])
def test_p54_a_step_without_a_live_token_stores_nothing_of_it(tiny, arm):
    requests = LatentRequests(tiny(), 1, 24)
    none = LiveKeys(KeyRanges.of([], requests.kv.full))
    assert (none.tokens, none.ranges.longest) == (0, 0)
    idle = torch.zeros(4, dtype=torch.int64)
    attend = SparseAttention(requests.kv, out_slots=idle, keys=none, breaks=ARMS[arm], index_topk=6)
    with torch.no_grad():
        assert requests.model(idle, idle, attend).isfinite().all()
    assert (attend.selected == -1).all()
    assert not any(cache[:, 1:].any() for cache in requests.kv.caches().values())


@pytest.mark.parametrize("arm", ARMS)
def test_p53_a_poisoned_reserved_page_reaches_no_live_row(tiny, arm):
    model, poisoned = tiny(), []
    for junk in (float("nan"), 1e30):
        torch.manual_seed(5)
        requests = LatentRequests(model, 3, 24)
        for lengths in STEPS:
            for cache in requests.kv.caches().values():
                cache[:, :4] = junk
            chunk = {request: tokens(length)[0] for request, length in lengths.items()}
            poisoned.append(requests.step(chunk, breaks=ARMS[arm], padding=4))
    clean, _ = life(model, "step", breaks=ARMS[arm], padding=4)
    assert all(map(torch.equal, poisoned, clean * 2))


def test_the_dense_form_is_the_sparse_one_where_every_key_is_kept(tiny):
    model = tiny(index_topk=24)
    expected, kept = life(model, "step")
    found, held = life(model, "dense")
    for row, other in zip(found, expected, strict=True):
        torch.testing.assert_close(row, other, **CLOSE)
    torch.testing.assert_close(held.full.values[:, 1:], kept.full.values[:, 1:], **CLOSE)


def test_b81_p37_dense_or_sparse_is_decided_once_by_a_number(tiny):
    assert dense_when_short(6, 6) and not dense_when_short(7, 6)
    requests = LatentRequests(tiny(), 1, 24)  # a short step, then one that scores what it stored
    whole = LatentRequests(tiny(), 1, 24)
    ids = tokens(20)[0]
    found = torch.cat((requests.dense({0: ids[:6]}), requests.step({0: ids[6:]})))
    torch.testing.assert_close(found, whole.step({0: ids}), **CLOSE)


def test_a_shared_layer_attends_to_what_the_layer_before_selected(tiny):
    model = tiny()
    assert [block.attention.indexer is None for block in model.blocks] == [False, False, True, False]
    requests = LatentRequests(model, 1, 24)
    selected, attend = [], SparseAttention.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SparseAttention, "attend", lambda self, *a: (selected.append(self.selected), attend(self, *a))[1]
        )
        requests.step({0: tokens(14)[0]})
    assert selected[2] is selected[1] and selected[1] is not selected[0]
    assert not selected[3].equal(selected[2])


def test_sparse_attention_is_the_formula_over_chosen_slots(monkeypatch):
    query, latents = torch.randn(7, 3, 12), torch.randn(30, 1, 12)
    chosen = torch.stack([torch.randperm(30)[:5] for _ in range(7)]).int()
    chosen[2, 3:] = -1
    chosen[4, :] = -1
    latents[0] = float("nan")
    chosen[chosen == 0] = 1
    out = attend_selected(query, latents, chosen, 0.25, 8)
    for row in range(7):
        slots = chosen[row][chosen[row] >= 0].long()
        keys = latents[slots, 0]
        likely = (query[row] @ keys.T * 0.25).softmax(-1)
        expected = likely @ keys[:, :8] if len(slots) else torch.zeros(3, 8)
        torch.testing.assert_close(out[row], expected, **CLOSE)
    monkeypatch.setattr(mla, "GATHERED_BYTES", 2 * 5 * 12 * 4)  # two rows at a time
    assert attend_selected(query, latents, chosen, 0.25, 8).equal(out)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arm", ARMS)
def test_p39_a_recording_of_every_arm_is_bitwise_padded_eager(tiny, arm, device, dtype):
    breaks = ARMS[arm]
    model = tiny(dtype, device)
    requests = LatentRequests(model, 3, 24)
    live = LiveKeys(KeyRanges.of([Span(0, 0, 12)], requests.kv.full))
    axis = () if breaks.select else ("request_rows", "cu_seqlens_q", "cu_seqlens_k")

    def step(input_ids, positions, out_slots, **fixed):
        # A recording has one longest, which is above what is kept: it scores whatever the step.
        room = {"tokens": len(input_ids), "keys": 48, "longest": 24}
        ranges = KeyRanges.recorded(requests.kv.full, **fixed, **room) if fixed else live
        attend = SparseAttention(
            requests.kv, out_slots=out_slots, keys=ranges, breaks=breaks, index_topk=TINY.index_topk
        )
        return model(input_ids, positions, attend)

    slots = {name: cglab.Slot(pad=0) for name in ("input_ids", "positions", "out_slots")}
    slots |= {name: cglab.Slot(axis=None, pad=0) for name in axis}

    def inputs(lengths):
        chunk = {request: tokens(length)[0] for request, length in lengths.items()}
        spans, ids, position, out_slots = requests.place(chunk)
        live.ranges = KeyRanges.of(spans, requests.kv.full)
        values = {"input_ids": ids, "positions": position, "out_slots": out_slots}
        absent = [0] * (3 - len(spans))
        queries, keys = ([span.length for span in spans] + absent, [span.end for span in spans] + absent)
        given = [span.row for span in spans] + absent, [0, *accumulate(queries)], [0, *accumulate(keys)]
        for name, value in zip(axis, given, strict=False):
            values[name] = torch.tensor(value, device=device, dtype=torch.int32)
        return values

    backend = "breakable" if breaks.select or breaks.experts else "full"
    with torch.no_grad(), cglab.capture(step, slots=slots, buckets=(12, 16), backend=backend) as captured:
        for lengths in [{0: 12}, *STEPS[1:], {1: 1, 2: 1}]:
            values = inputs(lengths)
            before = {name: cache.clone() for name, cache in requests.kv.caches().items()}
            rows = len(values["input_ids"])
            found = captured(**values)[:rows].clone()
            for name, cache in requests.kv.caches().items():
                cache.copy_(before[name])
            expected = step(**{
                name: value if name in axis else F.pad(value, (0, 12 - rows))
                for name, value in values.items()
            })  # fmt: skip
            assert found.equal(expected[:rows])
        assert captured.coverage().eager == 0


def test_p37_a_recording_for_short_contexts_has_as_many_columns_as_it_can_see(tiny):
    model = tiny()
    short, whole = LatentRequests(model, 1, 24), LatentRequests(model, 1, 24)
    widths, attend = [], SparseAttention.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SparseAttention,
            "attend",
            lambda self, *a: (widths.append(self.selected.shape[1]), attend(self, *a))[1],
        )
        ids = tokens(4)[0]
        found = short.step({0: ids}, breaks=ARMS["T9b"], padding=2)
        torch.testing.assert_close(found, whole.step({0: ids}), **CLOSE)
    assert widths == [4] * 4 + [TINY.index_topk] * 4


def test_breaks_come_in_the_order_in_which_they_are_recorded():
    recorded = {"select": False}
    for wrong in ({"attend": True}, *(recorded | {part: True} for part in ("prepare", "attend", "experts"))):
        with pytest.raises(InputError, match="recorded first"):
            Breaks(**wrong)


def test_what_a_part_cannot_read_is_refused(tiny):
    requests = LatentRequests(tiny(), 1, 24)
    ranges = KeyRanges.of([Span(1, 0, 3)], requests.kv.full)
    step = {"kv": requests.kv, "out_slots": torch.zeros(2, dtype=torch.int64), "index_topk": 6}
    for keys, breaks in ((ranges, Breaks()), (LiveKeys(ranges), Breaks(select=False))):
        with pytest.raises(InputError, match="reads what is live"):
            SparseAttention(**step, keys=keys, breaks=breaks)
    with pytest.raises(InputError, match="3 tokens are live, 2 have a slot"):
        SparseAttention(**step, keys=LiveKeys(ranges), breaks=Breaks())
