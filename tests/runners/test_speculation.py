"""T2 to T4, verify, the draft loop and the seed step: captured against eager, and what padding must never touch."""

import pytest
import torch

from cglab.graphs.out_forms import same_bits

backends = pytest.mark.parametrize("backend", ["full", "breakable"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
branches = pytest.mark.parametrize("topk", [1, 3])


@pytest.fixture(params=["verify", "seed", "loop", "fused"])
def phase(request):
    return request.param


@pytest.fixture
def make(phase, verifies, drafts):
    """Makes worlds of a phase."""

    def make(*args, topk, **options):
        settings = {"topk": topk} if phase == "verify" else {"topk": topk, "phase": phase}
        return (verifies if phase == "verify" else drafts)(*args, settings=settings, **options)

    return make


def check(one, committed, seed=0):
    """One captured step equals padded eager to the bit: outputs, and the caches but for slot 0."""
    got, wanted, after, expected = one.both(one.inputs(committed, seed), len(committed))
    assert all(map(same_bits, got, wanted)), committed
    assert all(same_bits(a[:, 1:], b[:, 1:]) for pair in zip(after, expected, strict=True) for a, b in [pair])
    return got


@backends
@dtypes
@branches
def test_every_live_size_of_every_bucket_is_bitwise(make, backend, dtype, topk):
    one = make(backend, dtype=dtype, topk=topk)
    for live in (8, 1, 7, 2, 6, 3, 5, 4):
        check(one, [1 + (3 * live + 2 * i) % 9 for i in range(live)], live)
    assert one.runner.coverage().captured == 8 and one.runner.coverage().eager == 0
