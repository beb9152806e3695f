"""A small decoder with a filled cache, and every kind of runner over it."""

from dataclasses import replace

import pytest
import torch

from cglab.graphs.options import Options
from cglab.models.assistant import Assistant, AssistantConfig
from cglab.models.config import ModelConfig
from cglab.models.draft_tree import first_candidates, next_candidates, organize
from cglab.models.kv import PagedKV
from cglab.models.loading import fill_randomly, random_model
from cglab.models.spans import Span
from cglab.runners import prefill
from cglab.runners.base import GraphGroup
from cglab.runners.decode import INPUTS, DecodeRunner
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.prefill import PrefillRunner
from cglab.runners.seed_step import SeedRunner
from cglab.runners.verify import VerifyRunner

CONFIG = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=64, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
WINDOWED = replace(CONFIG, num_layers=3, sliding_window=6, window_layers=(0, 2))
ASSISTANT = AssistantConfig(
    vocab_size=97, backbone_size=32, hidden_size=16, intermediate_size=24, layer_kinds=("full", "full"), num_heads=4,
    num_kv_heads=2, head_dim=8,
)  # fmt: skip
ROWS, PAGE, PAGES_A_ROW = 9, 4, 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device of each recorder."""
    return torch.device(request.param)


class World:
    """A model, a cache whose rows 1 to 8 own their pages, and a runner over both."""

    config, window_pages, stage = CONFIG, None, None

    def __init__(
        self,
        device,
        backend="full",
        buckets=(1, 2, 4, 8),
        *,
        dtype=torch.float32,
        kv_dtype=None,
        group=None,
        seed=0,
        settings=None,
        **options,
    ):
        self.device = device
        self.model = random_model(self.config, device=device, dtype=dtype, seed=seed, stage=self.stage)
        self.kv = PagedKV(self.config, pages=(ROWS - 1) * PAGES_A_ROW + 1, page_size=PAGE, rows=ROWS,
                          max_context=PAGE * PAGES_A_ROW, device=device, dtype=kv_dtype or dtype,
                          window_pages=self.window_pages, layers=self.stage and self.stage.layers)  # fmt: skip
        pages = torch.arange(1, (ROWS - 1) * PAGES_A_ROW + 1, device=device)
        self.kv.full.page_table[1:] = pages.view(ROWS - 1, PAGES_A_ROW)
        generator = torch.Generator().manual_seed(seed)
        for cache in self.kv.caches().values():
            cache[:, PAGE:].copy_(torch.randn(cache[:, PAGE:].shape, generator=generator))
        self.group = group or GraphGroup(device)
        self.runner = self.make_runner(
            buckets, Options(backend=backend, strict=True, clone=True, **options), settings or {}
        )

    def make_runner(self, buckets, options, settings):
        return DecodeRunner(self.model, self.kv, self.group, buckets, options, **settings)

    def slots_of(self, row):
        return [page * PAGE + i for page in self.kv.full.page_table[row].tolist() for i in range(PAGE)]

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
        return torch.stack([self.kv.full.keys, self.kv.full.values]).clone()

    def restore(self, cache):
        self.kv.full.keys.copy_(cache[0])
        self.kv.full.values.copy_(cache[1])

    def close(self):
        self.runner.close()
        self.group.close()


class Windowed:
    """A world with sliding-window layers: each row has ``ring`` pages of their pool and uses them in turn."""

    config, ring = WINDOWED, 3
    window_pages = (ROWS - 1) * ring + 1

    def slide(self, spans):
        """Maps the pages that rows see from (row, start, length) and no others; the step's slots in the pool."""
        table, slots = torch.zeros_like(self.kv.sliding.page_table, device="cpu"), []
        for row, start, length in spans:
            for page in range(
                max(start - self.config.sliding_window + 1, 0) // PAGE, (start + length - 1) // PAGE + 1
            ):
                table[row, page] = 1 + (row - 1) * self.ring + page % self.ring
            position = torch.arange(start, start + length)
            slots.append(table[row, position // PAGE] * PAGE + position % PAGE)
        self.kv.sliding.page_table.copy_(table)
        return torch.cat([torch.zeros(0, dtype=torch.int64), *slots]).to(self.device)

    def window_slots_of(self, row, start, length):
        """Slots of the positions that such a span sees."""
        position = torch.arange(max(start - self.config.sliding_window + 1, 0), start + length)
        pages = self.kv.sliding.page_table[row].cpu()[position // PAGE]
        return (pages * PAGE + position % PAGE).tolist()

    def cache(self):
        """Keys and values of the full pool, then of the sliding one."""
        return [cache.clone() for cache in self.kv.caches().values()]

    def restore(self, cache):
        for current, saved in zip(self.kv.caches().values(), cache, strict=True):
            current.copy_(saved)


class WindowWorld(Windowed, World):
    """Decode steps; a row has as many pages as a window touches."""

    def inputs(self, lengths, tokens=None):
        slots = self.slide([(row, length - 1, 1) for row, length in enumerate(lengths, 1)])
        return {**super().inputs(lengths, tokens), "window_out_slots": slots}


class PrefillWorld(World):
    """The same with a prefill runner; spans are (row, start, length), and rows own 16 tokens each."""

    def make_runner(self, buckets, options, settings):
        return PrefillRunner(self.model, self.kv, self.group, buckets, options, **settings)

    def inputs(self, spans):
        """One prefill step: tokens are made up from row and position."""
        places = [(row, start + i) for row, start, length in spans for i in range(length)]
        columns = (
            [(7 * row + 3 * position) % self.config.vocab_size for row, position in places],
            [position for _, position in places],
            [self.slots_of(row)[position] for row, position in places],
        )
        return {
            n: torch.tensor(c, device=self.device, dtype=torch.int64)
            for n, c in zip(prefill.INPUTS, columns, strict=True)
        }

    def step(self, spans, run=None):
        """Hidden states of one step, by the runner or by one of its oracles."""
        return (run or self.runner.run)([Span(*span) for span in spans], **self.inputs(spans))

    def both(self, spans):
        """Hidden states of one captured step and of padded eager, and the caches after each, from one state."""
        before = self.cache()
        got, after = self.step(spans), self.cache()
        self.restore(before)
        size = self.runner.captured.pad(sum(length for _, _, length in spans))
        wanted = self.step(spans, lambda live, **values: self.runner.run_padded_eager(live, size, **values))
        return got, wanted, after, self.cache()


class WindowPrefillWorld(Windowed, PrefillWorld):
    """Prefill steps; a row has a page for every token, of which those before the window are dropped."""

    ring = PAGES_A_ROW
    window_pages = (ROWS - 1) * ring + 1

    def inputs(self, spans):
        return {**super().inputs(spans), "window_out_slots": self.slide(spans)}


class Speculative(World):
    """What verify and drafts share: requests with so many tokens in the cache, and a draft of some steps."""

    steps = 3

    def tensor(self, values, dtype=torch.int64):
        return torch.tensor(values, device=self.device, dtype=dtype)

    def span(self, committed):
        """First position and number of the tokens that a step of so many committed ones stores or, frozen, asks as."""
        raise NotImplementedError

    def reads(self, committed):
        """Slots of each pool that a step reads or writes."""
        spans = [(row, *self.span(count)) for row, count in enumerate(committed, 1)]
        slots = [[slot for row, start, n in spans for slot in self.slots_of(row)[: start + n]]]
        if self.kv.sliding is not None:
            slots.append([slot for span in spans for slot in self.window_slots_of(*span)])
        return slots

    def poison(self, pool, slots):
        """NaN in these slots of a pool."""
        for cache in (pool.keys, pool.values):
            cache[:, list(slots)] = float("nan")

    def both(self, values, live):
        """What a captured step and padded eager return, from one state, and the caches after each."""
        before = self.cache()
        got, after = self.runner.run(live, **values), self.cache()
        self.restore(before)
        size = self.runner.captured.pad(live)
        wanted = self.runner.run_padded_eager(live, size, **values)
        return got, wanted, after, self.cache()

    @staticmethod
    def tokens_of(topk):
        """Tokens of a draft with so many branches: a whole chain, or a part of the tree."""
        return 4 if topk == 1 else 7


class VerifyWorld(Speculative):
    """Verify steps of drafted tokens; settings are those of the runner but for its width."""

    def make_runner(self, buckets, options, settings):
        self.topk = settings.get("topk", 1)
        self.width = self.tokens_of(self.topk)
        return VerifyRunner(
            self.model, self.kv, self.group, buckets, options, width=self.width, steps=self.steps, **settings
        )

    def span(self, committed):
        return committed, self.width

    def inputs(self, committed, seed=0):
        """One step of rows 1, 2, ... with so many tokens in the cache, and a tree of its own for each."""
        generator = torch.Generator().manual_seed(seed)
        rows, width = range(1, len(committed) + 1), self.width
        drawn = torch.randint(self.config.vocab_size, (len(committed) * width,), generator=generator)
        places = [
            self.slots_of(row)[start + i]
            for row, start in zip(rows, committed, strict=True)
            for i in range(width)
        ]
        values = {
            "input_ids": drawn.to(self.device), "out_slots": self.tensor(places), "request_rows": self.tensor(list(rows)),
            "seq_lens": self.tensor(committed) + width,
        }  # fmt: skip
        return values | (self.trees(len(committed), generator) if self.topk > 1 else {})

    def trees(self, requests, generator):
        levels, k = [], self.topk
        for step in range(self.steps):
            shape = (requests * (k if step else 1), k)
            p = torch.rand(shape, generator=generator).sort(1, descending=True).values.to(self.device)
            levels.append(
                next_candidates(levels[-1], p, p.long()) if levels else first_candidates(p, p.long())
            )
        draft = organize(levels, self.width - 1)
        return {"parent_list": draft.parent_list, "top_scores_index": draft.top_scores_index}


class WindowVerifyWorld(Windowed, VerifyWorld):
    """Verify steps with sliding windows; a row has a page for every token of its context."""

    ring = PAGES_A_ROW
    window_pages = (ROWS - 1) * ring + 1

    def inputs(self, committed, seed=0):
        slots = self.slide([(row, start, self.width) for row, start in enumerate(committed, 1)])
        return {**super().inputs(committed, seed), "window_out_slots": slots}


class DraftWorld(Speculative):
    """Steps of an assistant; the settings say which: ``seed``, ``loop`` or ``fused``, and with how many branches."""

    assistant_config = ASSISTANT

    def make_runner(self, buckets, options, settings):
        self.phase, self.topk = settings.get("phase", "loop"), settings.get("topk", 1)
        place = {"device": self.device, "dtype": self.model.rotary.dtype}
        self.assistant = Assistant(self.assistant_config, **place).eval().requires_grad_(requires_grad=False)
        self.assistant.bind(self.model)
        fill_randomly(self.assistant, self.assistant_config.num_layers, 3)
        return self.another(self.phase, buckets, options)

    def span(self, committed):
        return committed - 1, 1

    def another(self, phase, buckets, options):
        """A runner of another phase over the same models."""
        about = (self.assistant, self.kv, self.group, buckets, options)
        if phase == "seed":
            return SeedRunner(*about, topk=self.topk)
        tokens = self.tokens_of(self.topk)
        return DraftLoopRunner(
            *about, steps=self.steps, topk=self.topk, tokens=tokens, fused=phase == "fused"
        )

    def inputs(self, committed, seed=0):
        """One step of rows 1, 2, ... with so many tokens in the cache."""
        generator = torch.Generator().manual_seed(seed)
        requests = len(committed)
        hidden = torch.randn(requests, self.config.hidden_size, generator=generator).to(self.model.rotary)
        where = {
            "request_rows": self.tensor(list(range(1, requests + 1))),
            "seq_lens": self.tensor(committed),
        }
        if self.phase != "loop":
            drawn = torch.randint(self.config.vocab_size, (requests,), generator=generator)
            return {"input_ids": drawn.to(self.device), "hidden": hidden, **where}
        scores = torch.rand(requests, self.config.vocab_size, generator=generator)
        p, index = scores.softmax(-1).topk(self.topk)
        return {"topk_p": p.to(self.device), "topk_index": index.to(self.device), "hidden": hidden, **where}


class WindowDraftWorld(Windowed, DraftWorld):
    """An assistant of both kinds of layers over a target with sliding windows."""

    assistant_config = replace(ASSISTANT, layer_kinds=("sliding", "full"))

    def inputs(self, committed, seed=0):
        self.slide([(row, count - 1, 1) for row, count in enumerate(committed, 1)])
        return super().inputs(committed, seed)


SPECULATIVE = {
    (False, False): DraftWorld, (False, True): WindowDraftWorld,
    (True, False): VerifyWorld, (True, True): WindowVerifyWorld,
}  # fmt: skip
"""Worlds of speculation: of verify or of drafts, with sliding windows or without."""


@pytest.fixture
def speculative(device):
    """Makes worlds of a phase of speculation and closes them: verify, seed, loop or fused."""
    made = []

    def make(phase, *args, windows=False, topk=1, settings=None, **options):
        verify = phase == "verify"
        about = {"topk": topk, **({} if verify else {"phase": phase}), **(settings or {})}
        made.append(SPECULATIVE[verify, windows](device, *args, settings=about, **options))
        made[-1].runner.capture()
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def kept():
    """Worlds that the tests of a module share, closed after them."""
    worlds = {}
    yield worlds
    for one in worlds.values():
        one.close()


@pytest.fixture
def shared(device, kept):
    """Worlds of speculation that are captured once a module, each as it was at first."""

    def get(phase, backend, *, windows=False, topk=1, **options):
        key = (device.type, phase, backend, windows, topk, *options.items())
        if key not in kept:
            settings = {"topk": topk} if phase == "verify" else {"topk": topk, "phase": phase}
            kept[key] = SPECULATIVE[phase == "verify", windows](device, backend, settings=settings, **options)
            kept[key].start = kept[key].cache()
            kept[key].runner.capture()
        kept[key].restore(kept[key].start)
        kept[key].runner.coverage().clear()
        return kept[key]

    return get


@pytest.fixture
def world(device):
    """Makes worlds and closes them."""
    yield from worlds(device, World)


@pytest.fixture
def windows(device):
    """Makes worlds with sliding-window layers and closes them."""
    yield from worlds(device, WindowWorld)


@pytest.fixture
def prefills(device):
    """Makes worlds with a prefill runner and closes them."""
    yield from worlds(device, PrefillWorld)


@pytest.fixture
def window_prefills(device):
    """Makes worlds with a prefill runner and sliding-window layers and closes them."""
    yield from worlds(device, WindowPrefillWorld)


def worlds(device, kind):
    made = []

    def make(*args, **options):
        made.append(kind(device, *args, **options))
        made[-1].runner.capture()
        return made[-1]

    make.made = made
    yield make
    for one in made:
        one.close()
