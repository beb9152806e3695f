"""What a technique needs and whether it is there agree with what a lab does."""

import pytest

import cglab
from cglab.errors import ToggleError
from cglab.lab.available import NEEDS, in_load, unavailable
from cglab.lab.techniques import DRAFTING, SPARSE, TECHNIQUES


def test_every_technique_says_what_it_needs():
    assert set(NEEDS) == set(TECHNIQUES)
    with pytest.raises(ToggleError, match="decode"):
        unavailable("decoding", None)


@pytest.mark.parametrize(
    ("draft", "name"), [(None, None), ("assistant", "pico-gqa-assistant"), ("block", "random-block")]
)
def test_what_is_available_has_a_runner_and_what_is_not_has_none(draft, name):
    with cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=32, draft=name) as lab:
        for toggle in TECHNIQUES:
            why = unavailable(toggle, draft)
            if why is None:
                assert lab.runner("eager", toggle) is not None
            else:
                with pytest.raises(ToggleError):
                    lab.runner("eager", toggle)


@pytest.mark.parametrize(
    ("model", "draft", "inert"),
    [
        ("pico-gqa", None, {*DRAFTING, *SPARSE, "draft_extend"}),
        ("pico-gqa", "pico-gqa-assistant", {"draft_sampler", *SPARSE, "draft_extend"}),
        ("pico-gqa", "random-block", {"seed_step", *SPARSE, "draft_extend"}),
        ("dsa-tiny", None, {*DRAFTING, "draft_extend"}),
        ("dsa-tiny", "nextn", {"draft_loop", "seed_step", "draft_sampler"}),
    ],
)
def test_a_toggle_that_could_change_nothing_is_refused_and_one_that_can_is_not(model, draft, inert):
    with cglab.open(model, device="cpu", max_batch=1, max_context=32, draft=draft) as lab:
        before = lab.captures.as_dict()
        for name, each in TECHNIQUES.items():
            other = next(value for value in each.values if value != each.default)
            if name in inert | {"pp_prefill"}:
                with pytest.raises(
                    ToggleError, match=f"{name}='{other}' would change nothing here: it needs"
                ):
                    setattr(lab.captures, name, other)
            else:
                setattr(lab.captures, name, other)
                assert getattr(lab.captures, name) == other
            setattr(lab.captures, name, each.default)  # what is the case may be said again
        assert lab.captures.as_dict() == before


def test_parts_of_sparse_attention_are_there_for_a_latent_model_alone():
    for toggle in SPARSE:
        assert unavailable(toggle, None, latent=True) is None
        assert "latent" in unavailable(toggle, None)
    assert "NextN" in unavailable("draft_extend", None, latent=True)
    assert unavailable("draft_extend", "nextn", latent=True) is None


def test_with_a_draft_no_decode_step_runs_under_load():
    assert in_load("decode", None) is None and "draft" in in_load("decode", "block")
    assert [in_load(name, "assistant") for name in (*DRAFTING, "prefill", *SPARSE)] == [None] * 7
    assert "one process" in in_load("pp_prefill", None)
