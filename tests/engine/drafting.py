"""Engines that speculate: runners on a small target and draft of either kind, and a draft that knows what will be said."""

from dataclasses import replace
from functools import partial

import torch

from cglab.engine.batches import SchedulerOptions
from cglab.engine.drafters import AssistantDrafter, BlockDrafter
from cglab.engine.engine import Engine
from cglab.engine.speculator import Speculator
from cglab.graphs.coverage import Coverage
from cglab.graphs.options import Options
from cglab.lab.phases import LabPhases
from cglab.lab.techniques import Captures
from cglab.models import draft_tree
from cglab.models.assistant import Assistant, AssistantConfig
from cglab.models.draft_cache import Feeder, draft_cache
from cglab.models.kv import PagedKV
from cglab.models.loading import fill_randomly, random_model
from cglab.runners.base import GraphGroup
from cglab.runners.block_draft import BlockDraftRunner
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.draft_sampler import DraftSampler
from cglab.runners.prefill import PrefillRunner
from cglab.runners.seed_step import SeedRunner
from cglab.runners.verify import VerifyRunner
from tests.runners.blocks import BLOCK, block_draft
from tests.runners.conftest import CONFIG, WINDOWED

BACKENDS = {"graph": "full", "eager": "eager"}
SAMPLERS = {"sampler inside": True, "sampler outside": False}
"""What stands in the place of an assistant's seed step for a block draft."""


class DraftRunners:
    """The runners of one speculation, made when first asked for."""

    def __init__(self, models, group, buckets, speculation, *, seed="graph", backend="full"):
        self.models, self.group, self.buckets, self.speculation = models, group, buckets, speculation
        self.seed, self.backend, self.made = seed, backend, {}

    def _runner(self, kind, model, backend, kv=None, **sizes):
        if kind not in self.made:
            options = Options(strict=True, backend=backend)
            runner = kind(model, kv or self.models.kv, self.group, self.buckets, options, **sizes)
            runner.capture()
            self.made[kind] = runner
        return self.made[kind]

    def verify(self):
        size = self.speculation
        return self._runner(
            VerifyRunner, self.models.target, self.backend, width=size.width, topk=size.topk, steps=size.steps
        )

    def draft_loop(self):
        size = self.speculation
        return self._runner(
            DraftLoopRunner, self.models.assistant, self.backend, steps=size.steps, topk=size.topk,
            tokens=size.width, fused=self.seed == "fused",
        )  # fmt: skip

    def seed_step(self):
        if self.seed == "fused":
            return None
        backend = BACKENDS[self.seed] if self.backend != "eager" else "eager"
        return self._runner(SeedRunner, self.models.assistant, backend, topk=self.speculation.topk)

    def drafter(self):
        drafter = AssistantDrafter(self.models.assistant, self.models.kv, self, self.speculation)
        drafter.hidden.fill_(float("nan"))  # a state that was not written is told
        return drafter


class BlockRunners(DraftRunners):
    """The same with a block draft as long as the speculation, whose cache holds NaN where nothing was written."""

    def __init__(self, models, group, buckets, speculation, **options):
        super().__init__(models, group, buckets, speculation, **options)
        config = replace(BLOCK, vocab_size=models.target.config.vocab_size, block_size=speculation.width,
                         mask_token_id=models.target.config.vocab_size - 1)  # fmt: skip
        self.draft = block_draft(models.target, config)
        self.feeder = Feeder(self.draft, draft_cache(config.stack, models.kv, dtype=torch.float32))
        for cache in self.feeder.kv.caches().values():
            cache[:, 4:] = float("nan")

    def verify(self):
        size = self.speculation
        return self._runner(
            VerifyRunner, self.models.target, self.backend, width=size.width, steps=size.steps, hidden=False,
            feeder=self.feeder,
        )  # fmt: skip

    def block_draft(self):
        sampler = DraftSampler(self.models.target, self.speculation.width, in_graph=SAMPLERS[self.seed])
        return self._runner(BlockDraftRunner, self.draft, self.backend, self.feeder.kv, sampler=sampler)

    def drafter(self, **options):
        return BlockDrafter(self.draft, self, self.speculation, **options)


class FedPhases(LabPhases):
    """A lab's runners, of which prefill feeds a block draft."""

    feeder = None

    def prefill(self, mode=None):
        mode = self._mode("prefill", mode)
        make = partial(
            PrefillRunner, self.model, self.kv, self.group, self.prefill_buckets, feeder=self.feeder
        )
        return self._runner("prefill", mode, make, replace(self._options(mode), lazy=True))


class Prophet:
    """A draft loop that knows what the target will say and proposes it in a column of its choice, or never.

    Args:
        speculation: sizes of a draft.
        outputs: by index of a request, what plain decoding says.
        column: of a request and position, where among the branches the truth is; None for nowhere.
    """

    def __init__(self, speculation, outputs, column):
        self.speculation, self.outputs, self.column = speculation, outputs, column
        self.engine, self.counts = None, Coverage()

    def coverage(self):
        return self.counts

    def truth(self, request):
        """What the target says after the tokens that a request has."""
        return self.outputs[request.index][len(request.output) :]

    def run(self, live, request_rows, seq_lens, **start):
        running = {request.row: request for request in self.engine.scheduler.running}
        requests = [running[row] for row in request_rows.tolist()]
        ahead = self.speculation.width if "out_slots" in start else 0  # of a block
        assert [request.computed + ahead for request in requests] == seq_lens.tolist()
        if "input_ids" in start:  # what the seed step or a block is given
            assert [request.tokens[-1] for request in requests] == start["input_ids"].tolist()
        if "input_ids" in start and "hidden" in start:
            assert torch.equal(start["hidden"], self.engine.speculator.drafter.hidden[request_rows])
        levels, k = [], self.speculation.topk
        for step in range(self.speculation.steps):
            rows = torch.tensor([self._candidates(request, step) for request in requests])
            if not levels:
                odds = torch.arange(k, 0, -1.0).expand(live, -1)
                levels.append(draft_tree.first_candidates(odds / odds.sum(), rows))
            else:
                odds = torch.arange(k, 0, -1.0).expand(live * k, -1) / (k * (k + 1) / 2)
                levels.append(draft_tree.next_candidates(levels[-1], odds, rows.repeat_interleave(k, 0)))
        draft = draft_tree.organize(levels, self.speculation.lookahead)
        return draft_tree.Draft(*(part.to(request_rows.device) for part in draft))

    @staticmethod
    def tokens(draft):
        """Of a block."""
        return draft.draft_tokens

    def _candidates(self, request, step):
        """k different tokens, the true one among them if so decided."""
        truth = self.truth(request)
        true = truth[step] if step < len(truth) else 0
        tokens = [
            (true + 1 + other) % self.engine.model.config.vocab_size for other in range(self.speculation.topk)
        ]
        column = self.column(request, len(request.output) + step)
        if column is not None:
            tokens[column] = true
        return tokens


class Foretold(DraftRunners):
    """Runners whose loop is a ``Prophet``."""

    prophet = None

    def draft_loop(self):
        return self.prophet


class ForetoldBlocks(BlockRunners):
    """Runners whose block draft is a ``Prophet``."""

    prophet = None

    def block_draft(self):
        return self.prophet


def assistant_of(target):
    """A random assistant with a layer for each kind that the target has."""
    config, kinds = target.config, ("full",) if target.config.sliding_window is None else ("sliding", "full")
    shape = AssistantConfig(
        config.vocab_size, config.hidden_size, 16, 24, kinds, num_heads=4,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
    )  # fmt: skip
    assistant = Assistant(shape, device=target.rotary.device, dtype=target.rotary.dtype)
    fill_randomly(assistant.requires_grad_(requires_grad=False), len(kinds), 1)
    assistant.bind(target)
    return assistant


class Models:
    """A random target with its cache and a random assistant.

    Args:
        device: where they are.
        windowed: the target has sliding-window layers, and the assistant asks one.
        pages: of each pool.
        rows: of requests.
        max_context: positions of a row.
    """

    def __init__(self, device, *, windowed=False, pages=65, rows=9, max_context=64):
        # Not tied: random targets that are repeat one token, which a wrong cache would not change.
        config = replace(WINDOWED if windowed else CONFIG, tie_embeddings=False)
        self.target = random_model(config, device=device, dtype=torch.float32, seed=1)
        self.kv = PagedKV(
            config, pages=pages, page_size=4, rows=rows, max_context=max_context, device=device, dtype=torch.float32,
            window_pages=pages if windowed else None,
        )  # fmt: skip
        kinds = ("sliding", "full") if windowed else ("full",)
        shape = AssistantConfig(
            config.vocab_size, config.hidden_size, 16, 24, kinds, num_heads=4, num_kv_heads=2, head_dim=8
        )
        self.assistant = Assistant(shape, device=device, dtype=torch.float32).requires_grad_(
            requires_grad=False
        )
        fill_randomly(self.assistant, len(kinds), 1)
        self.assistant.bind(self.target)


class Bench:
    """Makes engines over one set of models, plain and speculating, and closes their runners."""

    def __init__(self, device, *, buckets=(1, 2, 4, 8), **sizes):
        self.device, self.buckets, self.sizes = device, buckets, sizes
        self.made, self.models = [], None

    def engine(
        self,
        speculation=None,
        *,
        backend="eager",
        seed="graph",
        draft=None,
        budget=16,
        drafting=None,
        **policy,
    ):
        """An engine on a cache of its own; ``draft`` is the outputs and the column of a ``Prophet``; ``drafting`` of a drafter."""
        self.models = models = Models(self.device, **self.sizes)
        group, captures = GraphGroup(self.device), Captures()
        captures.decode = captures.prefill = "eager"
        phases = FedPhases(
            models.target, models.kv, group, captures, buckets=self.buckets, prefill_buckets=(16,),
            options=Options(strict=True),
        )  # fmt: skip
        options, speculator = SchedulerOptions(budget, **policy), None
        self.made.append(phases)
        if speculation:
            kinds = (BlockRunners, ForetoldBlocks) if seed in SAMPLERS else (DraftRunners, Foretold)
            runners = kinds[bool(draft)](models, group, self.buckets, speculation, seed=seed, backend=backend)
            if seed in SAMPLERS:
                phases.feeder = runners.feeder
                captures.prefill = "eager" if backend == "eager" else "breakable"
            if draft:
                runners.prophet = Prophet(speculation, *draft)
            drafter = runners.drafter(**drafting or {})
            speculator = Speculator(models.target, drafter, models.kv, runners, speculation)
            self.made += [runners]
        engine = Engine(models.target, models.kv, phases, options, speculator)
        if draft:
            runners.prophet.engine = engine
        return engine

    def close(self):
        for made in self.made:
            for runner in made.made.values() if isinstance(made, DraftRunners) else [made]:
                runner.close()
