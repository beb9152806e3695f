"""Captures of the compiled body keep what captures of the portable one keep, and nothing is compiled again.

On a CPU the regions run as they are, in PyTorch's operators and under attention of the portable form: the tape is a
dispatch mode, under which nothing is compiled, and records no kernel of Triton's. On a GPU it is what a lab uses.
"""

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here: it comes with torch for CUDA")

from cglab.graphs.out_forms import same_bits
from cglab.models.body import Portable
from cglab.models.compiled import Compiled, nothing_compiled
from cglab.models.ops import use_ops
from cglab.models.regions import regions, torch_kernels

from .conftest import World

backends = pytest.mark.parametrize("backend", ["full", "breakable"])


class Uncompiled(Compiled):
    """The regions as they are, under a step that attends as the portable form does."""

    name = "portable"

    def __init__(self, config):
        super().__init__(config, backend="eager", kernels=torch_kernels())
        self._regions = regions(config, torch_kernels())


class CompiledWorld(World):
    """A world whose model computes in the compiled form."""

    def make_runner(self, buckets, options, settings):
        if self.device.type == "cuda":
            use_ops("compiled", self.model, self.kv)
        else:
            self.model.body = Uncompiled(self.config)
        return super().make_runner(buckets, options, settings)


@pytest.fixture
def compiled_world(device):
    made = []

    def make(*args, **options):
        made.append(CompiledWorld(device, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@backends
def test_every_batch_is_bitwise_that_of_the_padded_eager_step_and_b57_b58_compiles_nothing(
    compiled_world, backend
):
    one = compiled_world(backend, buckets=(1, 2, 4, 8))
    with nothing_compiled(one.model):
        for live in range(1, 9):
            values = one.inputs([4 + live % 3 + row % 5 for row in range(live)])
            before = one.cache()
            tokens, logits = one.runner.run(live, **values)
            replayed = one.cache()
            one.restore(before)
            size = one.runner.captured.pad(live)
            wanted = one.runner.run_padded_eager(live, size, **values)
            assert same_bits(tokens, wanted[0]) and same_bits(logits, wanted[1])
            assert same_bits(replayed[:, :, 1:], one.cache()[:, :, 1:])
    assert one.runner.coverage().captured == 8


def test_it_computes_what_the_portable_body_computes(compiled_world):
    one = compiled_world()
    values = one.inputs([6, 5, 4])
    before = one.cache()
    logits = one.runner.run(3, **values)[1]
    one.restore(before)
    one.model.body = Portable()
    assert torch.allclose(one.runner.run_live_eager(3, **values)[1], logits, atol=1e-4, rtol=1e-4)


@backends
def test_p28_a_recapture_while_requests_are_live_changes_nothing_of_theirs_and_compiles_nothing(
    compiled_world, backend
):
    one = compiled_world(backend)
    first = one.runner.run(3, **one.inputs([6, 5, 4]))
    noise = torch.randn_like(one.cache())
    before = one.cache()
    one.restore(noise)
    with nothing_compiled(one.model):
        one.runner.capture()
    assert same_bits(one.cache()[:, :, 1:], noise[:, :, 1:])
    one.restore(before)
    assert same_bits(one.runner.run(3, **one.inputs([6, 5, 4]))[1], first[1])


def test_p29_largest_first_and_smaller_buckets_take_no_memory(compiled_world):
    one = compiled_world("full")
    one.runner.capture()
    ledger = one.runner.captured.memory()
    assert [line["bucket"] for line in ledger] == ["8", "4", "2", "1"]
    assert all(line["pool_bytes"] == 0 for line in ledger[1:])


@backends
def test_p30_what_a_region_lets_go_of_during_a_capture_is_read_by_no_replay(compiled_world, backend):
    """The body drops queries, keys and values layer by layer, so their memory is used again within a recording."""
    one = compiled_world(backend)
    values = one.inputs([6, 5, 4])
    before = one.cache()
    clean = one.runner.run(3, **values)[1]
    noise = one.group.pool.borrow((100_000,), torch.float32).fill_(float("nan"))
    del noise
    one.restore(before)
    assert same_bits(one.runner.run(3, **values)[1], clean)


@pytest.mark.parametrize("order", [(8, 4, 2, 1), (1, 2, 4, 8)])
def test_p35_every_bucket_fits_the_shared_output_buffer(compiled_world, order):
    one = compiled_world("full")
    for live in order:
        before = one.cache()
        values = one.inputs([5] * live)
        logits = one.runner.run(live, **values)[1]
        assert logits.shape == (live, one.config.vocab_size)
        one.restore(before)
        assert same_bits(logits, one.runner.run_padded_eager(live, live, **values)[1])
