"""The scripts that make pico-gqa-dflash: a block learns from what a decode step sees, and is counted by the rule."""

import json
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.graphs.options import Options
from cglab.models.block_draft import BlockDraft, BlockDraftConfig
from cglab.models.draft_cache import Feeder, draft_cache
from cglab.models.drafts import load_draft
from cglab.models.spans import LiveSpans, PrefillAttention, Span
from cglab.runners.base import GraphGroup
from cglab.runners.block_draft import BlockDraftRunner
from cglab.runners.draft_sampler import DraftSampler
from tests.runners.blocks import block_draft

BLOCK = 4
DRAFT = BlockDraftConfig(300, 48, 40, 2, 4, 2, 16, BLOCK, mask_token_id=299, context_layers=(0, 1))
SHIPPED = "data/drafts/pico-gqa-dflash"


@pytest.fixture
def pair(tiny):
    """A small target and a block draft with random weights."""
    target = tiny()
    return target, block_draft(target, DRAFT)


def seen(script, draft, tokens):
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return script("pico_accept").measure_of(draft).observe(draft.target, tokens, lengths)


@torch.no_grad()
def drafted(script, draft, tokens, anchors):
    return script("block_windows").draft_blocks(draft, seen(script, draft, tokens), torch.tensor(anchors))


@torch.no_grad()
def test_training_drafts_what_a_decode_step_drafts(script, pair, paged):
    """From each position: the target's step feeds the draft's pages, and the runner's block over these is the same."""
    target, draft = pair
    tokens, anchors = torch.randint(1, 300, (2, 20)), [[5, 0, 11], [15, 7, 7]]
    found = drafted(script, draft, tokens, anchors)
    for text, place in product((0, 1), range(3)):
        at = anchors[text][place]
        world = paged(target, 1, 24)
        feeder = Feeder(draft, draft_cache(DRAFT.stack, world.kv, dtype=torch.float32))
        for cache in feeder.kv.caches().values():
            cache[:, world.page_size :] = float("nan")
        context = world.slots(0, 0, at + 1)
        attend = PrefillAttention(world.kv, out_slots=context, live=LiveSpans([Span(1, 0, at + 1)]))
        feeder.forward(tokens[text, : at + 1], torch.arange(at + 1), attend, context)
        group = GraphGroup(torch.device("cpu"))
        sampler = DraftSampler(target, BLOCK, in_graph=False)
        runner = BlockDraftRunner(draft, feeder.kv, group, (1,), Options("eager"), sampler=sampler)
        step = runner.run_live_eager(
            1, input_ids=tokens[text, at + 1 : at + 2], out_slots=world.slots(0, at + 1, BLOCK),
            request_rows=torch.tensor([1]), seq_lens=torch.tensor([at + 1 + BLOCK]),
        )  # fmt: skip
        torch.testing.assert_close(found[text, place], step.hidden, rtol=1e-4, atol=1e-4)


def test_a_block_sees_its_known_token_all_before_it_and_nothing_else(script, pair):
    _, draft = pair
    tokens = torch.randint(1, 299, (1, 20))

    def block(changed, anchors=((6,),)):
        other = tokens.clone()
        other[0, changed] += 1
        return drafted(script, draft, other, anchors)[0, 0]

    before = block(slice(0, 0))
    same = [torch.equal(before, block(slice(at, at + 1))) for at in range(20)]
    assert same == [False] * 8 + [True] * 12, "positions 0 to 6 are its context, 7 the known token"
    torch.testing.assert_close(before, block(slice(0, 0), ((6, 2, 18),)))


def test_blocks_start_all_along_the_counted_continuation_and_learn_nothing_behind_it(
    script, pair, monkeypatch
):
    training = script("train_block_draft")
    monkeypatch.setattr(training, "CONTINUED", 12)
    texts = seen(script, pair[1], torch.randint(1, 300, (40, 24)))
    texts.counted[:] = torch.arange(40) % 8 + 14
    anchors = training.anchors_every(texts, 3)
    assert anchors.diff(dim=1).eq(3).all() and anchors[:, 0].unique().tolist() == [11, 12, 13]
    assert anchors[anchors + 2 < 21].max() == 18, "two tokens follow in the longest, the second is learnt"
    texts.counted[:] = 24
    assert training.anchors_every(texts, 3).max() == 22, "a block behind the end still has a known token"


@given(
    st.lists(st.lists(st.floats(0.01, 5.0), min_size=7, max_size=7), min_size=1, max_size=4),
    st.integers(0, 7),
)
def test_a_token_weighs_what_the_expected_accept_length_gains_by_it(script, rows, length):
    """Without smoothing the weighted loss has the negative gradient of the expected accept length."""
    weights_of = script("train_block_draft").reach_weights
    entropy = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    counted = (torch.arange(7) < length).expand_as(entropy)
    expected = (torch.exp(-entropy) * counted).cumprod(-1).sum()
    (gradient,) = torch.autograd.grad(expected, entropy)
    torch.testing.assert_close(weights_of(entropy.detach(), counted, 0.0), -gradient)
    everywhere = weights_of(entropy.detach(), counted, 0.5)
    assert (everywhere.gt(0) == counted).all() and (everywhere.diff(dim=-1) <= 0).all()


@torch.no_grad()
def test_a_soft_label_is_the_targets_distribution_after_the_tokens_before(script, pair):
    target, draft = pair
    tokens = torch.randint(1, 300, (2, 20))
    place = torch.tensor([[[6, 7, 8]], [[17, 18, 19]]])
    found = script("train_block_draft").likely_tokens(seen(script, draft, tokens), target, place)
    attention = script("train_pico").causal_attention(20)
    logits = target.logits(target(tokens.flatten(), torch.arange(20).repeat(2), attention)).view(2, 20, -1)
    expected = torch.cat((logits[0, 5:8], logits[1, 16:19])).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_accept_length_is_that_of_drafting_and_checking_token_by_token(script, pair):
    target, draft = pair
    accept, greedy = script("pico_accept"), script("train_pico").continue_greedily
    prompts = [torch.randint(1, 300, (6,)).tolist() for _ in range(4)]
    counted = 0
    for held_out in accept.held_out_texts(target, prompts, accept.measure_of(draft).observe, 40):
        text, lengths = [*held_out.prompt, held_out.continuation[0]], []
        while len(text) - len(held_out.prompt) + BLOCK - 1 <= len(held_out.continuation):
            hidden = drafted(script, draft, torch.tensor([text]), [[len(text) - 2]])[0, 0]
            tokens = target.logits(hidden[1:]).argmax(-1).tolist()
            wanted = greedy(target, text, BLOCK)
            accepted = next((n for n in range(BLOCK - 1) if tokens[n] != wanted[n]), BLOCK - 1)
            lengths.append(1 + accepted)
            text += wanted[: 1 + accepted]
        assert accept.block_passes(draft, held_out) == lengths
        counted += len(lengths)
    assert counted > 10


def test_a_few_steps_of_training_lower_the_loss_and_the_folder_reads_back_to_the_bit(
    script, tiny, tmp_path, training_facts
):
    training, shared = script("train_block_draft"), script("draft_training")
    target = tiny(torch.bfloat16)
    draft = BlockDraft(DRAFT, device="cpu", dtype=torch.float32)
    draft.bind(target)
    shared.initialise(draft, seed=0)
    texts = seen(script, draft, torch.randint(1, 300, (8, 24)))
    texts.counted[:] = torch.arange(17, 25)
    anchors = torch.arange(4, 15).expand(8, -1)

    def loss_of(texts):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return training.block_loss(draft, texts, anchors, 0.5, softness=0.5)

    losses = []
    optimisers = shared.optimisers_of(draft, 1e-2)
    for _ in range(8):
        loss = loss_of(texts)
        losses.append(loss.item())
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    assert losses[-1] < losses[0] - 0.5 and math.isfinite(losses[-1])
    assert target.embedding.weight.grad is None, "the target is frozen"

    with torch.no_grad():
        tokens = texts.tokens.clone()
        tokens[0, 17:] = 1
        assert loss_of(texts) == loss_of(replace(texts, tokens=tokens)), "what is not counted is not learnt"

    facts = training_facts(2.0, 4)
    script("draft_card").write_draft(draft, tmp_path, tmp_path / "drafts" / "draft", facts)
    told = (tmp_path / "drafts" / "draft" / "README.md").read_text()
    assert (
        "a block draft" in told and "train_block_draft.py" in told and "3 drafted tokens (maximum 4)" in told
    )
    loaded = load_draft(tmp_path / "drafts" / "draft", target)
    assert loaded.config == DRAFT and loaded.weights == "trained"
    for name, parameter in draft.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter.to(torch.bfloat16)), name


def test_the_shape_to_be_shipped_is_small_and_reads_most_of_its_target(script, root):
    shape = script("train_block_draft").SHAPE
    with torch.device("meta"):
        draft = BlockDraft(shape, device="meta", dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in draft.parameters()) * 2 < 8.5e6
    assert len(shape.context_layers) >= 5 and shape.block_size == 8
    vocabulary = json.loads((root / "data/models/pico-gqa/tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary["ÿ"] == shape.mask_token_id, "the byte 0xFF, in the alphabet of byte-level tokens"
