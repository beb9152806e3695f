"""A small decoder with a filled cache, and every kind of runner over it."""

import gc

import pytest
import torch

from cglab.graphs.options import Options
from cglab.models.config import ModelConfig
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.runners.base import GraphGroup
from cglab.runners.decode import INPUTS, DecodeRunner

CONFIG = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=64, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
ROWS, PAGE, PAGES_A_ROW = 9, 4, 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device of each recorder."""
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def frozen_heap():
    """Every capture collects garbage first; what was imported is not worth looking through a thousand times."""
    import cglab

    with cglab.capture(lambda x: x.sum(-1).relu(), slots={"x": cglab.Slot()}, buckets=(1,)) as captured:
        captured(x=torch.ones(1, 2))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class World:
    """A model, a cache whose rows 1 to 8 own their pages, and a runner over both."""

    def __init__(
        self,
        device,
        backend="full",
        buckets=(1, 2, 4, 8),
        *,
        dtype=torch.float32,
        group=None,
        seed=0,
        **options,
    ):
        self.device = device
        self.model = random_model(CONFIG, device=device, dtype=dtype, seed=seed)
        self.kv = PagedKV(CONFIG, pages=(ROWS - 1) * PAGES_A_ROW + 1, page_size=PAGE, rows=ROWS,
                          max_context=PAGE * PAGES_A_ROW, device=device, dtype=dtype)  # fmt: skip
        pages = torch.arange(1, (ROWS - 1) * PAGES_A_ROW + 1, device=device)
        self.kv.page_table[1:] = pages.view(ROWS - 1, PAGES_A_ROW)
        generator = torch.Generator().manual_seed(seed)
        for cache in (self.kv.keys, self.kv.values):
            cache[:, PAGE:].copy_(torch.randn(cache[:, PAGE:].shape, generator=generator))
        self.group = group or GraphGroup(device)
        self.runner = DecodeRunner(
            self.model,
            self.kv,
            self.group,
            buckets,
            Options(backend=backend, strict=True, clone=True, **options),
        )

    def slots_of(self, row):
        return [page * PAGE + i for page in self.kv.page_table[row].tolist() for i in range(PAGE)]

    def inputs(self, lengths, tokens=None):
        """One decode step of rows 1, 2, ... with these lengths, this step's token included."""
        rows = list(range(1, len(lengths) + 1))
        tokens = tokens or [
            (7 * row + length) % CONFIG.vocab_size for row, length in zip(rows, lengths, strict=True)
        ]
        columns = (
            tokens,
            [n - 1 for n in lengths],
            [self.slots_of(row)[n - 1] for row, n in zip(rows, lengths, strict=True)],
            rows,
            lengths,
        )
        return {
            n: torch.tensor(c, device=self.device, dtype=torch.int64)
            for n, c in zip(INPUTS, columns, strict=True)
        }

    def cache(self):
        return torch.stack([self.kv.keys, self.kv.values]).clone()

    def restore(self, cache):
        self.kv.keys.copy_(cache[0])
        self.kv.values.copy_(cache[1])

    def close(self):
        self.runner.close()
        self.group.close()


@pytest.fixture
def world(device):
    """Makes worlds and closes them."""
    made = []

    def make(*args, **options):
        made.append(World(device, *args, **options))
        made[-1].runner.capture()
        return made[-1]

    make.made = made
    yield make
    for one in made:
        one.close()
