"""Records with a field gone or of another kind: every reader passes over them and says so, and none fails on its own."""

import json
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.engine.load import Load
from cglab.errors import RecordError, ResultsError
from cglab.lab import dsa_sweep
from cglab.lab.dsa_recorded import Earlier, asked_of
from cglab.lab.dsa_sweep import measured
from cglab.lab.recorded import newest
from cglab.lab.selection_rule import recorded_rule, step_costs
from cglab.lab.ttft_grid import Point
from cglab.measure.legible import NEEDED, check, legible
from cglab.measure.machine import Device
from cglab.measure.record import make_record
from cglab.measure.records import ResultsWarning, read
from cglab.ui import growth
from cglab.ui.recorded_bench import recorded_sources

CPU, GPU = torch.device("cpu"), Device("H200", "cuda")
SHIPPED = Path(__file__).parents[2] / "data/results"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3), max_leaves=4,
)  # fmt: skip
ARMS = ("breaks", "attention", "graph", "whole")
HERE, ASKED = Point(512, 64, 4), Load(32, 4, 512, 3, shared_prefix=64)


def made(bench, arm, **given):
    return make_record(bench=bench, arm=arm, device=CPU, run="run", model="tiny", dtype="float32", **given)


def sparse():
    """A point of the DSA bench in all arms, T9b the fastest, and what the captures cost."""
    ms = dict(zip(ARMS, (12.0, 11.0, 10.0, 8.0), strict=True))
    yield from (
        made(
            "dsa_prefill", arm, samples={"ttft_ms": [ms[arm], ms[arm] + 0.1] * 3}, parity={"verdict": "bitwise"},
            metrics={"instances": 3.0, "bitwise": True, "ttft_ratio": ms[arm] / 12, "tokens_equal": True},
            workload={**asked_of(HERE, ASKED), "step": {"tokens": 2048, "cached": 64, "requests": 4}},
        )
        for arm in ARMS
    )  # fmt: skip
    yield made("dsa_prefill_sweep", "whole", metrics={"graph_gb": 1.0, "capture_s": 2.0})


def views():
    """Records of a few steps by bench, as they are drawn."""
    steps = [record for record in read(SHIPPED).records if record.shows_graph_times]
    drawn = {
        bench: [record for record in steps if record.bench == bench][-6:]
        for bench in ("decode", "prefill", "ttft", "ttft_crossover", "token", "growth", "capture")
    }
    own = {
        "scheduler": made(
            "scheduler", "running", workload={"running": 4}, metrics=dict.fromkeys(growth.PARTS, 1.0)
        ),
        "planner": made(
            "planner", "sglang", metrics={"time_ms": 2.0}, workload={"phase": "decode", "load": "few"}
        ),
        "pipeline": made("pipeline", "eager", metrics={"tok_s": 9.0}, workload={"cap": 512, "stages": 2}),
    }
    fit = made("scheduler", "fit", workload={"of": "running"}, metrics={"fixed_us": 1.0, "each_us": 0.1})
    own_lines = {bench: [replace(each, device=GPU)] for bench, each in own.items()}
    own_lines["scheduler"].append(replace(fit, device=GPU))
    return drawn | own_lines


SPARSE, VIEWS = tuple(sparse()), views()


def places(values, *before):
    """Every path below an object of JSON."""
    for name, value in values.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from places(value, *before, name)


@st.composite
def damaged(draw, records):
    """Lines of records one of which has some fields gone or altered; nothing tells it by a checksum."""
    lines = [json.loads(each.as_line()) for each in records]
    odd = lines[draw(st.integers(0, len(lines) - 1))]
    for _ in range(draw(st.integers(1, 3))):
        within = odd
        every = sorted(places(odd))
        told = [place for place in every if place[0] in ("workload", "metrics", "samples", "parity")]
        *path, last = draw(st.sampled_from(told or every) | st.sampled_from(every))
        for name in path:
            within = within[name]
        if draw(st.booleans()):
            del within[last]
        else:
            within[last] = draw(JSON)
    return lines


def stored(folder, lines):
    (folder / "any.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read(folder).records


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder with nothing but what a test writes to its results."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "results").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CGLAB_DATA", str(folder))
        patch.setattr(dsa_sweep, "model_facts", lambda lab: {})
        patch.setattr(dsa_sweep, "make_record", lambda **given: SimpleNamespace(**given))  # no git each time
        yield folder / "results"


def quiet(read_them, *given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResultsWarning)
        return read_them(*given)


@settings(max_examples=80, deadline=None)
@given(lines=damaged(SPARSE))
def test_no_field_of_a_dsa_record_that_is_gone_or_altered_stops_auto_or_a_bench_that_goes_on(data, lines):
    records = stored(data, lines)
    rule = quiet(recorded_rule, "tiny", torch.float32, CPU)
    assert all(type(size) is int for limit in rule.limits for size in limit)
    earlier = quiet(Earlier.kept, "tiny", torch.float32, CPU)
    found = earlier.run("dsa_prefill", ARMS, asked_of(HERE, ASKED))
    assert len(found) in (0, len(ARMS))
    assert all(isinstance(each, float) for each in earlier.costs("dsa_prefill_sweep", "whole").values())
    lab = SimpleNamespace(device=CPU)
    kept = [*earlier.of("dsa_prefill", ARMS)]
    for arm in ARMS:
        dsa_sweep.swept(lab, arm, kept, points=[HERE], run="now", costs={})
    quiet(dsa_sweep.choice, lab, kept, "now")
    costs = [each for each in quiet(legible, records) if each.bench == "dsa_prefill" and each.model == "tiny"]
    assert quiet(step_costs, costs) == quiet(
        step_costs, [r for r in records if r.bench == "dsa_prefill" and r.model == "tiny"]
    )


@pytest.mark.parametrize("bench", VIEWS)
def test_no_field_of_a_record_that_is_gone_or_altered_stops_a_view(data, bench):
    @settings(max_examples=20, deadline=None)
    @given(lines=damaged(VIEWS[bench]))
    def drawn(lines):
        figure = quiet(quiet(newest, bench, stored(data, lines)).plot)
        assert figure.layout.title.text

    drawn()


@settings(max_examples=20, deadline=None)
@given(lines=damaged(VIEWS["decode"]))
def test_no_field_of_a_decode_record_that_is_gone_or_altered_stops_the_bench_of_recordings(data, lines):
    stored(data, lines)
    for opened in quiet(recorded_sources, data).values():
        with suppress(ResultsError):  # that none of them has what a prediction is made of
            bench = quiet(opened)
            quiet(bench.run, "decode", {"decode": "full"}, bench.default, None)


def without(record, path):
    """The record with a field gone."""
    values = json.loads(record.as_line())
    within = values
    *names, last = path.removesuffix("?").split(".")
    for name in names:
        within = within[name]
    within.pop(last, None)
    return type(record).from_dict(values)


REQUIRED = [
    (record, path)
    for record in (SPARSE[3], *(each[0] for each in VIEWS.values()))
    for path in NEEDED.get(record.bench, ())
    if not path.endswith("?")
]


@pytest.mark.parametrize(
    ("record", "path"), REQUIRED, ids=[f"{record.bench}, {path}" for record, path in REQUIRED]
)
def test_a_record_without_a_field_that_is_needed_is_passed_over_and_told_by_name(record, path):
    check(record)
    odd = without(record, path)
    with pytest.raises(RecordError, match=rf"record {record.id} of {record.bench}, .* has {path} absent"):
        check(odd)
    with pytest.warns(ResultsWarning, match=rf"passed over 1 records.* record {record.id} .* {path}"):
        assert legible([record, odd, record]) == [record, record]


def test_the_rule_is_that_of_the_records_that_can_be_read_and_its_reason_says_what_is_missing():
    assert [(cost.tokens, cost.cached) for cost in step_costs(SPARSE[:4])] == [(2048, 256)]
    odd = [*SPARSE[:3], without(SPARSE[3], "workload.step")]
    with pytest.warns(ResultsWarning, match=r"has workload\.step\.tokens absent"):
        assert step_costs(odd) == []
    few = [*SPARSE[:3], replace(SPARSE[3], metrics={**SPARSE[3].metrics, "instances": 7.0})]
    with pytest.warns(ResultsWarning, match=r"a time or more of each of 7 instances"):
        assert step_costs(few) == []


def test_every_record_that_is_shipped_can_be_read():
    stored_ones = read(SHIPPED)
    assert not stored_ones.problems
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(legible(stored_ones.records)) == len(stored_ones.records)


def test_a_sweep_of_points_whose_bits_nobody_compared_is_not_bitwise(data):
    known = measured("whole", [without(SPARSE[3], "metrics.bitwise")])
    swept = dsa_sweep.swept(
        SimpleNamespace(device=CPU), "whole", [*known.values()], points=[HERE], run="r", costs={}
    )
    assert swept.metrics["bitwise"] is False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metrics.step_ms", [1.0]), ("metrics.step_ms", 10**400), ("samples.ttft_ms", "fast"),
        ("samples.ttft_ms", [1.0, None]), ("parity.verdict", 3), ("device.name", None), ("device.load", "high"),
    ],
)  # fmt: skip
def test_a_figure_of_another_kind_makes_a_line_no_record(data, field, value):
    values = json.loads(SPARSE[0].as_line())
    part, name = field.split(".")
    values[part][name] = value
    (data / "any.jsonl").write_text(json.dumps(values) + "\n")
    found = read(data)
    assert not found.records and f"fields of the wrong kind: {field}" in found.problems[0].reason
