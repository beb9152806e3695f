"""Sweeps over sizes of a phase, and up to which of them a capture pays."""

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.errors import InputError, ToggleError
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.lab.comparison import Comparison
from cglab.lab.steps import SHORTEST, StepSizes
from cglab.lab.sweep import Sweep
from cglab.measure.ab import interleave


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=4, max_context=32, prefill_buckets=[8, 32]) as opened:
        yield opened


def test_prefill_is_swept_by_tokens_and_every_step_fits_the_cache(lab):
    sweep = lab.sweep("prefill", ("eager", "breakable"), repeats=1, requests=4)
    frame = sweep.as_frame()
    assert frame["tokens"].tolist() == [32, 32] and frame["bucket"].tolist() == [32, 32]
    assert frame["parity"].tolist() == ["reference", "bitwise"]
    assert sweep.title == "One prefill step of pico-gqa against tokens, cached 0, requests 4"


def test_sizes_of_ones_own_are_taken_and_where_it_ran_eager_is_said(lab):
    sweep = lab.sweep("prefill", ("eager", "breakable"), (8, 9, 20), repeats=1)
    captured = sweep.as_frame().query("arm == 'breakable'")
    assert captured["bucket"].tolist() == [8, 32, 32]
    assert captured["reasons"].tolist() == ["", "waste_ceiling", ""]


def test_an_unknown_technique_is_told(lab):
    with pytest.raises(ToggleError, match="good names"):
        lab.sweep("prefil")


@given(st.integers(1, 9000), st.integers(2, 2048), st.integers(1, 64))
def test_swept_sizes_fit_a_step_and_split_evenly(largest, context, requests):
    sizes = StepSizes([1], [largest], context).swept("prefill", requests)
    most = min(largest, requests * (context - 1))
    assert sizes == sorted(set(sizes)) and all(size % requests == 0 for size in sizes)
    assert most - requests < sizes[-1] <= most
    assert all(size >= SHORTEST for size in sizes[:-1])


def swept(**ratios_of_tokens):
    """A sweep whose breakable arm takes a known share of eager's 10 ms; None for a step that it ran eager."""
    comparisons = []
    for name, ratio in ratios_of_tokens.items():
        tokens = int(name.removeprefix("t"))
        clocks = {"eager": cycle([1.0, 1.001]), "breakable": cycle([ratio or 1.0])}
        arms = {arm: lambda c=clock: next(c) / 100 for arm, clock in clocks.items()}
        coverage = {arm: Coverage() for arm in arms}
        if ratio is None:
            coverage["breakable"].miss(Miss(Reason.WASTE_CEILING), tokens)
        else:
            coverage["breakable"].hit(str(tokens), tokens, tokens)
        workload = {"tokens": tokens, "cached": 0, "requests": 1, "bucket": tokens}
        times = interleave(arms, repeats=2)
        comparisons.append(
            Comparison(
                "prefill", "qwen3-8b", workload, "cuda", times, {}, coverage, {arm: [] for arm in arms}
            )
        )
    return Sweep(tuple(comparisons))


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ({"t128": 0.4, "t512": 0.7}, "breakable wins up to 512 tokens, the largest measured"),
        ({"t128": 0.4, "t512": 1.0}, "breakable wins up to 128 tokens, not at 512"),
        ({"t128": 1.0, "t512": 1.2}, "breakable wins at none of [128, 512] tokens"),
        (
            {"t64": 0.5, "t128": 1.2, "t512": 0.8},
            "breakable wins up to 512 tokens, the largest measured; no win at 128; a smaller size is slower: a limit that harms none is 64",
        ),
    ],
)
def test_s2_the_limit_is_said_in_a_sentence(ratios, told):
    limit = swept(**ratios).limit("breakable")
    assert str(limit) == told
    assert limit.as_frame()["tokens"].tolist() == [int(name[1:]) for name in ratios]
    assert limit.as_frame()["ratio"].tolist() == pytest.approx(list(ratios.values()), rel=1e-2)
    assert limit.as_frame()["eager_ms"].tolist() == pytest.approx([10.0] * len(ratios), rel=1e-2)


def test_a_size_that_ran_eager_says_nothing_about_captures():
    limit = swept(t8=None, t128=0.5).limit("breakable")
    assert [point.size for point in limit.found.evidence] == [128]
    with pytest.raises(InputError, match="at least one"):
        swept(t8=None).limit("breakable")


def test_the_figure_has_the_ratios_and_a_line_at_the_limit():
    limit = swept(t128=0.5, t8192=1.0).limit("breakable")
    figure = limit.plot()
    (points,) = figure.data
    assert list(points.x) == [128, 8192] and list(points.y) == pytest.approx([0.5, 1.0], rel=1e-2)
    assert figure.layout.title.text == "Prefill of qwen3-8b: breakable over eager, by size"
    assert figure.layout.title.subtitle.text == str(limit)
    assert sorted(line.x0 for line in figure.layout.shapes) == [0, 128]
