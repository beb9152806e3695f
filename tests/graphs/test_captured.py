"""The five verbs of a captured function: dispatch and its reasons, outputs, and what a failed capture leaves."""

import contextlib
import gc
import warnings
from types import SimpleNamespace

import pytest
import torch

import cglab
from cglab.errors import (
    CaptureError,
    CaptureMemoryError,
    ClosedError,
    EmptyCaptureError,
    OutputStructureError,
    PoolBusyError,
    SlotError,
    StaleOutputError,
    ToggleError,
)  # fmt: skip
from cglab.graphs.captured import Captured
from cglab.graphs.coverage import Reason
from cglab.graphs.options import CaptureFailedWarning, ManyShapesWarning, Options

X = {"x": cglab.Slot(pad=0.0)}


def double(x):
    return x * 2


def rows(device, n, width=3):
    return torch.arange(float(n * width), device=device).view(n, width)


def test_b59_exact_sizes_replay_with_padding_off(device):
    with cglab.capture(double, slots=X, buckets=(1, 2, 4), padding=False) as captured:
        for n in (2, 4, 1):
            assert torch.equal(captured(x=rows(device, n)), rows(device, n) * 2)
        coverage = captured.coverage()
        assert coverage.hits == {"2": 1, "4": 1, "1": 1} and coverage.eager == 0
        assert torch.equal(captured(x=rows(device, 3)), rows(device, 3) * 2)
        assert coverage.reasons == {"SIZE_NOT_CAPTURED": 1}
        assert coverage.last_facts["SIZE_NOT_CAPTURED"] == "size 3, captured [1, 2, 4]"


def test_p03_b66_above_the_largest_bucket_runs_eager_and_says_so(device):
    with cglab.capture(double, slots=X, buckets=(2, 4)) as captured:
        captured(x=rows(device, 4))
        assert torch.equal(captured(x=rows(device, 5)), rows(device, 5) * 2)
        assert captured.coverage().reasons == {"ABOVE_LARGEST": 1}
        assert captured.coverage().last_facts["ABOVE_LARGEST"] == "size 5, largest bucket 4"


def test_p07_b67_the_waste_ceiling_sends_a_step_eager_visibly(device):
    with cglab.capture(double, slots=X, buckets=(11, 12, 32), waste_ceiling=2.0) as captured:
        for n in (10, 13, 16):
            assert torch.equal(captured(x=rows(device, n)), rows(device, n) * 2)
        assert captured.coverage().hits == {"11": 1, "32": 1}
        assert captured.coverage().last_facts["WASTE_CEILING"] == "size 13 in bucket 32, ceiling 2.0x"


def test_b69_one_call_tells_hits_misses_reasons_and_padding(device):
    captured = cglab.capture(double, slots=X, buckets=(2, 4))
    empty = captured.coverage().as_dict()
    assert (empty["steps"], empty["captured"], empty["eager"], empty["share"]) == (0, 0, 0, None)
    assert str(captured.coverage()) == "0 steps"
    for n in (1, 2, 3, 4, 5, 1, 2, 3, 9, 4):
        captured(x=rows(device, n))
    report = captured.coverage().as_dict()
    assert (
        report["steps"] == 10 and report["captured"] == 8 and report["eager"] == 2 and report["share"] == 0.8
    )
    assert report["hits"] == {"2": 4, "4": 4}
    assert report["padding"] == {"2": 1 - 6 / 8, "4": 1 - 14 / 16}
    assert report["reasons"] == {"ABOVE_LARGEST": 2}
    assert str(captured.coverage()) == "8 of 10 steps captured; eager: above_largest 2"
    captured.coverage().clear()
    assert captured.coverage().steps == 0
    captured.close()


def test_b57_many_sizes_that_run_eager_warn_once_with_advice(device):
    with cglab.capture(double, slots=X, buckets=(1, 2)) as captured:
        captured(x=rows(device, 1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for n in range(3, 23):
                captured(x=rows(device, n))
        told = [w for w in caught if w.category is ManyShapesWarning]
        assert len(told) == 1
        assert "8 different sizes" in str(told[0].message) and "add sizes that fit" in str(told[0].message)
        assert captured.captured_sizes == [1, 2], "no length records another graph"


def test_an_empty_batch_runs_eager(device):
    with cglab.capture(double, slots=X, buckets=(2,)) as captured:
        captured(x=rows(device, 2))
        assert captured(x=rows(device, 0)).shape == (0, 3)
        assert captured.coverage().reasons == {"EMPTY_BATCH": 1}


def test_the_eager_backend_records_nothing(device):
    with cglab.capture(double, slots=X, buckets=(2,), backend="eager") as captured:
        assert torch.equal(captured(x=rows(device, 2)), rows(device, 2) * 2)
        assert captured.captured_sizes == [] and captured.memory() == []
        assert captured.coverage().reasons == {"BACKEND_EAGER": 1}


def test_a_step_that_a_variable_switched_off_says_which(device):
    options = Options("eager", kill_switch="CGLAB_DISABLE_SEED_GRAPH=1")
    slots = {"input": cglab.Slot(shape=(-1,), dtype=torch.float32, pad=0.0)}
    with Captured("seed", torch.neg, slots, (2,), device, options) as captured:
        captured(input=torch.ones(2, device=device))
        assert captured.coverage().reasons == {"KILL_SWITCH": 1}
        assert captured.coverage().last_facts == {"KILL_SWITCH": "CGLAB_DISABLE_SEED_GRAPH=1"}


def test_an_unknown_backend_lists_the_good_ones():
    with pytest.raises(ToggleError, match="'ful' is unknown; good values: full, breakable, eager"):
        cglab.capture(double, slots=X, buckets=(1,), backend="ful")


def test_a_tensor_that_is_no_slot_is_refused_by_name(device):
    def add(x, y=None):
        return x + (0 if y is None else y)

    with cglab.capture(add, slots=X, buckets=(2,)) as captured:
        with pytest.raises(SlotError, match="'y' is a tensor but no slot"):
            captured(x=rows(device, 2), y=rows(device, 2))
        assert torch.equal(captured(x=rows(device, 2)), rows(device, 2))


def test_a_python_value_is_baked_in_and_a_change_runs_eager(device):
    with cglab.capture(lambda x, scale: x * scale, slots=X, buckets=(2,)) as captured:
        assert torch.equal(captured(x=rows(device, 2), scale=3), rows(device, 2) * 3)
        assert torch.equal(captured(x=rows(device, 2), scale=5), rows(device, 2) * 5)
        assert captured.coverage().last_facts == {"CONSTANT": "'scale' was captured as 3, now 5"}
        assert captured.coverage().hits == {"2": 1}


def test_p32_b20_outputs_are_views_that_the_next_replay_overwrites(device):
    with cglab.capture(double, slots=X, buckets=(2,)) as captured:
        first = captured(x=rows(device, 2))
        kept = first.clone()
        second = captured(x=rows(device, 2) + 100)
        assert first.data_ptr() == second.data_ptr()
        assert not torch.equal(first, kept) and torch.equal(first, second)


def test_p32_b20_clones_outlive_the_step(device):
    with cglab.capture(double, slots=X, buckets=(2,), clone=True) as captured:
        first = captured(x=rows(device, 2))
        captured(x=rows(device, 2) + 100)
        assert torch.equal(first, rows(device, 2) * 2)


def test_b20_a_stale_read_raises_in_debug_mode(device):
    def step(x):
        return {"twice": x * 2, "sum": x.sum(-1)}

    with cglab.capture(step, slots=X, buckets=(4,), debug=True) as captured:
        first = captured(x=rows(device, 3))
        assert torch.equal(first["twice"] + 0, rows(device, 3) * 2), "a fresh view reads as it should"
        part, copy = first["twice"][:1], first["sum"].clone()
        second = captured(x=rows(device, 3) + 1)
        reads = {
            "arithmetic": lambda: first["twice"] + 1,
            "another output": lambda: first["sum"].max(),
            "a slice": lambda: first["twice"][0],
            "a view made before": lambda: part + 0,
            "as an argument": lambda: torch.cat([torch.zeros(1, 3, device=device), first["twice"]]),
            "tolist": lambda: first["sum"].tolist(),
            "item": lambda: first["sum"][0].item(),
            "repr": lambda: repr(first["sum"]),
            "a write": lambda: first["twice"].zero_(),
            "numpy": lambda: first["twice"].cpu().numpy(),
        }
        for how, read in reads.items():
            with pytest.raises(StaleOutputError, match="overwritten by a later replay; clone"):
                read()
                pytest.fail(f"{how} was let through")
        assert torch.equal(copy, rows(device, 3).sum(-1)), "what was cloned in time stays"
        assert type(copy) is torch.Tensor or copy.sum() is not None
        assert torch.equal(second["sum"].clone(), (rows(device, 3) + 1).sum(-1))


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_b32_outputs_are_trimmed_to_the_live_rows(device, backend):
    def step(x):
        return {"one": x + 1, "two": torch.cat([x, x], 1).view(-1, 3), "all": x.sum(), "name": "step"}

    with cglab.capture(step, slots={"x": cglab.Slot(pad=float("nan"))}, buckets=(2, 4), backend=backend,
                       self_check=False) as captured:  # fmt: skip
        for n in (3, 1, 4, 2):
            out = captured(x=rows(device, n))
            assert torch.equal(out["one"], rows(device, n) + 1)
            assert out["two"].shape == (2 * n, 3) and not out["two"].isnan().any()
            assert out["all"].dim() == 0 and out["name"] == "step"
            assert out["one"].untyped_storage().nbytes() >= 4 * 3 * 4, (
                "one buffer of the largest size, sliced"
            )


def test_p33_an_output_structure_that_changes_between_sizes_is_refused(device):
    def step(x):
        return (x, x + 1) if x.shape[0] > 2 else x + 1

    captured = cglab.capture(step, slots=X, buckets=(2, 4), strict=True)
    with pytest.raises(OutputStructureError, match="this bucket returns .* an earlier one"):
        captured(x=rows(device, 3))
    captured.close()


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum(-1, dtype=torch.float64 if x.shape[0] > 2 else torch.float32),
        lambda x: x[:, : x.shape[0]] + 0,
        lambda x: x.sum() if x.shape[0] > 2 else x,
    ],
    ids=["dtype", "trailing shape", "axes"],
)
def test_p33_outputs_of_another_type_or_shape_are_refused(device, step):
    captured = cglab.capture(step, slots=X, buckets=(2, 4), strict=True)
    with pytest.raises(OutputStructureError, match="output 0 is .* an earlier bucket"):
        captured(x=rows(device, 3))
    captured.close()


def test_p34_rows_out_of_proportion_to_the_size_are_refused(device):
    captured = cglab.capture(lambda x: x[1:] + 0, slots=X, buckets=(2, 4), strict=True)
    with pytest.raises(
        OutputStructureError, match=r"rows \{4: 3, 2: 1\} by bucket size: neither fixed nor in proportion"
    ):
        captured(x=rows(device, 3))
    captured.close()


def test_p34_pruned_rows_of_fixed_number_are_not_taken_for_live_rows(device):
    """One bucket: two rows of an output must not be taken for the bucket's two rows."""
    with cglab.capture(lambda x: (x[:2] + 0, x + 0), slots=X, buckets=(2,)) as captured:
        captured(x=rows(device, 2))
        assert captured.coverage().captured in (0, 1)
    with cglab.capture(lambda x: x.sum(0).expand(4, 3) + 0, slots=X, buckets=(4,)) as captured:
        assert captured(x=rows(device, 3)).shape == (4, 3), "a fixed output of four rows is not cut to three"


def test_p35_every_bucket_fits_the_shared_output_buffer(device):
    """The largest bucket is captured first, so that no smaller one can overflow what it left."""
    with cglab.capture(lambda x: x.repeat_interleave(2, 0), slots=X, buckets=(8, 1, 4)) as captured:
        for n in (1, 8, 3, 5):
            assert torch.equal(captured(x=rows(device, n)), rows(device, n).repeat_interleave(2, 0))
        sizes = [line["bucket"] for line in captured.memory()]
        assert sizes == ["8", "4", "1"]


def test_p35_a_bucket_added_later_with_more_rows_gets_room(device):
    from cglab.graphs.outputs import OutputBuffers

    buffers = OutputBuffers()
    buffers.prepare(torch.ones(2, 3, device=device))
    small = buffers.store(torch.ones(2, 3, device=device)).tree()
    buffers.prepare(torch.zeros(4, 3, device=device))
    large = buffers.store(torch.zeros(4, 3, device=device)).tree()
    assert large.shape == (4, 3) and torch.equal(small, torch.ones(2, 3, device=device)), (
        "no overlap, no overflow"
    )


def test_b17_a_function_that_does_no_device_work_is_refused(device):
    for nothing in (lambda x: x, lambda x: x[:1], lambda x: (x, 3), lambda x: None):
        captured = cglab.capture(nothing, slots=X, buckets=(2,), strict=True)
        with pytest.raises(EmptyCaptureError, match="did no device work"):
            captured(x=rows(device, 2))
        captured.close()


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_b15_an_exception_in_the_body_leaves_the_process_usable(device, backend):
    armed = [True]

    def step(x):
        y = x * 2
        if armed[0]:
            raise ValueError("halfway")
        return y + 1

    captured = cglab.capture(step, slots=X, buckets=(2, 4), backend=backend, strict=True)
    with pytest.raises((CaptureError, ValueError), match="halfway"):
        captured(x=rows(device, 2))
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    assert gc.isenabled()
    assert torch.equal(rows(device, 2) * 2 + 1, step_free(device))
    armed[0] = False
    captured.warm(x=rows(device, 2))
    assert torch.equal(captured(x=rows(device, 2)), step_free(device))
    captured.close()


def step_free(device):
    return rows(device, 2) * 2 + 1


def test_b15_only_while_recording(device):
    """The warm-up passes, the recording raises: the case that leaves a stream in capture mode."""
    calls = []

    def step(x):
        calls.append(None)
        y = x * 2
        if len(calls) == 4:  # two warm-ups and the look at inputs come first
            raise ValueError("while recording")
        return y + 1

    captured = cglab.capture(step, slots=X, buckets=(2,))
    with pytest.warns(
        CaptureFailedWarning, match="raised while it was captured: ValueError: while recording"
    ):
        first = captured(x=rows(device, 2))
    assert torch.equal(first, step_free(device)), "the step ran eager"
    assert captured.coverage().reasons == {"CAPTURE_FAILED": 1}
    assert "while recording" in captured.coverage().last_facts["CAPTURE_FAILED"]
    captured.warm(x=rows(device, 2))
    assert torch.equal(captured(x=rows(device, 2)), step_free(device)) and captured.coverage().captured == 1
    captured.close()


def test_b13_out_of_memory_names_the_bucket_and_keeps_the_smaller_ones():
    """As an allocator would: whatever is larger than four rows does not fit."""

    def step(x):
        if x.shape[0] > 4:
            raise torch.OutOfMemoryError("out of memory")
        return x * 2

    with cglab.capture(step, slots=X, buckets=(2, 4, 8, 16)) as captured:
        with pytest.warns(CaptureFailedWarning) as caught:
            captured(x=rows("cpu", 2))
        assert ["bucket 16" in str(w.message) for w in caught] == [True, False]
        assert captured.captured_sizes == [2, 4] and sorted(captured.failures) == ["16", "8"]
        assert all("memory ran out" in text for text in captured.failures.values())
        assert torch.equal(captured(x=rows("cpu", 3)), rows("cpu", 3) * 2)
        assert captured.coverage().captured == 2


def test_b13_in_strict_mode_out_of_memory_is_its_own_error():
    def step(x):
        raise torch.OutOfMemoryError("out of memory")

    captured = cglab.capture(step, slots=X, buckets=(2,), strict=True)
    with pytest.raises(CaptureMemoryError, match="memory ran out"):
        captured(x=rows("cpu", 2))
    captured.close()


def test_p59_a_replay_inside_a_capture_is_refused(device):
    inner = cglab.capture(double, slots=X, buckets=(2,))
    inner(x=rows(device, 2))

    def outer(x):
        return inner(x=x) + 1

    with cglab.capture(outer, slots=X, buckets=(2,), strict=True) as captured:
        with pytest.raises((PoolBusyError, CaptureError), match="inside (a|another) capture"):
            captured(x=rows(device, 2))
    assert torch.equal(inner(x=rows(device, 2)), rows(device, 2) * 2)
    inner.close()


def test_p58_a_capture_inside_a_capture_is_refused_and_the_outer_state_survives(device):
    def outer(x):
        with cglab.capture(double, slots=X, buckets=(2,), strict=True) as inner:
            return inner(x=x) + 1

    with cglab.capture(outer, slots=X, buckets=(2,), strict=True) as captured:
        with pytest.raises(CaptureError, match="inside another capture"):
            captured(x=rows(device, 2))
    with cglab.capture(double, slots=X, buckets=(2,), strict=True) as captured:
        assert torch.equal(captured(x=rows(device, 2)), rows(device, 2) * 2)


def test_p86_hooks_that_come_after_the_capture_are_not_recorded(device):
    model = torch.nn.Linear(3, 3, device=device)
    calls = []
    with cglab.capture(lambda x: model(x), slots=X, buckets=(2,)) as captured:
        captured(x=rows(device, 2))
        model.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            expected = torch.nn.functional.linear(rows(device, 2), model.weight, model.bias)
        assert torch.equal(captured(x=rows(device, 2)), expected) and calls == []
        captured(x=rows(device, 3))  # above the largest bucket: eager, so the hook runs
        assert calls == [1]


def test_p36_python_side_effects_happen_at_capture_and_never_at_replay(device):
    log = []

    def step(x):
        log.append(x.shape[0])
        return x * 2

    with cglab.capture(step, slots=X, buckets=(2,)) as captured:
        captured(x=rows(device, 2))
        seen = len(log)
        for _ in range(5):
            captured(x=rows(device, 2))
        assert len(log) == seen


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_closed_capture_says_so(device, backend):
    captured = cglab.capture(double, slots=X, buckets=(2,), backend=backend)
    captured(x=rows(device, 2))
    captured.close()
    captured.close()
    with pytest.raises(ClosedError, match="was closed"):
        captured(x=rows(device, 2))


def test_every_reason_is_a_sentence():
    assert all(reason.value and reason.name == reason.name.upper() for reason in Reason)
    assert len({reason.value for reason in Reason}) == len(Reason)


def test_memory_has_one_line_for_each_bucket(device):
    with cglab.capture(double, slots=X, buckets=(2, 4, 8)) as captured:
        captured(x=rows(device, 1))
        ledger = captured.memory()
        assert [line["bucket"] for line in ledger] == ["8", "4", "2"]
        assert all(line["capture_ms"] > 0 and line["warmups"] >= 1 and line["breaks"] == 0 for line in ledger)
        assert [line["warmups"] for line in ledger][0] == 2, "two for the first shape"
        assert sum(line["pool_bytes"] for line in ledger[1:]) == 0, (
            "smaller buckets fit into what the largest left"
        )
    with contextlib.suppress(ClosedError):
        captured(x=rows(device, 1))


def test_b32_a_function_of_one_size_only_is_never_handed_out_untrimmed(device):
    def step(x):
        return x.view(4, 3) * 2

    with cglab.capture(step, slots=X, buckets=(4,)) as captured:
        assert torch.equal(captured(x=rows(device, 4)), rows(device, 4) * 2)
        with pytest.raises(
            OutputStructureError, match=r"3 rows padded to 4(?s:.*)capture at least two sizes"
        ):
            captured(x=rows(device, 3))


def test_a_capture_that_was_interrupted_starts_anew_with_the_next_call(device):
    calls = []

    def step(x):
        calls.append(x)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return x * 2

    captured = cglab.capture(step, slots={"x": cglab.Slot()}, buckets=(2, 4), self_check=True)
    with pytest.raises(KeyboardInterrupt):
        captured(x=torch.ones(4, device=device))
    for live in (4, 2, 3):
        assert captured(x=torch.ones(live, device=device)).tolist() == [2] * live
    assert captured.coverage().captured == 3


def test_strict_raises_at_every_call(device):
    captured = cglab.capture(
        lambda x: x * x.sum().item(), slots={"x": cglab.Slot()}, buckets=(4,), strict=True
    )
    for _ in range(2):
        with pytest.raises(cglab.errors.HostReadError):
            captured(x=torch.ones(4, device=device))


@pytest.mark.parametrize("function", [lambda x: x * 2, lambda x: x.t() @ x, lambda x: (x.sum(0), x.shape[1])])
def test_b32_one_bucket_whose_output_cannot_be_trimmed_is_never_handed_out_padded(device, function):
    with cglab.capture(function, slots={"x": cglab.Slot(axis=1)}, buckets=(4,)) as captured:
        captured(x=torch.ones(2, 4, device=device))
        with pytest.raises(OutputStructureError, match="how its output grows is not known"):
            captured(x=torch.ones(2, 3, device=device))


def test_b32_a_python_value_that_depends_on_the_size_is_refused_unless_sizes_are_exact(device):
    def step(x):
        return x * 2, x.shape[0]

    captured = cglab.capture(step, slots=X, buckets=(2, 4))
    with pytest.raises(OutputStructureError, match="would return the bucket's"):
        captured(x=rows(device, 3))
    with cglab.capture(step, slots=X, buckets=(2, 4), padding=False) as captured:
        assert captured(x=rows(device, 2))[1] == 2
        assert captured(x=rows(device, 4))[1] == 4
        assert captured.coverage().captured == 2


def test_an_output_whose_tensors_cannot_be_found_is_refused(device):
    captured = cglab.capture(
        lambda x: SimpleNamespace(logits=x * 2), slots=X, buckets=(2, 4), self_check=False, strict=True
    )
    with pytest.raises(OutputStructureError, match="SimpleNamespace, whose tensors cannot be found"):
        captured(x=rows(device, 3))
