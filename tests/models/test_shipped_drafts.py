"""The shipped drafts: their cards are true, and they are accepted as their cards say."""

import json
import math

import pytest
import torch

from cglab.models.drafts import load_draft
from cglab.models.loading import load_model

pytestmark = pytest.mark.end_to_end

LEAST = {"pico-gqa-assistant": 2.5, "pico-gqa-dflash": 3.0, "pico-dsa-nextn": 1.8}
"""Accept length that each is shipped with at least; of 4, 8 and 2 at most."""
BYTES = {"pico-gqa-assistant": 1.8e6, "pico-gqa-dflash": 5.3e6, "pico-dsa-nextn": 0.5e6}
drafts = pytest.mark.parametrize("name", LEAST)


def test_these_are_all_drafts(root):
    assert {path.name for path in (root / "data/drafts").iterdir()} == set(LEAST)


def card_of(root, name):
    return json.loads((root / "data/drafts" / name / "card.json").read_text())


@drafts
def test_the_card_says_what_it_is_and_that_it_is_worth_drafting_with(root, name):
    folder, card = root / "data/drafts" / name, card_of(root, name)
    assert name.startswith(card["target"]) and card["name"] == name
    corpus = json.loads((root / "data/models" / card["target"] / "card.json").read_text())["corpus"]
    assert card["corpus_sha256"] == corpus["corpus_sha256"]
    assert card["held_out"]["accept_length"] >= LEAST[name] > card["look_up"]["accept_length"]
    assert card["held_out"]["distinct_4grams"] >= 0.5 and card["held_out"]["prompts"] == 72
    assert math.isclose(sum(card["held_out"]["distribution"].values()), 1, abs_tol=1e-3)
    readme = (folder / "README.md").read_text()
    for fact in (
        f"{card['held_out']['accept_length']:.3f}", card["corpus_sha256"], "specimen", "PSF License", f"# {name}",
    ):  # fmt: skip
        assert fact in readme
    assert (folder / "model.safetensors.xz").stat().st_size < BYTES[name]


@pytest.fixture(scope="module", params=["pico-gqa", "pico-dsa"])
def target(request):
    return request.param, load_model(request.param, device="cpu", dtype=torch.float32).model


@pytest.fixture(scope="module")
def continued(script, root, target):
    """All held-out prompts with what counts of 200 greedy tokens."""
    name, model = target
    prompts = json.loads((root / "data/models" / name / "prompts.json").read_text())
    return script("pico_accept").continued(model, [prompt["ids"] for prompt in prompts], 200)


@pytest.mark.slow
@drafts
def test_it_is_accepted_as_its_card_says(script, root, target, continued, name):
    """All held-out prompts: within 0.1 of the record, and well above look-up."""
    card, (of, model) = card_of(root, name), target
    if card["target"] != of:
        pytest.skip(f"a draft of {card['target']}")
    accept = script("pico_accept")
    draft = load_draft(name, model).model
    measure = accept.measure_of(draft)
    texts = accept.observed(model, continued, measure.observe)
    measured = accept.summary([measure.passes(draft, text) for text in texts], texts, measure.steps)
    assert measured["accept_length"] >= card["held_out"]["accept_length"] - 0.1
    looked_up = accept.summary(
        [accept.lookup_passes(text, measure.steps) for text in texts], texts, measure.steps
    )
    margin = min(0.5, measure.steps / 6)  # of what a pass can gain at most
    assert looked_up["accept_length"] < measured["accept_length"] - margin
