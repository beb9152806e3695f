"""A lab with a draft model: toggles, switch, coverage, comparisons, and what it says without one."""

import json
import logging

import pytest

import cglab
from cglab import errors
from cglab.lab.comparing import WHOLE
from cglab.runners.seed_step import SeedRunner

SIZES = {"device": "cpu", "max_batch": 4, "max_context": 128}
DRAFT = "pico-gqa-assistant"
ARMS = dict.fromkeys(("verify", "draft_loop"), ("eager", "full")) | {"seed_step": ("eager", "graph", "fused")}

OTHERS = {name: arms[1] for name, arms in ARMS.items()} | {"draft_sampler": "graph"}


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", draft=DRAFT, **SIZES) as opened:
        yield opened


@pytest.fixture(autouse=True)
def toggles(request):
    """Every test starts from the defaults."""
    if "lab" in request.fixturenames:
        captures = request.getfixturevalue("lab").captures
        captures.seed_step, captures.verify, captures.draft_loop = "graph", "full", "full"


@pytest.fixture(scope="module")
def prompts(root):
    held_out = json.loads((root / "data/models/pico-gqa/prompts.json").read_text())
    return [each["ids"][:24] for each in held_out[:5]]


@pytest.fixture(scope="module")
def plain(prompts):
    with cglab.open("pico-gqa", **SIZES) as opened:
        return opened.generate(prompts, 40, stop_at_end=False)


@pytest.mark.parametrize("seed", ["graph", "fused", "eager"])
def test_a_toggle_changed_between_calls_changes_how_and_not_what(lab, prompts, plain, seed):
    lab.captures.seed_step = seed
    found = lab.generate(prompts, 40, stop_at_end=False)
    assert found.tokens == plain.tokens
    steps = len(found.timings.steps)
    assert found.accepted.tokens_per_pass > 1 and steps < len(plain.timings.steps)
    captured = {name: coverage.captured for name, coverage in found.speculation.items()}
    told = {"graph": {"seed_step": steps}, "fused": {}, "eager": {"seed_step": 0}}[seed]
    assert captured == {**told, "draft_loop": steps, "verify": steps}
    lab.engine.scheduler.check_invariants()


def test_a_toggle_that_is_changed_while_requests_run_takes_effect_with_the_next_step(lab, prompts, plain):
    requests = [cglab.Request(index, prompt, 40) for index, prompt in enumerate(prompts)]
    before = {mode: counts.steps for mode, counts in lab.coverage("seed_step").items()}
    for count, event in enumerate(lab.stream(requests)):
        del event
        lab.captures.seed_step = ("graph", "fused", "eager")[count // 7 % 3]
    assert [request.output for request in requests] == plain.tokens
    after = lab.coverage("seed_step")
    assert all(after[mode].steps > before.get(mode, 0) for mode in ("graph", "eager"))
    assert lab.coverage("draft_loop")["full, fused"].captured


@pytest.mark.parametrize("mode", ["graph", "fused"])
def test_the_switch_keeps_the_seed_step_eager_and_says_so(monkeypatch, prompts, plain, mode):
    monkeypatch.setenv("CGLAB_DISABLE_SEED_GRAPH", "1")
    with cglab.open("pico-gqa", draft=DRAFT, **SIZES) as lab:
        lab.captures.seed_step = mode
        found = lab.generate(prompts, 40, stop_at_end=False)
        assert found.tokens == plain.tokens
        seed = found.speculation["seed_step"]
        assert seed.reasons == {"KILL_SWITCH": seed.steps} and seed.captured == 0
        assert seed.last_facts == {"KILL_SWITCH": "CGLAB_DISABLE_SEED_GRAPH=1"}
        assert found.speculation["draft_loop"].share == found.speculation["verify"].share == 1.0


def test_a_seed_capture_that_fails_leaves_the_step_eager_with_its_reason(monkeypatch, prompts, plain):
    def host_read(self, **inputs):
        assert inputs["seq_lens"].sum().item() >= 0
        return plain_step(self, **inputs)

    plain_step = SeedRunner.step
    monkeypatch.setattr(SeedRunner, "step", host_read)
    with cglab.open("pico-gqa", draft=DRAFT, **SIZES) as lab:
        with pytest.warns(UserWarning, match="seed_step, bucket 4"):
            found = lab.generate(prompts, 40, stop_at_end=False)
        assert found.tokens == plain.tokens
        seed = found.speculation["seed_step"]
        assert seed.reasons == {"CAPTURE_FAILED": seed.steps}


def test_the_log_says_what_is_captured_and_how_many_sizes_as_s0s_does(caplog):
    with caplog.at_level(logging.INFO, "cglab"), cglab.open("pico-gqa", draft=DRAFT, **SIZES) as lab:
        lab.phases.verify("eager")  # captures nothing, and says nothing
        lab.phases.for_decoding()
        lab.phases.for_decoding()
    assert caplog.messages == [
        "Capture Frozen-KV MTP seed graph begin.",
        "Capture Frozen-KV MTP seed graph end (captured 4 batch sizes).",
        "Capture Frozen-KV MTP draft graph begin.",
        "Capture Frozen-KV MTP draft graph end (captured 4 batch sizes).",
        "Capture target verify graph begin.",
        "Capture target verify graph end (captured 4 batch sizes).",
    ]


def test_the_sizes_of_80_requests_are_the_29_of_s0s_log():
    with cglab.open("pico-gqa", draft=DRAFT, **SIZES | {"max_batch": 80, "max_context": 32}) as lab:
        assert len(lab.buckets) == 29


@pytest.mark.parametrize("name", sorted(ARMS))
def test_a_comparison_is_bitwise_and_says_what_was_drafted(lab, name):
    compared = lab.compare(name, ARMS[name], batch=3, context=40, repeats=1)
    assert {each.verdict for each in compared.parity.values()} == {"bitwise"}
    drafted = {
        "draft": DRAFT,
        "draft_weights": "trained",
        "draft_steps": 3,
        "topk": 1,
        "width": 4,
        "pinned": None,
    }
    assert compared.workload.items() >= {"batch": 3, "context": 40, "bucket": 3, **drafted}.items()
    frame = compared.as_frame().set_index("arm")
    assert frame.loc["eager", "reasons"] == "backend_eager"
    for arm in ARMS[name][1:]:
        assert frame.loc[arm, "reasons"] == "" and frame.loc[arm, "capture_ms"] > 0
    assert lab.engine.idle
    json.dumps(compared.as_dict())


def test_a_seed_step_is_compared_with_its_loop_since_fused_they_are_one(lab):
    compared = lab.compare("seed_step", ARMS["seed_step"], batch=2, context=20, repeats=1)
    rows = {arm: len(compared.memory[arm]) for arm in compared.memory}
    assert rows == dict.fromkeys(ARMS["seed_step"], 4)
    alone = lab.phases.seed_step("graph").captured.memory()
    both = {row["bucket"]: row["capture_ms"] for row in compared.memory["graph"]}
    assert all(both[row["bucket"]] > row["capture_ms"] for row in alone)


def test_a_sweep_takes_every_bucket(lab):
    swept = lab.sweep("verify", ("eager", "full"), context=20, repeats=1)
    assert [each.workload["batch"] for each in swept.comparisons] == [1, 2, 3, 4]
    assert (swept.size, swept.unit) == ("batch", "requests")


def test_a_whole_speculative_step_is_profiled_by_arm_of_the_seed_and_keeps_nothing(lab, prompts):
    noted = lab.engine.speculator.accepted.as_dict()
    traced = lab.profile("seed_step", ARMS["seed_step"], whole=True, batch=2, context=20, repeats=1)
    assert traced.technique == WHOLE and set(traced.traces) == set(ARMS["seed_step"])
    assert traced.title == f"One {WHOLE} step of pico-gqa, batch 2, context 20"
    assert lab.captures.seed_step == "graph" and lab.engine.idle
    assert lab.engine.speculator.accepted.as_dict() == noted
    assert len(traced.timeline().data) == 3


def test_whole_steps_of_another_toggle_are_refused_and_not_left_out(lab):
    with pytest.raises(errors.ToggleError, match="by arm of seed_step or draft_sampler, not of verify"):
        lab.profile("verify", ARMS["verify"], whole=True, batch=1, context=20, repeats=1)


@pytest.mark.parametrize("name", sorted(ARMS))
def test_without_a_draft_the_toggles_and_their_runners_say_what_is_missing(name):
    with cglab.open("pico-gqa", **SIZES | {"max_batch": 1}) as lab:
        with pytest.raises(errors.ToggleError, match=f"{name}='eager' would change nothing here"):
            setattr(lab.captures, name, "eager")
        for ask in (lab.runner, lambda **given: lab.compare(**given, arms=("eager", OTHERS[name]))):
            with pytest.raises(
                errors.ToggleError, match=f"{name} needs a draft model .* open it with draft="
            ):
                ask(name=name)
        assert lab.generate([[1, 2, 3]], 2, stop_at_end=False).accepted is None


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        (
            {"draft": "pico-draft"},
            errors.ModelError,
            "no draft 'pico-draft'.*pico-gqa-assistant.*random, random-block, nextn, ",
        ),
        ({"draft": "gemma-31b-like-assistant"}, errors.ModelError, "open its own target"),
        ({"speculation": cglab.Speculation()}, errors.InputError, "needs a draft model"),
        ({"draft": DRAFT, "speculation": 3}, errors.InputError, "give a Speculation"),
        ({"draft": 3}, errors.ModelError, "named by a string or a path, not by 3"),
        (
            {"draft": DRAFT, "speculation": cglab.Speculation(1, 5000, 2)},
            errors.InputError,
            "topk 5000.*1 to 4096",
        ),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_before_anything_is_loaded(monkeypatch, options, error, told):
    monkeypatch.setattr("cglab.lab.facade.load_model", None)
    with pytest.raises(error, match=told):
        cglab.open("pico-gqa", **SIZES | options)


def test_a_switch_that_is_none_is_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("cglab.lab.facade.load_model", None)
    monkeypatch.setenv("CGLAB_DISABLE_SEED_GRAPH", "yes")
    with pytest.raises(errors.ToggleError, match="'yes' is no switch; good values are 0, 1"):
        cglab.open("pico-gqa", draft=DRAFT, ops="portable", **SIZES)


@pytest.mark.parametrize(("given", "context"), [(64, 64), (None, 512), (2048, 2048 - 3)])
def test_drafts_of_the_last_token_have_room_beyond_the_longest_request(given, context):
    with cglab.open("pico-gqa", draft=DRAFT, **SIZES | {"max_batch": 1, "max_context": given}) as lab:
        assert context <= lab.max_context <= 2048 - 3
        lab.captures.seed_step = lab.captures.draft_loop = lab.captures.verify = "eager"
        longest = lab.max_context - 4
        assert len(lab.generate([[1] * longest], 4, stop_at_end=False).tokens[0]) == 4
        with pytest.raises(errors.InputError, match="do not fit"):
            lab.generate([[1] * longest], 5)


def test_a_tree_is_drafted_and_accepted(prompts, plain):
    with cglab.open("pico-gqa", draft=DRAFT, speculation=cglab.Speculation(3, 3, 8), **SIZES) as lab:
        found = lab.generate(prompts, 40, stop_at_end=False)
        assert found.tokens == plain.tokens and found.speculation["verify"].share == 1.0
        for name in ARMS:
            compared = lab.compare(name, ARMS[name], batch=3, context=40, repeats=1)
            assert {each.verdict for each in compared.parity.values()} == {"bitwise"}


def test_closing_gives_the_draft_back_too(prompts):
    lab = cglab.open("pico-gqa", draft=DRAFT, **SIZES | {"max_batch": 1})
    lab.generate(prompts[:1], 4)
    assert lab.close().allocated == 0
    with pytest.raises(errors.ClosedError):
        lab.generate(prompts[:1], 4)


def test_a_load_at_a_temperature_is_refused_before_it_starts(lab):
    load = cglab.Load(2, concurrency=1, prompt_tokens=4, new_tokens=4, temperature=0.5)
    with pytest.raises(errors.InputError, match="drafts are accepted greedily; give temperature 0"):
        lab.load(load)
