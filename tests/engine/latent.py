"""Engines over a small sparse target with a NextN layer, plain and speculating."""

from dataclasses import replace

import torch

from cglab.engine.batches import SchedulerOptions
from cglab.engine.engine import Engine
from cglab.engine.host_tier import HostTier
from cglab.engine.nextn_drafter import NextNDrafter
from cglab.engine.proposals import Proposal
from cglab.engine.speculation import Speculation
from cglab.engine.speculator import Speculator
from cglab.graphs.options import Options
from cglab.models.draft_cache import draft_cache
from cglab.models.indexer import KeyRanges
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.models.spans import Span
from cglab.models.sparse import Breaks, LiveKeys, SparseAttention
from cglab.runners.base import GraphGroup
from cglab.runners.decode import DecodeRunner
from cglab.runners.draft_extend import DraftExtendRunner
from cglab.runners.dsa_policy import gates
from cglab.runners.dsa_prefill import DsaPrefillRunner
from cglab.runners.verify import VerifyRunner
from tests.models.latent import TINY
from tests.runners.extends import nextn_layer

TARGET = replace(TINY, num_layers=2, shared_layers=(), max_position=64)
ONE = Speculation(steps=1)


class Foretelling(NextNDrafter):
    """Proposes what the target will say, where ``column`` has it of a request and position, and else another token."""

    outputs, column, engine = (), None, None

    def draft(self, inputs, segments):
        """Drafts of its own are kept as always, and not used."""
        super().draft(inputs, segments)
        running = {request.row: request for request in self.engine.scheduler.running}
        drafted = []
        for request in (running[row] for row in inputs["request_rows"].tolist()):
            place = len(request.output)
            truth = [*self.outputs[request.index], 0][place]
            drafted.append(
                truth if self.column(request, place) is not None else (truth + 1) % TARGET.vocab_size
            )
        return Proposal(torch.tensor(drafted, device=self.drafted.device).unsqueeze(1), {})


class Phases:
    """Runners of one engine; a layer and a speculation make those of drafts."""

    def __init__(self, model, kv, group, *, backend, buckets, layer=None, draft_kv=None):
        options = Options(backend=backend, strict=True, lazy=True)
        sparse = replace(options, backend="eager" if backend == "eager" else "breakable")
        tokens = sorted({*buckets, *(2 * size for size in buckets), 16})
        self.made = {
            "decode": DecodeRunner(model, kv, group, buckets, options),
            "prefill": DsaPrefillRunner(model, kv, group, tokens, sparse, parts=gates()),
        }
        if layer is not None:
            self.made["verify"] = VerifyRunner(model, kv, group, buckets, options, width=2, steps=1)
            self.made["draft_extend"] = DraftExtendRunner(
                layer, draft_kv, group, tokens, sparse, parts=gates()
            )
        for runner in self.made.values():
            runner.capture()  # each bucket on its first use

    def decode(self, *, sampling):
        return self.made["decode"]

    def prefill(self):
        return self.made["prefill"]

    def verify(self):
        return self.made["verify"]

    def draft_extend(self):
        return self.made["draft_extend"]

    def close(self):
        for runner in self.made.values():
            runner.close()


class NextNBench:
    """Makes engines over one target and layer, and closes their runners."""

    def __init__(self, device, *, pages=65, rows=9, max_context=64, buckets=(1, 2, 4, 8)):
        self.device, self.buckets, self.made = device, buckets, []
        self.sizes = {"pages": pages, "rows": rows, "max_context": max_context, "page_size": 4}
        self.target = random_model(TARGET, device="cpu", dtype=torch.float32, seed=1).to(device)
        self.layer = nextn_layer(self.target)

    def cache(self):
        """A cache of the target and of the layer, NaN where nothing was written."""
        kv = PagedKV(TARGET, **self.sizes, device=self.device, dtype=torch.float32)
        draft_kv = draft_cache(self.layer.config, kv, dtype=torch.float32)
        for cache in (*kv.caches().values(), *draft_kv.caches().values()):
            cache[:, kv.page_size :] = float("nan")
        return kv, draft_kv

    def engine(self, speculation=None, *, backend="eager", draft=None, budget=16, host=0, **policy):
        """An engine on a cache of its own; ``draft`` is the outputs and the column of a ``Foretelling``.

        ``host`` are pages of host memory.
        """
        (kv, draft_kv), group = self.cache(), GraphGroup(self.device)
        layer = self.layer if speculation else None
        phases = Phases(
            self.target, kv, group, backend=backend, buckets=self.buckets, layer=layer, draft_kv=draft_kv
        )
        self.made += [phases, group]
        options = SchedulerOptions(budget, **policy)
        caches = [kv, draft_kv] if speculation else [kv]
        tier = HostTier(caches, group, host) if host else None
        if speculation is None:
            return Engine(self.target, kv, phases, options, host=tier)
        drafter = (Foretelling if draft else NextNDrafter)(self.layer, kv, phases, speculation)
        speculator = Speculator(self.target, drafter, kv, phases, speculation)
        engine = Engine(self.target, kv, phases, options, speculator, tier)
        engine.draft_kv = draft_kv
        if draft:
            drafter.engine, (drafter.outputs, drafter.column) = engine, draft
        return engine

    @torch.no_grad()
    def check_state(self, engine):
        """What every request that decodes has in the layer's cache, and its next draft, are those that it has alone."""
        for request in engine.scheduler.running:
            if not request.decoding:
                continue
            count, tokens = request.computed, torch.tensor(request.tokens, device=self.device)
            kv, draft_kv = self.cache()
            kv.full.page_table[1] = 1 + torch.arange(len(kv.full.page_table[1]), device=self.device)
            positions = torch.arange(count, device=self.device)
            keys = LiveKeys(KeyRanges.of([Span(1, 0, count)], kv.full))
            step = {
                "out_slots": positions + 4,
                "keys": keys,
                "breaks": Breaks(),
                "index_topk": TARGET.index_topk,
            }
            hidden = self.target(tokens[:count], positions, SparseAttention(kv, **step))
            after = self.layer(tokens[1 : count + 1], hidden, positions, SparseAttention(draft_kv, **step))
            mine = torch.tensor([request.slot(place, 4) for place in range(count)], device=self.device)
            for cache, alone in zip(
                engine.draft_kv.caches().values(), draft_kv.caches().values(), strict=True
            ):
                torch.testing.assert_close(cache[:, mine], alone[:, positions + 4], atol=1e-4, rtol=1e-4)
            draft = int(self.target.logits(after[-1:]).argmax())
            assert int(engine.speculator.drafter.drafted[request.row]) == draft

    def close(self):
        for each in self.made:
            each.close()
