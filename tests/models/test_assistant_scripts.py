"""The scripts that make pico-gqa-assistant: it learns what it will be asked, from the target's text, and is counted
by the rule."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cglab.models.assistant import Assistant, AssistantConfig, FrozenAttention
from cglab.models.attention import DecodeAttention
from cglab.models.drafts import DraftSource, load_draft

DRAFT = AssistantConfig(300, 48, 32, 40, ("full", "full"), num_heads=4, num_kv_heads=2, head_dim=16)
SHIPPED = "data/drafts/pico-gqa-assistant"


@pytest.fixture
def pair(tiny):
    """A small target and an assistant with random weights."""
    target = tiny()
    return target, load_draft(DraftSource(DRAFT, None), target).model


def seen(script, target, assistant, tokens):
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return script("frozen_windows").observe(target, tokens, lengths, layer=assistant.layers[-1])


def test_texts_are_continued_as_without_a_cache_and_sampled_by_their_seed(script, tiny):
    target, prompts = tiny(), torch.randint(1, 300, (3, 7))
    continued = script("pico_continuations").continue_texts
    greedy = continued(target, prompts, 9)
    for prompt, tokens in zip(prompts.tolist(), greedy.tolist(), strict=True):
        assert script("train_pico").continue_greedily(target, prompt, 9) == tokens
    sampled = continued(target, prompts, 9, temperature=1.0, seed=3)
    assert torch.equal(sampled, continued(target, prompts, 9, temperature=1.0, seed=3))
    assert not torch.equal(sampled, continued(target, prompts, 9, temperature=1.0, seed=4))
    assert torch.equal(greedy, continued(target, prompts, 9, temperature=1e-6, seed=3))


def test_prompts_come_from_inside_documents(script):
    tokens = np.arange(1, 2001, dtype=np.uint16)
    tokens[::50] = 0
    prompts = script("pico_continuations").choose_prompts(tokens, 16, 40, seed=0)
    assert prompts.shape == (40, 16) and prompts.all() and (prompts.diff(dim=1) == 1).all()
    assert prompts[:, 0].unique().numel() > 30


def test_a_strayed_prompt_goes_on_with_the_targets_own_samples_from_its_middle(script, tiny):
    target, prompts = tiny(), torch.randint(1, 300, (3, 7))
    strayed = script("pico_continuations").stray(target, prompts, 1.0, seed=3)
    assert strayed.shape == prompts.shape and torch.equal(strayed[:, :3], prompts[:, :3])
    sampled = script("pico_continuations").continue_texts(target, prompts[:, :3], 4, temperature=1.0, seed=3)
    assert torch.equal(strayed[:, 3:], sampled) and not torch.equal(strayed, prompts)


def test_training_unrolls_what_a_decode_step_drafts(script, pair, paged):
    """From one position, three steps over the paged cache: the same tokens, scores and hidden states."""
    target, assistant = pair
    tokens = torch.randint(1, 300, (2, 20))
    unroll = script("frozen_windows").unroll
    with torch.no_grad():
        drafted = unroll(assistant, seen(script, target, assistant, tokens), 5, 15, taught=False)
    for text, at in ((0, 5), (0, 11), (1, 15)):
        runner = paged(target, 1, 24)
        hidden = runner.prefill({0: tokens[text, : at + 1]})[-1:]
        position = torch.tensor([at])
        step = DecodeAttention(runner.kv, request_rows=torch.tensor([1]), seq_lens=position + 1)
        inputs = tokens[text, at + 1 : at + 2]
        for logits, after in drafted:
            row = text * 11 + at - 5
            with torch.no_grad():
                expected, hidden = assistant(
                    inputs, hidden, position, FrozenAttention(step, assistant.layers)
                )
            torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(after[row : row + 1], hidden, rtol=1e-4, atol=1e-4)
            inputs = expected.argmax(-1)


def test_taught_steps_take_the_text_and_see_no_later_position(script, pair):
    target, assistant = pair
    tokens = torch.randint(1, 300, (1, 20))
    unroll = script("frozen_windows").unroll

    def logits(changed):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 300
        with torch.no_grad():
            return [
                step[0]
                for step in unroll(assistant, seen(script, target, assistant, other), 4, 4, taught=True)
            ]

    before, *changed = (logits(slice(at, at + 1)) for at in (19, 5, 6, 7, 8))
    # Position 4 drafts tokens 6, 7 and 8: its steps take tokens 5, 6 and 7.
    first = [
        next((step for step in range(3) if not torch.equal(before[step], after[step])), None)
        for after in changed
    ]
    assert first == [0, 1, 2, None]


def test_the_counting_rule_has_the_bonus_and_no_pass_beyond_the_counted_text(script):
    passes = script("pico_accept").passes
    text = list(range(100, 114))
    assert passes(text, lambda bonus: text[bonus + 1 : bonus + 4], 3) == [4, 4, 4]
    assert passes(text, lambda bonus: [], 3) == [1] * 11
    assert passes(text, lambda bonus: [text[bonus + 1], 0, text[bonus + 3]], 3) == [2] * 6
    assert passes(text[:3], lambda bonus: [], 3) == []


def test_accept_length_is_that_of_drafting_and_checking_token_by_token(script, pair):
    """The target's tokens are known beforehand; a loop that knows nothing of it accepts as many."""
    target, assistant = pair
    accept = script("pico_accept")
    prompts = [torch.randint(1, 300, (6,)).tolist() for _ in range(4)]
    greedy = script("train_pico").continue_greedily
    for held_out in accept.held_out_texts(target, prompts, accept.measure_of(assistant).observe, 40):
        text, lengths = [*held_out.prompt, held_out.continuation[0]], []
        assert held_out.continuation == greedy(target, held_out.prompt, len(held_out.continuation))
        while len(text) - len(held_out.prompt) + 3 <= len(held_out.continuation):
            texts = seen(script, target, assistant, torch.tensor([text]))
            with torch.no_grad():
                steps = script("frozen_windows").unroll(
                    assistant, texts, len(text) - 2, len(text) - 2, taught=False
                )
            drafted = [int(logits.argmax()) for logits, _ in steps]
            wanted = greedy(target, text, 4)
            accepted = next((n for n in range(3) if drafted[n] != wanted[n]), 3)
            lengths.append(1 + accepted)
            text += wanted[: 1 + accepted]
        assert accept.assistant_passes(assistant, held_out) == lengths
        assert len(held_out.continuation) < 5 or lengths


def test_an_epoch_has_every_text_once_and_like_with_like(script, pair):
    target, assistant = pair
    texts = seen(script, target, assistant, torch.randint(1, 300, (64, 12)))
    texts = replace(texts, counted=torch.arange(64), tokens=torch.arange(64).unsqueeze(1).expand(-1, 12))
    batches = script("draft_texts").batches([texts], 4, seed=0)
    epoch = [next(batches) for _ in range(16)]
    assert sorted(torch.cat([batch.tokens[:, 0] for batch in epoch]).tolist()) == list(range(64))
    spread = sum(int(batch.counted.max() - batch.counted.min()) for batch in epoch) / 16
    assert spread < 15  # of random fours it would be 39


def test_a_few_steps_of_training_lower_the_loss_and_the_folder_reads_back_to_the_bit(
    script, root, tiny, tmp_path, monkeypatch
):
    training = script("train_assistant")
    monkeypatch.setattr(training, "CONTINUED", 12)
    monkeypatch.setattr(training, "CORPUS_TOKENS", 4)
    target = tiny(torch.bfloat16)
    assistant = Assistant(DRAFT, device="cpu", dtype=torch.float32)
    assistant.bind(target)
    script("draft_training").initialise(assistant, seed=0)
    texts = seen(script, target, assistant, torch.randint(1, 300, (8, 24)))
    texts.counted[:] = torch.arange(17, 25)
    losses = []
    optimisers = script("draft_training").optimisers_of(assistant, 1e-2)
    for _ in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = training.draft_loss(assistant, texts, 1.0, 1.0)
        losses.append(loss.item())
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    assert losses[-1] < losses[0] - 0.5 and math.isfinite(losses[-1])

    # What is not counted is not learnt from.
    hidden = texts.hidden.clone()
    hidden[0, 17:] = 100.0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert training.draft_loss(assistant, texts, 1.0, 1.0) == training.draft_loss(
            assistant, replace(texts, hidden=hidden), 1.0, 1.0
        )

    card = json.loads((root / SHIPPED / "card.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(card))
    (tmp_path / "continuations.json").write_text(json.dumps({"continuations_sha256": "0" * 64}))
    out = tmp_path / "drafts" / "draft"
    out.mkdir(parents=True)
    (out / "model.safetensors").write_bytes(b"of an earlier training")
    script("draft_card").write_draft(assistant, tmp_path, out, card | {"name": "draft"})
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in (root / SHIPPED).iterdir()
    )
    loaded = load_draft(out, target)
    assert loaded.config == DRAFT and loaded.weights == "trained"
    for name, parameter in assistant.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter.to(torch.bfloat16)), name
