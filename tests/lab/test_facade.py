"""The facade on the shipped model: toggles, generation, comparison, profile, closing."""

import gc
import json
import weakref

import pytest
import torch

import cglab
from cglab import errors
from cglab.engine.load import Load
from cglab.lab.comparison import TAPE_NOTE
from cglab.lab.techniques import TECHNIQUES, Captures
from cglab.models.body import Portable


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=4, max_context=128) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts(root):
    held_out = json.loads((root / "data/models/pico-gqa/prompts.json").read_text())
    return [each["ids"][:24] for each in held_out[:7]]


def test_all_techniques_are_listed_from_the_start():
    assert [each.id for each in TECHNIQUES.values()] == [f"T{i}" for i in range(1, len(TECHNIQUES) + 1)]
    for each in TECHNIQUES.values():
        assert each.default in each.values


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("decode", "fast", "full, breakable, eager"),
        ("draft_extend", "full", "graph, eager"),
        ("pp_prefill", "full", "off, breakable"),
        ("decod", "full", "good names"),
    ],
)
def test_a_bad_toggle_names_the_good_values_and_changes_nothing(name, value, told):
    captures = Captures()
    with pytest.raises(errors.ToggleError, match=told):
        setattr(captures, name, value)
    assert captures.as_dict() == Captures().as_dict()


def test_generation_is_the_same_in_every_mode_with_requests_that_end_at_different_steps(lab, prompts):
    limits = [3, 20, 1, 9, 14, 2, 30]
    found = {}
    for mode in ("eager", "full", "breakable"):
        lab.captures.decode = mode
        found[mode] = lab.generate(prompts, limits, stop_at_end=False)
        assert [len(tokens) for tokens in found[mode].tokens] == limits
        assert found[mode].finish == ["length"] * len(limits)
    assert found["eager"].tokens == found["full"].tokens == found["breakable"].tokens
    assert found["full"].text == [lab.tokenizer.decode(tokens) for tokens in found["full"].tokens]
    assert found["eager"].coverage.reasons == {"BACKEND_EAGER": len(found["eager"].timings.steps)}
    assert found["full"].coverage.share == 1.0 and set(found["full"].timings.step_batches) <= {1, 2, 3, 4}
    lab.engine.scheduler.check_invariants()
    assert lab.engine.idle


def test_a_request_in_a_batch_says_what_it_says_alone(lab, prompts):
    lab.captures.decode = "full"
    together = lab.generate(prompts[:3], 24).tokens
    assert together == [lab.generate([prompt], 24).tokens[0] for prompt in prompts[:3]]


def test_a_cache_too_small_for_all_makes_requests_give_way_and_changes_no_token(prompts):
    options = {"device": "cpu", "max_batch": 4, "max_context": 64, "buckets": [1, 2, 4]}
    load = Load(5, 4, (3, 20), 40, seed=1)
    with (
        cglab.open("pico-gqa", **options) as ample,
        cglab.open("pico-gqa", cache_tokens=100, **options) as tight,
    ):
        roomy, crowded = ample.load(load), tight.load(load)
        assert roomy.latency.preemptions == 0 < crowded.latency.preemptions
        assert crowded.parity(roomy).verdict == "bitwise"
        with pytest.raises(errors.InputError, match="do not fit into a context of 64"):
            tight.generate([[1] * 60], 8)
    for size in (0, -1):
        with pytest.raises(errors.InputError, match="cache_tokens must be a whole number from 1"):
            cglab.open("pico-gqa", cache_tokens=size, **options)


def test_the_end_token_ends_a_request(lab, prompts):
    lab.captures.decode = "full"
    first = lab.generate(prompts[:1], 6, stop_at_end=False).tokens[0]
    stops = lab.config.eos_token_ids
    object.__setattr__(lab.config, "eos_token_ids", (first[2],))
    try:
        ended = lab.generate(prompts[:1], 6)
    finally:
        object.__setattr__(lab.config, "eos_token_ids", stops)
    assert ended.finish == ["stop"] and ended.tokens[0] == first[: first.index(first[2]) + 1]


@pytest.mark.parametrize(
    ("prompts_given", "limit", "told"),
    [
        ([[]], 4, "prompt 0 is empty"),
        ([[1], [4096]], 4, "prompt 1 has token ids outside of 0 to 4095"),
        ([[1] * 120], 16, "do not fit into a context of 128"),
        ([[1]], -1, "at least 0"),
        ([[1.5]], 4, "give a string or a list of token ids"),
        ([[1], [2]], [3], "1 limits for 2 prompts"),
    ],
)
def test_requests_that_can_never_run_are_refused_and_nothing_leaks(lab, prompts_given, limit, told):
    with pytest.raises(errors.InputError, match=told):
        lab.generate(prompts_given, limit)
    lab.engine.scheduler.check_invariants()
    assert lab.engine.idle


def test_comparison_carries_parity_coverage_and_the_honest_note(lab):
    compared = lab.compare("decode", ("eager", "full", "breakable"), batch=3, context=40, repeats=2)
    assert compared.workload == {"batch": 3, "context": 40, "bucket": 4, "cache": 128, "ops": "portable"}
    assert {arm: each.verdict for arm, each in compared.parity.items()} == {
        "full": "bitwise",
        "breakable": "bitwise",
    }
    assert compared.note == TAPE_NOTE and TAPE_NOTE in str(compared)
    frame = compared.as_frame().set_index("arm")
    assert (
        frame.loc["eager", "captured"].startswith("0/") and frame.loc["eager", "reasons"] == "backend_eager"
    )
    assert frame.loc["full", "reasons"] == "" and frame.loc["full", "capture_ms"] > 0
    json.dumps(compared.as_dict())


@pytest.mark.parametrize("arms", [("eager", "eager"), ("eager", "fast")])
def test_arms_are_settings_each_once(lab, arms):
    with pytest.raises(errors.ToggleError):
        lab.compare("decode", arms)


def test_a_profile_without_a_gpu_says_that_it_has_no_device_records(lab):
    profile = lab.profile("decode", ("eager", "full"), batch=2, context=20, repeats=1)
    assert set(profile.traces) == {"eager", "full"}
    assert all(trace.unreliable and trace.busy_us() is None for trace in profile.traces.values())


def test_b36_a_replaced_weight_is_refused_by_name_and_a_copy_in_place_is_not(prompts):
    with cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=64) as lab:
        before = lab.generate(prompts[:1], 4).tokens
        weight = lab.model.blocks[2].feed_forward.down.weight
        with torch.no_grad():
            weight.copy_(weight.clone())
        assert lab.generate(prompts[:1], 4).tokens == before
        weight.data = weight.data.clone()
        with pytest.raises(errors.AddressError, match=r"model\.blocks\.2\.feed_forward\.down\.weight"):
            lab.generate(prompts[:1], 4)
        lab.engine.scheduler.check_invariants()
        assert lab.engine.idle


def test_n03_close_gives_back_and_says_so_and_a_closed_lab_refuses(prompts):
    lab = cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=64)
    lab.generate(prompts[:1], 2)
    model, cache = weakref.ref(lab.model), weakref.ref(lab.engine.kv.full.keys)
    held = lab.close()
    assert held is not None and held.allocated == 0 and lab.close() is None
    gc.collect()
    assert model() is None and cache() is None
    with pytest.raises(errors.ClosedError, match="open it again"):
        lab.generate(prompts[:1], 2)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"max_batch": 0}, errors.InputError, "max_batch"),
        ({"buckets": [1, 16]}, errors.BucketError, "above the maximum of 8"),
        ({"device": "cuda:7"}, errors.DeviceError, "good values are"),
        *[
            ({"ops": ops}, errors.ToggleError, "form of ops on cpu.*good names: portable")
            for ops in ("", "auto", 0, ["x"])
        ],
        ({"ops": "compiled"}, errors.ToggleError, "needs a CUDA device"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options, error, told):
    with pytest.raises(error, match=told):
        cglab.open("pico-gqa", **{"device": "cpu", **options})


def test_cglab_ops_is_what_a_lab_takes_that_is_told_nothing(monkeypatch):
    monkeypatch.setenv("CGLAB_OPS", "compiled")
    with pytest.raises(errors.ToggleError, match="needs a CUDA device"):
        cglab.open("pico-gqa", device="cpu")
    with cglab.open("pico-gqa", device="cpu", ops="portable", max_batch=1, max_context=64) as opened:
        assert opened.ops == "portable"


def test_a_model_that_is_not_there_is_told():
    with pytest.raises(errors.ModelError):
        cglab.open("pico-nothing", device="cpu")


def test_a_capture_that_was_interrupted_is_made_by_the_next_call(monkeypatch, lab, prompts):
    from cglab.runners.decode import DecodeRunner

    def interrupted(self):
        raise KeyboardInterrupt

    with cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=64) as opened:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(DecodeRunner, "capture", interrupted)
            opened.generate(prompts[:1], 3)
        found = opened.generate(prompts[:1], 3, stop_at_end=False)
        assert found.coverage.captured == 2 and opened.memory()["buckets"]["full"]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"batch": -1}, {"context": 0}, {"context": 1}])
def test_a_workload_of_nothing_is_refused_instead_of_another_one_measured(lab, wrong):
    with pytest.raises(errors.InputError, match="batch >= 1 and context >= 2"):
        lab.compare(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": torch.int64},
        {"dtype": torch.float8_e5m2},
        {"dtype": "bf16"},
        {"max_batch": 2.5},
        {"max_batch": 10**15},
        {"host_tokens": 10**12},
    ],
)
def test_a_wrong_type_is_one_clear_error(wrong):
    with pytest.raises(errors.InputError, match="must be (a|one of)"):
        cglab.open("pico-gqa", device="cpu", **wrong)


@pytest.mark.parametrize("limit", [2.0, [2.5], "3"])
def test_a_limit_that_is_no_whole_number_is_refused(lab, limit):
    with pytest.raises(errors.InputError, match=r"max_new_tokens must be a whole number"):
        lab.generate([[1, 2]], limit)


def test_a_context_between_two_pages_ends_where_the_positions_end(tmp_path, root):
    source = root / "data/models/pico-gqa"
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with cglab.open(tmp_path, device="cpu", max_batch=1) as opened:
        assert opened.max_context == 100
        assert len(opened.generate([[1] * 97], 3, stop_at_end=False).tokens[0]) == 3
        with pytest.raises(errors.InputError, match="do not fit"):
            opened.generate([[1] * 98], 3)


@pytest.mark.parametrize("measured", ["compare", "load"])
def test_b57_b58_what_is_measured_while_a_compiler_runs_is_an_error(lab, monkeypatch, measured):
    class Compiling(Portable):
        def __call__(self, *given):
            self.compilations += 1
            return super().__call__(*given)

    monkeypatch.setattr(lab.model, "body", Compiling())
    mode = lab.captures.prefill
    lab.captures.prefill = "eager"
    try:
        with pytest.raises(errors.RecompiledError, match="the compiler ran"):
            if measured == "compare":
                lab.compare("decode", ("eager", "full"), batch=2, context=20, repeats=1)
            else:
                lab.load(Load(2, concurrency=1, prompt_tokens=(8, 8), new_tokens=(2, 2)))
    finally:
        lab.captures.prefill = mode
