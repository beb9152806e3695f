"""Engines that speculate, on a small target and draft of either kind; and a draft that knows what will be said."""

from dataclasses import replace

import torch

from cglab.engine.batches import SchedulerOptions
from cglab.engine.engine import Engine
from cglab.engine.host_tier import HostTier
from cglab.engine.requests import Request
from cglab.engine.speculator import Speculator
from cglab.graphs.coverage import Coverage
from cglab.graphs.options import Options
from cglab.lab.drafting import Drafting
from cglab.lab.phases import LabPhases
from cglab.lab.techniques import Captures
from cglab.models import draft_tree
from cglab.models.assistant import Assistant, AssistantConfig
from cglab.models.draft_cache import Feeder, draft_cache
from cglab.models.kv import PagedKV
from cglab.models.loading import fill_randomly, random_model
from cglab.models.spans import LiveSpans, PrefillAttention, Span
from cglab.runners.base import GraphGroup
from tests.runners.blocks import BLOCK, block_draft
from tests.runners.conftest import CONFIG, WINDOWED

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12, 13] * 6]
LIMITS = [9, 20, 12, 30]
SAMPLERS = {"sampler inside": "graph", "sampler outside": "eager"}
"""What stands in the place of an assistant's seed step for a block draft."""


def block_drafting(target, kv, speculation):
    """A random block draft as long as the speculation, whose cache holds NaN where nothing was written."""
    vocabulary = target.config.vocab_size
    config = replace(BLOCK, vocab_size=vocabulary, mask_token_id=vocabulary - 1, block_size=speculation.width)
    drafting = Drafting.over(kv, block_draft(target, config), speculation)
    for cache in drafting.kv.caches().values():
        cache[:, kv.page_size :] = float("nan")
    return drafting


def always(request, place):
    """The truth is the draft's most likely token."""
    return 0


def never(request, place):
    """No draft is right."""
    return


def last(request, place):
    """The truth is in the last of three branches, so that what is accepted lies apart."""
    return 2


def scattered(request, place):
    """The truth is in one of two branches, and now and then in none."""
    return (0, 1, 0, None, 1)[(place * place + request.index) % 5]


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

    def coverages(self):
        return {"draft_loop": self.counts}

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


class Foretold:
    """A lab's runners with a ``Prophet`` for a loop or a block draft.

    Args:
        phases: of the lab.
        prophet: what drafts.
    """

    def __init__(self, phases, prophet):
        self.verify, self.seed_step, self.prophet = phases.verify, phases.seed_step, prophet

    def draft_loop(self):
        return self.prophet

    block_draft = draft_loop


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


def assistant_drafting(target, kv, speculation):
    """One that drafts."""
    return Drafting.over(kv, assistant_of(target), speculation)


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
        # Made on the CPU: what it says is lively there, and a device's own random numbers make another model.
        self.target = random_model(config, device="cpu", dtype=torch.float32, seed=1).to(device)
        self.kv = PagedKV(
            config, pages=pages, page_size=4, rows=rows, max_context=max_context, device=device, dtype=torch.float32,
            window_pages=pages if windowed else None,
        )  # fmt: skip
        self.assistant = assistant_of(self.target)


class Bench:
    """Makes engines over models of one kind, plain and speculating, and closes their runners."""

    def __init__(self, device, *, buckets=(1, 2, 4, 8), **sizes):
        self.device, self.buckets, self.sizes, self.made = device, buckets, sizes, []

    def engine(
        self,
        speculation=None,
        *,
        backend="eager",
        seed="eager",
        draft=None,
        budget=16,
        timed=True,
        host=0,
        **policy,
    ):
        """An engine on a cache of its own.

        ``seed`` is that of an assistant or, for a block draft, where its sampler is; ``timed`` whether that is timed;
        ``draft`` is the outputs and the column of a ``Prophet``; ``host`` pages of host memory.
        """
        models, group, captures = Models(self.device, **self.sizes), GraphGroup(self.device), Captures()
        captures.decode = captures.prefill = "eager"
        captures.verify = captures.draft_loop = backend
        captures.seed_step = "eager" if seed in SAMPLERS else seed
        drafting = None
        if speculation and seed in SAMPLERS:
            captures.draft_sampler = SAMPLERS[seed]
            captures.prefill = "eager" if backend == "eager" else "breakable"
            drafting = block_drafting(models.target, models.kv, speculation)
        elif speculation:
            drafting = Drafting(models.assistant, speculation)
        phases = LabPhases(
            models.target, models.kv, group, captures, buckets=self.buckets, prefill_buckets=(16,),
            options=Options(strict=True), drafting=drafting,
        )  # fmt: skip
        self.made += [phases, group]
        options = SchedulerOptions(budget, **policy)
        caches = [models.kv, *([drafting.kv] if drafting and drafting.kv else [])]
        tier = HostTier(caches, group, host) if host else None
        if not speculation:
            return Engine(models.target, models.kv, phases, options, host=tier)
        runners = Foretold(phases, Prophet(speculation, *draft)) if draft else phases
        drafter = drafting.drafter(models.kv, runners)
        if seed in SAMPLERS:
            drafter.sampler_timed = timed
        else:
            drafter.hidden.fill_(float("nan"))  # a state that was not written is told
        speculator = Speculator(models.target, drafter, models.kv, runners, speculation)
        engine = Engine(models.target, models.kv, phases, options, speculator, tier)
        if draft:
            runners.prophet.engine = engine
        return engine

    def close(self):
        for each in self.made:
            each.close()


@torch.no_grad()
def check_state(engine):
    """Every request that decodes has the keys and values that it has alone; and the hidden state, or the draft's."""
    model, kv, drafter = engine.model, engine.kv, engine.speculator.drafter
    feeder = engine.phases.drafting.feeder
    for request in engine.scheduler.running:
        if not request.decoding:
            continue
        count = request.computed
        windows = 17 if kv.sliding is not None else None
        apart = PagedKV(
            model.config, pages=17, page_size=4, rows=2, max_context=64, device=kv.device, dtype=torch.float32,
            window_pages=windows,
        )  # fmt: skip
        where = torch.arange(count, device=kv.device)
        slots = {"out_slots": where + 4} | ({"window_out_slots": where + 4} if windows else {})
        attention = PrefillAttention(apart, live=LiveSpans([Span(1, 0, count)]), **slots)
        tokens = torch.tensor(request.tokens[:count], device=kv.device), where, attention
        pools = [*zip(kv.pools, apart.pools, (request.slot, request.window_slot), strict=False)]
        if feeder:
            alone = Feeder(feeder.draft, draft_cache(feeder.draft.config.stack, apart, dtype=torch.float32))
            alone.forward(*tokens, where + 4)
            pools.append((feeder.kv.full, alone.kv.full, request.slot))
        else:
            state = drafter.hidden[request.row]
            torch.testing.assert_close(state, model(*tokens)[-1], atol=1e-4, rtol=1e-4)
        for pool, other, slot in pools:
            seen = [place for place in range(count) if slot(place, 4) >= 4]
            mine = torch.tensor([slot(place, 4) for place in seen], device=kv.device)
            for ours, theirs in ((pool.keys, other.keys), (pool.values, other.values)):
                wanted = theirs[:, torch.tensor(seen, device=kv.device) + 4]
                torch.testing.assert_close(ours[:, mine], wanted, atol=1e-4, rtol=1e-4)


def run(engine, prompts, limits, check=check_state, **options):
    """All requests to their end, with the state checked after every step."""
    requests = [
        Request(i, list(p), n, **options) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
        engine.scheduler.check_invariants()
        check(engine)
    return [request.output for request in requests]
