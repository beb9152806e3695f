"""T7, prefill of a pipeline stage: proxies in and out, captured against eager, and what all ranks decide together."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cglab.errors import BucketError, RankError, SlotError
from cglab.graphs.coverage import Reason
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.models.body import Portable
from cglab.models.spans import Span
from cglab.models.stages import cut, held_layers
from cglab.runners import prefill
from cglab.runners.pipeline_stage import (
    STAGE_LIMIT,
    DsaStageRunner,
    PipelineStageRunner,
    layer_miss,
    stage_sizes,
)
from tests.models.latent import TINY

from .conftest import CONFIG, WINDOWED, PrefillWorld, WindowPrefillWorld
from .latent import ARMS, Latent
from .splits import BUCKETS, ROOM, same_cache

STAGES = cut(5, 3)
DEEP = replace(CONFIG, num_layers=5)
PLACES = pytest.mark.parametrize("index", [0, 1, 2], ids=["first", "middle", "last"])


class TwoStreams(Portable):
    """Carries the residual stream beside the output of a block, as the compiled form does."""

    carries = ("hidden_states", "residual")

    def through(self, model, carried, turn, attend, taps=None):
        hidden, residual = carried if len(carried) == 2 else (*carried, torch.zeros_like(carried[0]))
        for layer, block in held_layers(model.blocks):
            residual = residual + hidden
            residual = residual + block.attention(block.attention_norm(residual), turn, layer, attend)
            hidden = block.feed_forward(block.feed_forward_norm(residual))
        return hidden, residual

    def finish(self, model, carried):
        return model.norm(carried[0] + carried[1])


SHARED = {"with selection": (2, 4), "selection handed through": (2, 3, 4)}
"""Layers of latent attention that share, by contract: the middle stage takes a selection and hands on one."""
CONTRACTS = pytest.mark.parametrize("contract", ["hidden only", "with residual", *SHARED])


class StageWorld(PrefillWorld):
    """Prefill steps of one stage; proxies are noise."""

    config, stage, body = DEEP, STAGES[1], Portable

    def make_runner(self, buckets, options, settings):
        self.model.body = self.body()
        return PipelineStageRunner(self.model, self.kv, self.group, buckets, options, **settings)

    def inputs(self, spans, seed=0):
        tokens = sum(length for _, _, length in spans)
        noise = self.runner.noise(tokens, torch.Generator().manual_seed(seed))
        columns = super().inputs(spans)
        own = {name: columns[name] for name in self.runner.own if name in columns}
        return own | {name: value.to(self.device) for name, value in noise.items()}

    def run(self, spans, seed=0, run=None):
        """What a step hands on, as a tuple."""
        out = (run or self.runner.run)([Span(*span) for span in spans], **self.inputs(spans, seed))
        return out if isinstance(out, tuple) else (out,)

    def check(self, spans, seed=0):
        """A step against padded eager from one state: outputs and caches to the bit."""
        before = self.cache()
        got, after = self.run(spans, seed), self.cache()
        self.restore(before)
        size = self.runner.captured.pad(sum(length for _, _, length in spans))
        padded = self.run(
            spans, seed, lambda live, **values: self.runner.run_padded_eager(live, size, **values)
        )
        assert all(same_bits(a, b) for a, b in zip(got, padded, strict=True))
        assert same_cache(after, self.cache())
        return got


class WindowStageWorld(WindowPrefillWorld, StageWorld):
    """The same with a stage of sliding-window layers and one that sees everything."""

    config, stage = replace(WINDOWED, num_layers=5, window_layers=(1, 2)), cut(5, 2)[0]

    def inputs(self, spans, seed=0):
        return {**StageWorld.inputs(self, spans, seed), "window_out_slots": self.slide(spans)}


class LatentStageWorld(Latent, StageWorld):
    """The same of latent attention: what of it is recorded is among the settings."""

    def make_runner(self, buckets, options, settings):
        settings = {"parts": ARMS["T8 and T9"]} | ROOM | settings
        return DsaStageRunner(self.model, self.kv, self.group, buckets, options, **settings)


@pytest.fixture
def stages(device):
    """Makes worlds of a stage and closes them."""
    made = []

    def make(
        index=1, contract="hidden only", backend="breakable", buckets=BUCKETS, kind=StageWorld, **options
    ):
        about = {"body": TwoStreams if contract == "with residual" else Portable}
        if contract in SHARED:
            kind, about["config"] = (
                LatentStageWorld,
                replace(TINY, num_layers=5, shared_layers=SHARED[contract]),
            )
        if kind is not WindowStageWorld:
            about["stage"] = STAGES[index]
        cls = type("One", (kind,), about)
        made.append(cls(device, backend, buckets, **options))
        made[-1].runner.capture()
        return made[-1]

    make.made = made
    yield make
    for one in made:
        one.close()


@PLACES
@CONTRACTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_live_size_of_every_bucket_is_bitwise(stages, index, contract, dtype):
    one = stages(index, contract, dtype=dtype)
    for live in (16, 2, 15, 3, 8, 9, 4, 5):
        out = one.check([(1, 0, live - 1), (2, 3, 1)], seed=live)
        handed = [proxy.columns for proxy in one.model.handed] or [(32,)]
        assert [tuple(each.shape) for each in out] == [(live, *columns) for columns in handed]
    assert one.runner.coverage().captured == 8 and one.runner.coverage().eager == 0


def test_a_selection_is_as_wide_as_declared_in_a_cache_that_has_room_for_fewer_keys(device):
    shape = {"config": replace(TINY, num_layers=5, shared_layers=(2,), index_topk=24), "stage": STAGES[0]}
    one = type("One", (LatentStageWorld,), shape)(device, "breakable", BUCKETS)
    one.runner.capture()
    assert one.model.handed[1].columns == (24,) and len(one.kv.context_positions) == 16
    assert one.check([(1, 9, 4), (2, 0, 3)])[1].shape == (7, 24)
    one.close()


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("index", [0, 1], ids=["hands a selection on", "takes one and hands one on"])
def test_a_selection_is_handed_on_bitwise_in_every_arm(stages, index, arm):
    one = stages(index, "with selection", settings={"parts": ARMS[arm]})
    for spans in ([(1, 0, 15)], [(1, 9, 4), (2, 0, 2)], [(3, 2, 3)]):
        *_, selected = one.check(spans, seed=len(spans))
        assert selected.dtype == torch.int32 and (selected[:, 0] >= 4).all(), (
            "no live token selects what is reserved"
        )
    assert one.runner.coverage().captured == 3
    assert one.runner.coverages()["dsa_attention"].captured == (0 if one.runner.parts.attend else 3)


def test_a_stage_with_window_layers_is_bitwise(stages):
    one = stages(kind=WindowStageWorld)
    spans = [(1, 5, 6), (2, 0, 3)]
    before = one.cache()
    got, after = one.run(spans), one.cache()
    one.restore(before)
    padded = one.run(spans, run=lambda live, **values: one.runner.run_padded_eager(live, 16, **values))
    assert all(same_bits(a, b) for a, b in zip(got, padded, strict=True))
    assert all(same_bits(a[:, 4:], b[:, 4:]) for a, b in zip(after, one.cache(), strict=True))
    assert [list(pool.layers) for pool in one.kv.pools] == [[0], [1, 2]], "pools of the stage's own layers"


@CONTRACTS
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 9)), max_size=6
    )
)
def test_p15_b33_steps_that_grow_and_shrink_with_other_proxies_are_bitwise(stages, contract, steps):
    one = stages.made[0] if stages.made else stages(1, contract)
    for lengths, seed in steps:
        spans = [(row, 0, length) for row, length in enumerate(lengths, 1)]
        if isinstance(one.runner.captured.pad(sum(lengths)), int):
            one.check(spans, seed)


@CONTRACTS
def test_b33_p72_two_different_proxies_in_a_row_are_both_computed(stages, contract):
    """The second step has the same shape, so that it is loaded by what was planned for the first."""
    one = stages(1, contract)
    spans = [(1, 8, 5)]
    first, second, again = one.check(spans, 1), one.check(spans, 2), one.check(spans, 1)
    assert not any(torch.allclose(a, b) for a, b in zip(first, second, strict=True))
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
    assert one.runner.coverage().captured == 3


@CONTRACTS
def test_p75_padded_rows_of_proxies_are_reset_after_a_larger_batch(stages, contract):
    """To zero, and of a selection to nothing selected."""
    one = stages(1, contract)
    one.run([(1, 0, 8)], 1)
    one.run([(1, 0, 5)], 2)
    for proxy in one.runner.taken:
        view = one.runner.captured.buffers.view(8)[proxy.name]
        assert proxy.padding == (-1 if proxy.name == "topk_indices" else 0)
        assert (view[5:] == proxy.padding).all() and (view[:5] != proxy.padding).any(), proxy.name


@CONTRACTS
def test_p75_poison_in_the_padding_of_a_cache_reaches_no_live_row(stages, contract):
    one = stages(1, contract)
    clean = one.run([(1, 0, 5)], 3)
    for cache in one.kv.caches().values():
        cache[:, 0] = float("nan")
    assert all(same_bits(a, b) for a, b in zip(one.run([(1, 0, 5)], 3), clean, strict=True))


def test_p73_what_is_handed_on_is_cut_in_tokens_and_not_in_requests(stages):
    one = stages(1, "with residual")
    out = one.run([(1, 0, 3), (2, 0, 1), (3, 4, 2)])
    assert {each.shape[0] for each in out} == {6}
    assert {name: each.shape for name, each in one.runner.named(out).items()} == {
        "hidden_states": (6, 32), "residual": (6, 32)
    }  # fmt: skip


def test_what_is_on_its_way_is_not_overwritten_by_the_next_micro_batch(stages):
    one = stages(1)
    (handed,) = one.run([(1, 0, 4)], 1)
    kept = handed.clone()
    one.run([(2, 0, 4)], 2)
    assert same_bits(handed, kept)


def test_p74_an_absent_proxy_and_a_marker_are_told_by_name(stages):
    one = stages(1, "with residual")
    spans, values = [Span(1, 0, 4)], one.inputs([(1, 0, 4)])
    with pytest.raises(SlotError, match="'residual' of pp_prefill was given no tensor"):
        one.runner.run(spans, **{name: each for name, each in values.items() if name != "residual"})
    with pytest.raises(SlotError, match="'marker' is a new input"):
        one.runner.run(spans, **values, marker=torch.ones(4))
    with pytest.raises(SlotError, match="disagree on the batch size"):
        one.runner.run(spans, **{**values, "residual": values["residual"][:3]})
    one.runner.run(spans, **values)
    assert one.runner.coverage().captured == 1


def test_p77_inputs_are_bound_by_name_in_any_order(stages):
    one = stages(1, "with residual")
    spans, values = [Span(1, 0, 4)], one.inputs([(1, 0, 4)])
    first = one.runner.run(spans, **values)
    second = one.runner.run(spans, **dict(reversed(values.items())))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_only_the_first_stage_takes_tokens(stages):
    assert stages(0).runner.inputs == prefill.INPUTS
    assert stages(1).runner.inputs == ("positions", "out_slots", "hidden_states")
    assert stages(2, "with residual").runner.inputs == ("positions", "out_slots", "hidden_states", "residual")


def test_a_breakable_stage_breaks_once_in_each_of_its_own_layers(stages):
    for index, stage in enumerate(STAGES):
        ledger = stages(index).runner.captured.memory()
        assert {line["breaks"] for line in ledger} == {len(stage.layers)}


def test_above_the_limit_a_step_is_eager_with_its_reason(stages):
    one = stages(1)
    one.run([(1, 0, 9), (2, 0, 8)])
    assert one.runner.coverage().reasons == {"ABOVE_LIMIT": 1}
    assert one.runner.coverage().last_facts == {"ABOVE_LIMIT": "17 tokens, captured up to 16"}
    off = stages(1, backend="eager")
    off.run([(1, 0, 4)])
    assert off.runner.coverage().reasons == {"BACKEND_EAGER": 1}


@pytest.mark.parametrize("budget", [1, 300, 2048, 8192, 8200, 32768])
def test_p05_the_default_sizes_end_with_the_budget_or_the_limit(budget):
    sizes = stage_sizes(budget)
    assert sizes[-1] == min(budget, STAGE_LIMIT) and sizes == sorted(set(sizes))
    assert stage_sizes(budget, limit=512)[-1] == min(budget, 512), "a crossover that was measured"


def test_p05_explicit_sizes_override_the_limit_and_not_the_budget():
    assert stage_sizes(32768, limit=512, explicit=[16384, 7]) == [7, 16384]
    with pytest.raises(BucketError, match="above the maximum of 2048"):
        stage_sizes(2048, explicit=[4096])


class Told:
    """Another rank that holds other recordings, or was told to capture other sizes."""

    count = 2

    def __init__(self, lacks=(), plus=0, state=0):
        self.lacks, self.plus, self.state, self.asked = lacks, plus, state, 0

    def unrecorded(self, device):
        return None

    def gather(self, mine):
        self.asked += 1
        other = mine.clone()
        if self.asked == 1:
            other[0] += self.plus
        else:
            other[list(self.lacks)] = self.state
        return torch.stack([mine, other])


def test_p10_b79_a_bucket_that_another_rank_lacks_runs_eager_on_all(stages):
    one = stages(1)
    one.runner.agree(Told(lacks=[1]))
    for length in (4, 7, 16):
        one.run([(1, 0, length)])
    assert one.runner.coverage().captured == 2 and one.runner.coverage().reasons == {"OTHER_RANK": 1}
    assert one.runner.coverage().last_facts["OTHER_RANK"] == "bucket 8, no recording on rank 1 of 2"


def test_p10_ranks_that_were_told_other_sizes_are_refused(stages):
    with pytest.raises(RankError, match=r"is to capture \[4, 8, 16\] and another rank something else"):
        stages(1).runner.agree(Told(plus=1))


def test_b79_a_rank_that_skipped_its_capture_stops_all(stages):
    with pytest.raises(RankError, match=r"rank 1 of 2 has skipped the capture of \[4, 8, 16\]"):
        stages(1).runner.agree(Told(lacks=[0, 1, 2], state=-1))
    one = stages(1)
    unused = PipelineStageRunner(one.model, one.kv, one.group, BUCKETS, Options("breakable"))
    with pytest.raises(RankError, match="rank 0 of 2 has skipped"):
        unused.agree(Told())
    unused.close()


def test_p76_eligibility_is_judged_on_the_stages_own_layers():
    here = [None, None, "attention", "attention", None]
    assert layer_miss(STAGES[1], here) is None, "layers 0, 1 and 4 are others'"
    miss = layer_miss(STAGES[1], [None, None, "attention", None, "attention"])
    assert miss.reason is Reason.NO_ATTENTION and miss.facts == "layers [3] of stage 1 of 3 (layers 2 to 3)"


def test_p76_a_layer_without_attention_makes_its_stage_eager_and_no_other(stages):
    for index, reasons in ((1, {"NO_ATTENTION": 1}), (0, {})):
        one = stages(index)
        if index == 1:
            one.model.blocks[3].mixer = one.model.blocks[3].attention
            forward, one.model.blocks[3].attention = one.model.blocks[3].mixer, None
            again = PipelineStageRunner(one.model, one.kv, one.group, BUCKETS, Options("breakable"))
            one.model.blocks[3].attention = forward
            one.runner.close()
            one.runner = again
        one.run([(1, 0, 4)])
        assert one.runner.coverage().reasons == reasons


def test_b19_nothing_is_made_on_the_current_default_device(stages):
    """With several GPUs the current device need not be the stage's; here it is one that computes nothing."""
    one = stages(1)
    wanted = one.run([(1, 2, 5)])
    with torch.device("meta"):
        again = PipelineStageRunner(one.model, one.kv, one.group, BUCKETS, Options("breakable", strict=True))
        again.capture()
    one.runner.close()
    one.runner = again
    values = one.inputs([(1, 2, 5)])
    with torch.device("meta"):
        got = again.run([Span(1, 2, 5)], **values)
    assert again.coverage().captured == 1
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
