"""A lab with a block draft: where its sampler is, coverage, comparisons, and what it says of an assistant's toggles."""

import json
import logging

import pytest

import cglab
from cglab import errors
from cglab.engine.load import Load
from cglab.lab.comparing import WHOLE
from cglab.models.drafts import DRAFT_PRESETS
from cglab.runners.block_draft import BlockDraftRunner

SIZES = {"device": "cpu", "max_batch": 4, "max_context": 128}
DRAFT = "random-block"
ARMS = ("eager", "graph")
PROMPTS = [[7, 3, 90, 14] * 4, [8, 1, 200], [300, 22, 5, 5, 61]]


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", draft=DRAFT, **SIZES) as opened:
        yield opened


@pytest.fixture(autouse=True)
def toggles(request):
    """Every test starts from the defaults."""
    if "lab" in request.fixturenames:
        captures = request.getfixturevalue("lab").captures
        captures.draft_sampler, captures.verify, captures.draft_loop = "graph", "full", "full"


@pytest.fixture(scope="module")
def plain():
    with cglab.open("pico-gqa", **SIZES) as opened:
        return opened.generate(PROMPTS, 20, stop_at_end=False).tokens


@pytest.mark.parametrize("draft", ["full", "breakable", "eager"])
@pytest.mark.parametrize("sampler", ARMS)
def test_a_toggle_changed_between_calls_changes_how_and_not_what(lab, plain, sampler, draft):
    lab.captures.draft_sampler, lab.captures.draft_loop = sampler, draft
    found = lab.generate(PROMPTS, 20, stop_at_end=False)
    steps = len(found.timings.steps)
    assert found.tokens == plain and found.accepted.passes.total() == sum(found.timings.step_batches)
    captured = {name: coverage.captured for name, coverage in found.speculation.items()}
    drafted = 0 if draft == "eager" else steps
    assert captured == {
        "block_draft": drafted, "draft_sampler": drafted if sampler == "graph" else 0, "verify": steps
    }  # fmt: skip
    assert found.speculation["draft_sampler"].steps == steps
    lab.engine.scheduler.check_invariants()


def test_the_sampler_s_coverage_is_told_by_where_it_is(lab):
    for mode in ARMS:
        lab.captures.draft_sampler = mode
        lab.generate(PROMPTS[:1], 4, stop_at_end=False)
    counts = lab.coverage("draft_sampler")
    assert counts["graph"].captured and not counts["graph"].eager
    assert counts["eager"].reasons.keys() == {"BACKEND_EAGER"} and not counts["eager"].captured
    rows = lab.memory()["buckets"]
    assert [len(rows[f"draft_sampler {mode}"]) for mode in ARMS] == [len(lab.buckets)] * 2


def test_a_load_counts_draft_and_sampler_apart(lab):
    run = lab.load(Load(3, concurrency=2, prompt_tokens=12, new_tokens=10))
    assert set(run.coverage) == {"prefill", "block_draft", "draft_sampler", "verify"}
    assert {segment.kind for segment in run.segments} == {"prefill", "block_draft", "verify"}
    assert run.latency.errors == 0 and run.coverage["block_draft"].eager == 0


def test_the_log_says_what_is_captured(caplog):
    with caplog.at_level(logging.INFO, "cglab.runners"), cglab.open("pico-gqa", draft=DRAFT, **SIZES) as lab:
        lab.phases.for_decoding()
    assert caplog.messages[:2] == [
        "Capture DFLASH draft graph begin.", "Capture DFLASH draft graph end (captured 4 batch sizes)."
    ]  # fmt: skip


def test_a_comparison_is_bitwise_and_of_the_same_work_up_to_the_tokens(lab):
    compared = lab.compare("draft_sampler", ARMS, batch=3, context=40, repeats=1)
    assert compared.parity["graph"].verdict == "bitwise"
    drafted = {"draft": DRAFT, "draft_weights": "random", "draft_steps": 7, "topk": 1, "width": 8}
    assert compared.workload.items() >= {"batch": 3, "context": 40, "bucket": 3, **drafted}.items()
    frame = compared.as_frame().set_index("arm")
    assert frame.loc["eager", "reasons"] == "backend_eager" and frame.loc["graph", "reasons"] == ""
    assert (frame["capture_ms"] > 0).all(), "the draft itself is captured in both"
    json.dumps(compared.as_dict())
    with_sampler, without = (lab.phases.arm("draft_sampler", arm) for arm in ("graph", "eager"))
    with cglab.lab.steps.fixed_step(lab.engine, "draft_sampler", {"batch": 2}, lab.sizes) as step:
        both = [arm.run(step.live, **step.inputs).tolist() for arm in (with_sampler, without)]
    assert both[0] == both[1] and [len(row) for row in both[0]] == [7, 7]


def test_verify_is_compared_and_swept_with_the_draft_s_cache_filled(lab):
    swept = lab.sweep("verify", ("eager", "full"), context=20, repeats=1)
    assert [each.workload["batch"] for each in swept.comparisons] == [1, 2, 3, 4]
    assert {each.parity["full"].verdict for each in swept.comparisons} == {"bitwise"}


def test_a_whole_speculative_step_is_profiled_by_arm_and_keeps_nothing(lab):
    noted = lab.engine.speculator.accepted.as_dict()
    traced = lab.profile("draft_sampler", ARMS, whole=True, batch=2, context=20, repeats=1)
    assert traced.technique == WHOLE and set(traced.traces) == set(ARMS)
    assert lab.captures.draft_sampler == "graph" and lab.engine.speculator.accepted.as_dict() == noted
    alone = lab.profile("draft_sampler", ARMS, batch=2, context=20, repeats=1)
    assert set(alone.traces) == set(ARMS)


def test_techniques_of_the_other_kind_of_draft_say_so(lab):
    for name in ("seed_step", "draft_loop"):
        with pytest.raises(errors.ToggleError, match="neither seed step nor draft loop; open .* draft="):
            lab.compare(name, ("eager", {"seed_step": "graph"}.get(name, "full")))
    with (
        cglab.open("pico-gqa", draft="random", **SIZES | {"max_batch": 1}) as assisted,
        pytest.raises(errors.ToggleError, match='has no draft_sampler; open .* draft="random-block"'),
    ):
        assisted.compare("draft_sampler", ARMS)


def test_a_capture_that_fails_leaves_the_draft_eager_with_its_reason(monkeypatch, plain):
    def host_read(self, **inputs):
        assert inputs["seq_lens"].sum().item() >= 0
        return plain_step(self, **inputs)

    plain_step = BlockDraftRunner.step
    monkeypatch.setattr(BlockDraftRunner, "step", host_read)
    with cglab.open("pico-gqa", draft=DRAFT, **SIZES) as lab:
        with pytest.warns(UserWarning, match="block_draft, bucket 4"):
            found = lab.generate(PROMPTS, 20, stop_at_end=False)
        assert found.tokens == plain
        for name in ("block_draft", "draft_sampler"):
            counts = found.speculation[name]
            assert counts.reasons == {"CAPTURE_FAILED": counts.steps}


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"draft": "qwen3-8b-dflash"}, errors.ModelError, "open its own target"),
        ({"draft": "pico-draft"}, errors.ModelError, "random, random-block"),
        ({"draft": DRAFT, "speculation": cglab.Speculation(3, 3)}, errors.InputError, "are no draft of"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_before_anything_is_loaded(monkeypatch, options, error, told):
    monkeypatch.setattr("cglab.lab.facade.load_model", None)
    with pytest.raises(error, match=told):
        cglab.open("pico-gqa", **SIZES | options)


def test_blocks_of_another_size_are_no_draft_of_a_published_shape(monkeypatch):
    monkeypatch.setattr("cglab.lab.facade.load_model", None)
    with pytest.raises(errors.InputError, match=r"give Speculation\(steps=7\)"):
        cglab.open("qwen3-8b", draft="qwen3-8b-dflash", speculation=cglab.Speculation(3), **SIZES)
    assert DRAFT_PRESETS["qwen3-8b-dflash"].block_size == 8


def test_random_blocks_are_as_long_as_the_speculation_says(plain):
    with cglab.open("pico-gqa", draft=DRAFT, speculation=cglab.Speculation(3), **SIZES) as lab:
        assert lab.drafting.model.config.block_size == 4
        assert lab.generate(PROMPTS, 20, stop_at_end=False).tokens == plain


def test_closing_gives_the_draft_and_its_cache_back(plain):
    lab = cglab.open("pico-gqa", draft=DRAFT, **SIZES | {"max_batch": 1})
    lab.generate(PROMPTS[:1], 4)
    assert lab.close().allocated == 0
    with pytest.raises(errors.ClosedError):
        lab.generate(PROMPTS[:1], 4)
