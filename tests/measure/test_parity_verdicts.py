"""Bitwise, drift or corrupted, for logits and tokens (B45, oracle 2 of the design)."""

import json
import math

import pytest
import torch

from cglab.errors import InputError
from cglab.measure.drift import Drift
from cglab.measure.parity import Verdict, compare_logits, compare_tokens, worst


def split_sum(x, parts):
    """A reduction over the last axis in ``parts`` pieces: the same mathematics in another order."""
    return sum(piece.sum(-1) for piece in x.chunk(parts, -1))


def logits(seed, steps=3, rows=4, vocab=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, rows, vocab, generator=generator).to(dtype)


def test_b45_another_reduction_order_is_drift_and_a_wrong_buffer_is_corrupted():
    def project(hidden, parts):
        return split_sum(hidden[:, :, None, :] * weight, parts)

    weight = logits(0, 1, 16, 256)[0]
    rounding = Drift()
    rounding.allow("logits", project(logits(1, vocab=256), 1), project(logits(1, vocab=256), 8))
    bound = rounding.bound("logits")
    hidden = logits(2, vocab=256)
    eager, graph = project(hidden, 1), project(hidden, 8)

    drift = compare_logits(graph, eager, bound=bound)
    assert drift.verdict is Verdict.DRIFT
    assert drift.ok
    assert 0 < drift.max_abs <= bound

    wrong_buffer = graph.clone()
    wrong_buffer[1, 2] = project(logits(3, vocab=256), 8)[1, 2]
    corrupted = compare_logits(wrong_buffer, eager, bound=bound)
    assert corrupted.verdict is Verdict.CORRUPTED
    assert not corrupted.ok
    assert (corrupted.step, corrupted.row) == (1, 2)
    assert corrupted.max_abs > bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_logits_are_bitwise(dtype):
    parity = compare_logits(logits(0, dtype=dtype), logits(0, dtype=dtype))
    assert parity.verdict is Verdict.BITWISE
    assert (parity.step, parity.row, parity.max_abs) == (None, None, 0.0)
    assert parity.compared == 3 * 4 * 16


def test_bits_count_not_values():
    ours, theirs = torch.zeros(1, 2), torch.tensor([[0.0, -0.0]])
    parity = compare_logits(ours, theirs)
    assert parity.verdict is Verdict.DRIFT
    assert parity.max_abs == 0.0


def test_the_smallest_difference_is_no_longer_bitwise():
    ours = logits(0)
    ours[2, 1, 5] = torch.nextafter(ours[2, 1, 5], torch.tensor(math.inf))
    assert compare_logits(ours, logits(0), bound=1e-5).verdict is Verdict.DRIFT
    strict = compare_logits(ours, logits(0))
    assert strict.verdict is Verdict.CORRUPTED
    assert (strict.step, strict.row) == (2, 1)


def test_the_first_difference_beyond_the_bound_is_named_not_the_first_drift():
    ours = logits(0)
    ours[0, 3, 0] += 1e-4
    ours[1, 2, 0] += 1.0
    ours[2, 0, 0] += 5.0
    parity = compare_logits(ours, logits(0), bound=1e-3)
    assert (parity.step, parity.row) == (1, 2)
    assert parity.max_abs == pytest.approx(5.0, rel=1e-5)


@pytest.mark.parametrize("place", ["captured", "oracle", "both"])
def test_nan_never_passes(place):
    ours, theirs = logits(0), logits(0)
    if place in ("captured", "both"):
        ours[1, 1, 3] = math.nan
    if place in ("oracle", "both"):
        theirs[1, 1, 3] = math.nan
    parity = compare_logits(ours, theirs, bound=1e300)
    assert parity.verdict is Verdict.CORRUPTED
    assert (parity.step, parity.row) == (1, 1)
    assert "NaN" in parity.detail
    assert json.loads(json.dumps(parity.as_dict(), allow_nan=False))["max_abs"] is None


def test_masked_entries_are_equal_but_a_lost_mask_is_corrupted():
    ours, theirs = logits(0), logits(0)
    ours[..., 7] = theirs[..., 7] = -math.inf
    theirs[0, 0, 0] += 1e-6
    drift = compare_logits(ours, theirs, bound=1e-5)
    assert drift.verdict is Verdict.DRIFT
    assert 0 < drift.max_abs < 1e-5
    ours[0, 0, 0] += 1.0
    assert compare_logits(ours, theirs, bound=1e-5).verdict is Verdict.CORRUPTED
    ours[0, 0, 0] -= 1.0
    ours[1, 0, 7] = 3.0
    assert compare_logits(ours, theirs, bound=1e9).verdict is Verdict.CORRUPTED


def test_corrupted_rows_tell_what_they_look_like():
    oracle = logits(0)
    swapped, stale, zero, several = (oracle.clone() for _ in range(4))
    swapped[1, 2] = oracle[1, 3]
    stale[2, 0] = oracle[1, 0]
    zero[0, 1] = 0
    several[1, 1:] += 1
    assert "row 3 of the same step (wrong row)" in compare_logits(swapped, oracle).detail
    assert "step before (stale)" in compare_logits(stale, oracle).detail
    assert "all zero" in compare_logits(zero, oracle).detail
    assert "3 rows of that step" in compare_logits(several, oracle).detail


def test_two_dimensions_are_one_step():
    ours = logits(0)[0]
    ours[3, 0] += 1
    parity = compare_logits(ours, logits(0)[0])
    assert (parity.step, parity.row) == (0, 3)


def test_what_cannot_be_compared_is_refused():
    x = logits(0)
    for ours, theirs in (
        (x, x[:, :2]),
        (x, x.double()),
        (x[0, 0], x[0, 0]),
        (x[:0], x[:0]),
        (x.long(), x.long()),
    ):
        with pytest.raises(InputError):
            compare_logits(ours, theirs)
    for bound in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="bound"):
            compare_logits(x, x, bound=bound)


def oracle_logits(tokens, gap, vocab=10):
    """Logits whose best is ``tokens`` and whose runner-up is the next id, ``gap`` below."""
    line = torch.zeros(len(tokens), vocab)
    for step, token in enumerate(tokens):
        line[step, token] = 5.0
        line[step, (token + 1) % vocab] = 5.0 - gap
    return line


def test_equal_tokens_are_bitwise():
    parity = compare_tokens([[1, 2, 3], [4]], [[1, 2, 3], [4]])
    assert parity.verdict is Verdict.BITWISE
    assert parity.compared == 4


def test_a_differing_token_without_logits_is_corrupted():
    parity = compare_tokens([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 9]])
    assert parity.verdict is Verdict.CORRUPTED
    assert (parity.step, parity.row) == (1, 1)
    assert "token 5 where the oracle has 9" in parity.detail


@pytest.mark.parametrize(("gap", "verdict"), [(1e-4, Verdict.DRIFT), (1e-2, Verdict.CORRUPTED)])
def test_a_differing_token_passes_only_at_a_near_tie(gap, verdict):
    oracle = [3] * 200
    ours = oracle[:150] + [4] + [7] * 49
    parity = compare_tokens([ours], [oracle], reference_logits=[oracle_logits(oracle, gap)], bound=1e-3)
    assert parity.verdict is verdict
    assert (parity.step, parity.row) == (150, 0)
    assert parity.tied == (verdict is Verdict.DRIFT)
    # The runs part there: what follows had another context.
    assert parity.compared == 151


def test_a_token_that_is_not_one_of_the_tied_does_not_pass():
    oracle = [3] * 200
    ours = [8, *oracle[1:]]
    parity = compare_tokens(
        [ours], [oracle], reference_logits=[oracle_logits(oracle, 1e-5)], bound=1e-3, forced=True
    )
    assert parity.verdict is Verdict.CORRUPTED
    assert (parity.step, parity.row) == (0, 0)


@pytest.mark.parametrize(("ties", "verdict"), [(2, Verdict.DRIFT), (3, Verdict.CORRUPTED)])
def test_at_most_one_percent_may_be_tied(ties, verdict):
    oracle = [3] * 200
    ours = [4] * ties + oracle[ties:]
    parity = compare_tokens(
        [ours], [oracle], reference_logits=[oracle_logits(oracle, 1e-5)], bound=1e-3, forced=True
    )
    assert (parity.verdict, parity.tied, parity.compared) == (verdict, ties, 200)


def test_nan_in_the_oracles_logits_is_no_tie():
    oracle = [3] * 200
    line = oracle_logits(oracle, 1e-5)
    line[0, 4] = math.nan
    parity = compare_tokens([[4, *oracle[1:]]], [oracle], reference_logits=[line], bound=1e-3, forced=True)
    assert parity.verdict is Verdict.CORRUPTED


def test_a_row_that_ends_early_is_corrupted_unless_the_runs_had_parted():
    assert compare_tokens([[1, 2]], [[1, 2, 3]]).step == 2
    oracle = [3] * 200
    lines = [oracle_logits(oracle, 1e-5)]
    early = compare_tokens([oracle[:150]], [oracle], reference_logits=lines, bound=1e-3)
    assert early.verdict is Verdict.CORRUPTED
    assert "150 tokens where the oracle has 200" in early.detail
    parted = compare_tokens([[*oracle[:150], 4, 5]], [oracle], reference_logits=lines, bound=1e-3)
    assert parted.verdict is Verdict.DRIFT


def test_the_earliest_step_is_named_over_rows():
    parity = compare_tokens([[1, 1, 0], [1, 0, 1]], [[1, 1, 1], [1, 1, 1]])
    assert (parity.step, parity.row) == (1, 1)


def test_tokens_that_cannot_be_compared_are_refused():
    for ours, theirs in (([[1]], [[1], [2]]), ([], []), ([[]], [[]])):
        with pytest.raises(InputError):
            compare_tokens(ours, theirs)
    with pytest.raises(InputError, match="do not cover row 0, step 1"):
        compare_tokens([[1, 2]], [[1, 3]], reference_logits=[torch.zeros(1, 10)], bound=1.0)


def test_worst_of_several():
    bitwise = compare_logits(logits(0), logits(0))
    drift = compare_logits(logits(0) + 1e-6, logits(0), bound=1e-5)
    assert worst([bitwise, drift, bitwise]) is drift
    assert worst([bitwise]) is bitwise
    with pytest.raises(InputError):
        worst([])
    assert str(bitwise) == "bitwise: 192 compared"


def test_the_bound_is_the_last_that_drifts():
    ours, theirs = torch.zeros(1, 4), torch.tensor([[0.0, 0.5, 0.0, 0.0]])
    assert compare_logits(ours, theirs, bound=0.5).verdict is Verdict.DRIFT
    assert compare_logits(ours, theirs, bound=0.499).verdict is Verdict.CORRUPTED
