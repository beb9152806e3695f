"""Modules that nobody here wrote: how much of each is captured, and that it computes what eager computes."""

import pytest
import torch
from torch import nn

from cglab.errors import (
    HostReadError,
    InputError,
    NotInstalledError,
    OutputStructureError,
    UnsupportedOperationError,
)
from cglab.lab import transformers_arm, zoo_bench
from cglab.lab.zoo import _MIXTRAL, SPECIMENS, Specimen, _of, _transformers
from cglab.lab.zoo_bench import Capture, examine, zoo
from cglab.lab.zoo_table import Zoo
from cglab.measure.records import append

CPU = torch.device("cpu")
PARTLY = {"mixtral-loop": Capture.WITH_BREAKS}
REFUSED = {
    "qwen3-moe": HostReadError,  # a grouped product of float32 copies the ends of its groups to the host
    "mixtral": HostReadError,
    "gpt2-cache": OutputStructureError,  # a cache is no tensor
    "encoder-masked": UnsupportedOperationError,  # a nested tensor
    "gru": OutputStructureError,  # the last states have the rows on their second axis
}
MISSED = {"gru"}
"""Those whose refusal no single call shows: it comes of several sizes."""
LAZY = {"qwen3-static-cache"}
"""Those whose first call makes what the others use: the warm-up of a capture sees to it."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", SPECIMENS)
def test_a_module_is_captured_as_far_as_it_can_be_and_equals_eager(name):
    found = examine(SPECIMENS[name], CPU)
    if name in REFUSED:
        assert found.verdict is Capture.REFUSED and type(found.refusal) is REFUSED[name]
        assert found.refusal.advice and found.parity is None and found.coverage.steps == 0
        return
    assert found.verdict is PARTLY.get(name, Capture.WHOLE), found.refusal
    assert found.parity.verdict == "bitwise" and found.from_plain == 0.0, found.parity
    assert found.coverage.eager == 0 and found.coverage.captured == (4 if SPECIMENS[name].padding else 1)
    assert found.breaks == len(SPECIMENS[name].breaks) and found.operations > found.breaks


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", SPECIMENS)
def test_the_doctor_says_of_what_is_not_captured_whole_that_it_would_fail_and_of_nothing_else(name):
    assert examine(SPECIMENS[name], CPU).foreseen == (name not in MISSED)


@pytest.mark.parametrize("name", sorted(LAZY))
def test_the_doctor_tells_what_a_first_call_makes(name):
    assert "LazyInitialisation" in {finding.kind for finding in examine(SPECIMENS[name], CPU).findings}


def test_the_doctor_names_the_loop_over_experts():
    findings = examine(SPECIMENS["mixtral-loop"], CPU).findings
    assert {"HostReadError", "DynamicShapeError"} <= {finding.kind for finding in findings}
    assert {finding.place.function for finding in findings} >= {"forward"}


@pytest.mark.parametrize(
    "build",
    [
        lambda: SPECIMENS["mixtral"].build().bfloat16(),
        _of("MixtralForCausalLM", "MixtralConfig", experts_implementation="batched_mm", **_MIXTRAL),
    ],
    ids=["bfloat16", "batched"],
)
def test_experts_are_captured_whole_as_the_refusal_of_the_grouped_product_advises(build):
    found = examine(_transformers(build), CPU)
    assert found.verdict is Capture.WHOLE and found.foreseen and found.parity.verdict == "bitwise"
    advice = examine(SPECIMENS["mixtral"], CPU).refusal.advice
    assert "bfloat16" in advice and "batched_mm" in advice


class Stale(nn.Module):
    """Computes something else once it has aged: plain state, which a recording keeps as it was."""

    calls = 0

    def forward(self, x):
        return x + (self.calls > 100)


def test_a_replay_that_differs_is_corrupted():
    stale = Stale()
    specimen = Specimen(build=lambda: stale, inputs=lambda rows: {"x": torch.randn(rows, 3)}, buckets=(2,))
    assert examine(specimen, CPU).parity.verdict == "bitwise"

    def later(rows):
        stale.calls = 0
        return {"x": torch.randn(rows, 3)}

    with pytest.MonkeyPatch.context() as patch:
        warm = zoo_bench._captured

        def warm_and_age(*arguments):
            captured = warm(*arguments)
            stale.calls = 101
            return captured

        patch.setattr(zoo_bench, "_captured", warm_and_age)
        aged = examine(Specimen(build=lambda: stale, inputs=later, buckets=(2,)), CPU)
    assert aged.parity.verdict == "corrupted"


def test_the_bench_records_each_module_with_what_was_found():
    records = list(zoo(CPU, modules=["encoder", "encoder-masked"]))
    assert [record.model for record in records] == ["encoder", "encoder-masked"]
    whole, refused = (record.metrics for record in records)
    assert (
        whole["captured"] == "whole"
        and whole["refusal"] is None
        and records[0].parity["verdict"] == "bitwise"
    )
    assert refused["captured"] == "refused" and "nested tensor" in refused["refusal"] and refused["next_step"]
    assert all(record.notes == "captured on the tape" for record in records)


def test_the_table_has_the_newest_run_with_what_stops_a_whole_capture(tmp_path):
    assert Zoo().text(tmp_path) == Zoo().not_yet
    for names in (["encoder"], ["encoder-masked", "unet-block", "mixtral-loop"]):
        append(tmp_path / "zoo.jsonl", zoo(CPU, modules=names))
    where, _, _, _, *lines = Zoo().text(tmp_path).splitlines()
    assert "captured on the tape" in where
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:3] + row[4:5] for row in cells] == [
        ["encoder-masked", "torch", "refused", "-"],
        ["unet-block", "torch", "whole", "bitwise"],
        ["mixtral-loop", "transformers", "with breaks (2)", "bitwise"],
    ]
    assert "nested tensor" in cells[0][5] and cells[1][5] == "-" and cells[2][5].startswith("HostReadError")


def test_quick_is_of_torch_alone_and_an_unknown_name_lists_the_good_ones():
    assert {record.workload["package"] for record in zoo(CPU, quick=True)} == {"torch"}
    with pytest.raises(InputError, match="mamba2"):
        list(zoo(CPU, modules=["bert", "nothing"]))


def test_models_of_a_package_that_is_not_there_are_asked_for_in_vain(monkeypatch):
    monkeypatch.setattr(transformers_arm, "installed", lambda: False)
    with pytest.raises(NotInstalledError, match="modules=encoder"):
        list(zoo(CPU))
    assert [record.model for record in zoo(CPU, modules=["unet-block"])] == ["unet-block"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECIMENS)
def test_a_module_on_a_gpu_is_bitwise_or_refused_with_the_next_step(cuda, name):
    found = examine(SPECIMENS[name], cuda)
    assert found.verdict is (Capture.REFUSED if name in REFUSED else PARTLY.get(name, Capture.WHOLE))
    if found.verdict is Capture.REFUSED:
        assert found.refusal.advice and (name == "encoder-masked" or type(found.refusal) is REFUSED[name])
    else:
        assert found.parity.verdict == "bitwise", found.parity
