"""The scripts that make pico-dsa-nextn: the layer learns from what an extend sees, and is counted by the rule."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.errors import ModelError
from cglab.models.draft_cache import draft_cache
from cglab.models.drafts import load_draft
from cglab.models.indexer import KeyRanges
from cglab.models.loading import decoder_of, fill_randomly, random_model
from cglab.models.nextn import NextN, nextn_config
from cglab.models.spans import Span
from cglab.models.sparse import LiveKeys, SparseAttention
from tests.models.latent import ARMS, TINY, LatentRequests
from tests.models.test_dsa import CLOSE


@pytest.fixture
def layer():
    made = NextN(nextn_config(TINY), device="cpu", dtype=torch.float32)
    fill_randomly(made, 1, seed=2)
    made.bind(random_model(TINY, device="cpu", dtype=torch.float32, seed=1))
    return made


def seen(script, layer, tokens):
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return script("pico_accept").measure_of(layer).observe(layer.target, tokens, lengths)


@torch.no_grad()
def test_training_drafts_what_an_extend_drafts(script, layer):
    tokens = torch.randint(0, 97, (2, 21))
    found, _ = script("nextn_windows").draft_next(layer, seen(script, layer, tokens))
    for row, text in zip(found, tokens, strict=True):
        requests = LatentRequests(layer.target, 1, 24)
        hidden = requests.step({0: text[:-1]})
        kv = draft_cache(layer.config, requests.kv, dtype=torch.float32)
        positions = torch.arange(20)
        slots = kv.full.slots(torch.tensor([1]), positions.unsqueeze(0))[0]
        keys = LiveKeys(KeyRanges.of([Span(1, 0, 20)], kv.full))
        attend = SparseAttention(
            kv, out_slots=slots, keys=keys, breaks=ARMS["T8 and T9"], index_topk=TINY.index_topk
        )
        torch.testing.assert_close(row, layer(text[1:], hidden, positions, attend), **CLOSE)


@torch.no_grad()
def test_accept_length_is_that_of_drafting_after_every_pass(script, layer):
    """Against a loop that drafts from the whole text so far, pass by pass."""
    accept = script("pico_accept")
    prompts = torch.randint(1, 97, (3, 6)).tolist()
    kind = accept.measure_of(layer)
    held_out = accept.held_out_texts(layer.target, prompts, kind.observe, 14)
    drafted = script("nextn_windows").draft_next
    for text in held_out:
        lengths, bonus = [], 0
        while bonus + 1 < len(text.continuation):
            known = torch.tensor([text.prompt + text.continuation[: bonus + 1]])
            after, _ = drafted(layer, seen(script, layer, known))
            accepted = int(layer.target.logits(after[0, -1]).argmax()) == text.continuation[bonus + 1]
            lengths.append(1 + accepted)
            bonus += 1 + accepted
        assert kind.passes(layer, text) == lengths
    assert kind.steps == 1


def test_a_layer_learns_and_is_written(script, layer, tmp_path, training_facts):
    shared, training = script("draft_training"), script("train_nextn")
    shared.initialise(layer, seed=0)
    (block,) = layer.blocks
    zero = (block.attention.output.weight, block.feed_forward.down, block.attention.indexer.key_norm.bias)
    assert not any(parameter.any() for parameter in zero) and block.attention.latent_down.weight.any()
    layer.target.requires_grad_(requires_grad=False)
    length = training.CONTINUED + training.CORPUS_TOKENS
    texts = seen(script, layer, torch.randint(1, 97, (4, length)).clamp(max=9))
    texts.counted[:] = torch.tensor([30, 60, 90, 112])
    optimisers, losses = shared.optimisers_of(layer, 1e-2), []
    routers = training.routers_of(layer)
    for _ in range(8):
        loss, loads = training.draft_loss(layer, texts, 1.0, 0.5)
        losses.append(loss.item())
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        training.balance(routers, loads, 1e-3)
    assert losses[-1] < losses[0] - 0.3 and routers[0].bias.any()
    with torch.no_grad():
        after, _ = script("nextn_windows").draft_next(layer, texts)
        hidden, told = texts.hidden.clone(), []
        for counted in (30, 29):  # of position 29 the first text still learns what the target says
            hidden[0, counted:] = 0.0
            told.append(training.entropy(layer, replace(texts, hidden=hidden), after, 1.0))
        assert told[0] == training.entropy(layer, texts, after, 1.0) != told[1]

    facts = training_facts(1.5, 2)
    script("draft_card").write_draft(layer, tmp_path, tmp_path / "drafts" / "draft", facts)
    told = (tmp_path / "drafts" / "draft" / "README.md").read_text()
    assert "a NextN layer" in told and "train_nextn.py" in told and "1 drafted tokens (maximum 2)" in told
    loaded = load_draft(tmp_path / "drafts" / "draft", layer.target)
    assert loaded.config == layer.config and loaded.weights == "trained"
    for name, parameter in layer.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter.bfloat16().to(parameter.dtype)), name


@torch.no_grad()
def test_a_layer_begins_as_its_targets_last_one(script, layer):
    """What its block then makes of hidden states alone is what the target's last block would."""
    training, windows = script("train_nextn"), script("latent_windows").LatentWindows
    script("draft_training").initialise(layer, seed=0)
    training.begin_as_target(layer)
    layer.join.weight[:, : TINY.hidden_size] = 0.0  # nothing of the next token's embedding
    tokens, positions = torch.randint(0, 97, (8,)), torch.arange(8)
    hidden = torch.randn(8, TINY.hidden_size)
    found = layer(tokens, hidden, positions, windows(8, TINY.index_topk))
    last, turn = layer.target.blocks[-1], layer.target.rotary[:8]
    wanted = last(layer.hidden_norm(hidden), turn, 0, windows(8, TINY.index_topk))
    torch.testing.assert_close(found, layer.target.norm(wanted), **CLOSE)


@torch.no_grad()
@given(softness=st.sampled_from((0.0, 0.25, 1.0)), sharpness=st.sampled_from((1.0, 2.0)))
@settings(max_examples=6, deadline=None)
def test_the_loss_is_between_the_first_choice_and_the_distribution(script, softness, sharpness):
    """Against both terms spelt out, over the positions that count."""
    training = script("train_nextn")
    layer = NextN(nextn_config(TINY), device="cpu", dtype=torch.float32)
    fill_randomly(layer, 1, seed=2)
    layer.bind(random_model(TINY, device="cpu", dtype=torch.float32, seed=1))
    texts = seen(script, layer, torch.randint(1, 97, (2, training.CONTINUED + training.CORPUS_TOKENS + 3)))
    texts.counted[:] = torch.tensor([50, 115])
    after, _ = script("nextn_windows").draft_next(layer, texts)
    each = []
    for text, counted in enumerate(texts.counted.tolist()):
        for place in range(3, counted - 1):
            told = layer.target.logits(texts.hidden[text, place + 1])
            drafted = layer.target.logits(after[text, place]).log_softmax(-1)
            soft = -(drafted * (told * sharpness).softmax(-1)).sum()
            each.append(softness * soft - (1 - softness) * drafted[told.argmax()])
    torch.testing.assert_close(
        training.entropy(layer, texts, after, sharpness, softness), torch.stack(each).mean(), **CLOSE
    )


def test_a_target_without_latent_attention_is_refused(script, tiny):
    tokens = torch.randint(0, 97, (1, 5))
    with pytest.raises(ModelError, match="drafts for no Qwen3ForCausalLM"):
        script("nextn_windows").observe_hidden(tiny(), tokens, torch.tensor([5]))


def test_the_shapes_to_be_shipped_are_small_and_sparse_at_their_context(script):
    shape, context = script("train_pico_dsa").SHAPE, script("train_pico").CONTEXT
    place = {"device": "meta", "dtype": torch.bfloat16}
    models = decoder_of(shape, **place), NextN(nextn_config(shape), **place)
    assert sum(parameter.numel() for model in models for parameter in model.parameters()) * 2 < 4e6
    assert shape.index_topk * 8 < context
