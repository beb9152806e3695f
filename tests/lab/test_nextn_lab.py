"""A NextN layer and host memory in a lab: opened, generated with, compared, switched off, and refused."""

import pytest
import torch

import cglab
from cglab.engine.speculation import Speculation
from cglab.errors import InputError, ModelError, ToggleError

SIZES = {
    "device": "cpu",
    "max_batch": 4,
    "max_context": 96,
    "token_budget": 32,
    "prefill_buckets": (8, 16, 32),
}
PROMPTS = [[(i * i + n) % 90 for i in range(10 + 9 * n)] for n in range(3)]


@pytest.fixture(scope="module")
def plain():
    """What the model says without a draft."""
    with cglab.open("dsa-tiny", **SIZES) as lab:
        return lab.generate(PROMPTS, 12, stop_at_end=False).tokens


@pytest.fixture(scope="module")
def lab():
    """A small sparse model with a NextN layer of random weights."""
    with cglab.open("dsa-tiny", draft="nextn", **SIZES) as lab:
        yield lab


def test_a_nextn_layer_drafts_and_changes_no_token(lab, plain):
    made = lab.generate(PROMPTS, 12, stop_at_end=False)
    assert made.tokens == plain and set(made.speculation) == {"draft_extend", "verify"}
    extends = made.speculation["draft_extend"]
    assert extends.captured > 0 and extends.steps > made.speculation["verify"].steps
    assert lab.drafted["draft"] == "nextn" and lab.drafted["width"] == 2
    assert lab.coverage("draft_extend")["graph"].captured >= extends.captured


def test_t10_a_replayed_extend_is_bitwise_the_eager_one_at_its_padded_size(lab):
    compared = lab.compare("draft_extend", ("eager", "graph"), tokens=13, cached=16, repeats=1)
    assert compared.parity["graph"].verdict == "bitwise"
    assert compared.coverage["graph"].captured > 0 and compared.coverage["graph"].eager == 0
    assert compared.coverage["eager"].captured == 0


def test_a_step_of_the_layer_and_the_target_can_be_measured(lab):
    verify = lab.compare("verify", ("eager", "full"), batch=2, context=20, repeats=1)
    assert verify.parity["full"].verdict == "bitwise"


def test_the_kill_switch_keeps_the_extend_eager_and_says_so(monkeypatch, plain):
    monkeypatch.setenv("CGLAB_DISABLE_NEXTN_GRAPH", "1")
    with cglab.open("dsa-tiny", draft="nextn", **SIZES) as lab:
        made = lab.generate(PROMPTS, 12, stop_at_end=False)
    extends = made.speculation["draft_extend"]
    assert made.tokens == plain and extends.captured == 0 and set(extends.reasons) == {"KILL_SWITCH"}
    assert extends.last_facts == {"KILL_SWITCH": "CGLAB_DISABLE_NEXTN_GRAPH=1"}


def test_the_toggle_keeps_it_eager_too(lab, plain):
    lab.captures.draft_extend = "eager"
    try:
        made = lab.generate(PROMPTS, 12, stop_at_end=False)
    finally:
        lab.captures.draft_extend = "graph"
    assert made.tokens == plain and set(made.speculation["draft_extend"].reasons) == {"BACKEND_EAGER"}


@pytest.mark.parametrize("draft", [None, "nextn"])
def test_prefixes_come_back_from_host_memory(plain, draft):
    """A cache for one of the prompts at a time, and host memory for all of them."""
    sizes = SIZES | {"max_batch": 1, "cache_tokens": 64}
    with cglab.open("dsa-tiny", draft=draft, host_tokens=256, **sizes) as lab:
        first = [lab.generate([prompt], 12, stop_at_end=False).tokens[0] for prompt in PROMPTS * 2]
        assert first == plain * 2
        assert lab.engine.host.copied["restored"] > 0


@pytest.mark.parametrize(
    ("model", "options", "error", "told"),
    [
        ("pico-gqa", {"draft": "nextn"}, ToggleError, "a NextN layer needs latent attention"),
        ("pico-gqa", {"draft": "dsa-24-nextn"}, ModelError, "drafts for a model with latent attention"),
        ("dsa-tiny", {"draft": "dsa-24-nextn"}, ModelError, "open its own target"),
        (
            "dsa-tiny",
            {"draft": "nextn", "speculation": Speculation(3)},
            InputError,
            r"give Speculation\(steps=1\)",
        ),
        ("dsa-tiny", {"host_tokens": 64, "prefix_reuse": False}, InputError, "prefix_reuse=False"),
        ("dsa-tiny", {"draft": "random"}, ModelError, "keeps latents; take another draft"),
        ("dsa-tiny", {"draft": "pico-gqa-assistant"}, ModelError, "keeps latents; take another draft"),
        ("pico-gqa", {"bucket_floor": 8}, ToggleError, "bucket_floor needs latent attention"),
        *(
            ("dsa-tiny", {name: wrong}, InputError, f"{name} must be a whole number from 1")
            for name in ("host_tokens", "bucket_floor", "cache_tokens")
            for wrong in (0, -1, True, 8.0, "8", float("nan"))
        ),
        *(
            ("dsa-tiny", {"seed": wrong}, InputError, "seed must be a whole number from 0")
            for wrong in (-1, True, "1", None, 2**63)
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_weight_is_loaded(monkeypatch, model, options, error, told):
    monkeypatch.setattr("cglab.lab.facade.load_model", None)
    with pytest.raises(error, match=told):
        cglab.open(model, **SIZES, **options)


def test_runners_of_other_drafts_are_refused_with_what_this_one_has(lab):
    with pytest.raises(ToggleError, match="a NextN layer has neither seed step nor draft loop"):
        lab.runner(name="draft_loop")
    with pytest.raises(ToggleError, match="a NextN layer has no draft_sampler"):
        lab.runner(name="draft_sampler")
    with (
        cglab.open("pico-gqa", draft="random", **SIZES) as other,
        pytest.raises(ToggleError, match="a NextN layer alone has a draft_extend"),
    ):
        other.runner(name="draft_extend")


def test_nothing_of_the_layer_stays_after_close():
    lab = cglab.open("dsa-tiny", draft="nextn", host_tokens=64, **SIZES)
    lab.generate(PROMPTS[:1], 4)
    layer = lab.drafting.model
    lab.close()
    assert all(parameter.device == torch.device("meta") for parameter in layer.parameters())
