"""Random lives of the engine with a real model, captured: nothing leaks, and every token is that of a request alone."""

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cglab.engine.batches import SchedulerOptions
from cglab.engine.engine import Engine
from cglab.engine.host_tier import HostTier
from cglab.engine.requests import GREEDY, Request, Sampling
from cglab.engine.speculation import Speculation
from cglab.errors import InputError
from cglab.graphs.options import Options
from cglab.lab.phases import LabPhases
from cglab.lab.techniques import Captures
from cglab.models.config import ModelConfig
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.models.sampling import sample
from cglab.models.spans import LiveSpans, PrefillAttention, Span
from cglab.runners.base import GraphGroup
from tests.engine.drafting import Foretold, Prophet, assistant_drafting, block_drafting, check_state

VOCABULARY, PAGE, ROOM, LARGEST_BUDGET = 53, 4, 32, 16
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 8, "max_position": 64, "qk_norm": True,
}  # fmt: skip
WINDOW = {"sliding_window": 6, "window_layers": (1,)}
MODES = {
    "full": ("full", "breakable", {}, None, None),
    "breakable": ("breakable", "full", {}, None, None),
    "both full": ("full", "full", {}, None, None),
    "windows": ("full", "breakable", WINDOW, None, None),
    "windows, a chain": ("full", "breakable", WINDOW, Speculation(3), assistant_drafting),
    "a tree": ("full", "breakable", {}, Speculation(2, 2), assistant_drafting),
    "a block": ("full", "breakable", {}, Speculation(3), block_drafting),
}
SEQUENCES, ROUNDS = 29, 8
"""Random lives of each mode, over two hundred in all; and how often more are tried until all that matters happened."""
TIE = 1e-4
"""Scores this close may change places: a batch sums in another order."""
TOKENS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.builds(
    lambda start, length: [(start + i * i) % VOCABULARY for i in range(length)],
    st.integers(0, 3),
    st.integers(1, 24),
)
"""Of four kinds, so that many have a prefix in common."""
LIMITS = st.integers(0, 14)
SAMPLINGS = st.builds(Sampling, st.sampled_from([0.0, 0.7, 1.3]), st.integers(0, 1 << 40))


class World:
    """What all sequences of one mode share: a model, a cache of 32 tokens beyond one request, and the recordings."""

    def __init__(self, device, decode, prefill, window, speculation, drafting):
        self.config, self.device = ModelConfig("Qwen3ForCausalLM", **SHAPE, **window), device
        self.model = random_model(self.config, device=device, dtype=torch.float32, seed=3)
        self.kv, self.apart = self.cache(rows=6), self.cache(rows=2)
        for pool in self.apart.pools:
            pool.page_table[1] = torch.arange(1, 1 + ROOM // PAGE)
        self.group, captures = GraphGroup(device), Captures()
        captures.decode, captures.prefill = decode, prefill
        self.speculation = speculation
        self.room = ROOM - (speculation.lookahead if speculation else 0)
        self.drafting = drafting(self.model, self.kv, speculation) if speculation else None
        self.likeliest = {}  # next tokens, by all before them
        self.phases = LabPhases(
            self.model, self.kv, self.group, captures, buckets=(1, 2, 4, 8), prefill_buckets=(4, 8, 16),
            options=Options(strict=True), drafting=self.drafting,
        )  # fmt: skip

    def engine(self, options):
        """A fresh one; with a tree its drafts are often right, with a chain the assistant's own."""
        host = None
        if options.prefix_reuse and self.kv.sliding is None:
            draft = [self.drafting.kv] if self.drafting and self.drafting.kv else []
            host = HostTier([self.kv, *draft], self.group, 8)
        if not self.speculation:
            return Engine(self.model, self.kv, self.phases, options, host=host)
        guide = Guide(self) if self.speculation.topk > 1 else None
        runners = Foretold(self.phases, guide) if guide else self.phases
        speculator = self.drafting.speculator(self.kv, runners)
        engine = Engine(self.model, self.kv, self.phases, options, speculator, host)
        if guide:
            guide.engine = engine
        return engine

    def alone(self, tokens):
        """Hidden states of one request: no batch, no cache, no capture."""
        tokens = torch.tensor(tokens, device=self.device)
        positions = torch.arange(len(tokens), device=self.device)
        slots = {"out_slots": positions + PAGE}
        if self.apart.sliding is not None:
            slots["window_out_slots"] = positions + PAGE
        spans = LiveSpans([Span(1, 0, len(tokens))])
        return self.model(tokens, positions, PrefillAttention(self.apart, live=spans, **slots))

    def cache(self, rows):
        return PagedKV(
            self.config, pages=15, page_size=PAGE, rows=rows, max_context=ROOM, device=self.device,
            dtype=torch.float32, window_pages=19 if self.config.sliding_window else None,
        )  # fmt: skip

    @torch.no_grad()
    def check_alone(self, request):
        """Every token is the one chosen by the request alone after those before it: no batch, no cache, no capture."""
        hidden = self.alone(request.tokens[:-1])
        positions = torch.arange(len(hidden), device=self.device)
        first, count = len(request.prompt) - 1, len(request.output)
        logits = self.model.logits(hidden[first:])
        chosen = torch.tensor(request.output, device=self.device)
        logits[torch.arange(count), chosen] += TIE
        temperatures = torch.full((count,), request.sampling.temperature, device=self.device)
        seeds = torch.full((count,), request.sampling.seed, device=self.device)
        assert sample(logits, temperatures, seeds, positions[first:]).tolist() == request.output

    def close(self):
        self.phases.close()
        self.group.close()


class Guide(Prophet):
    """A draft that asks the target, and is right in three of four places."""

    def __init__(self, world):
        super().__init__(world.speculation, None, lambda request, place: (0, 1, 0, None)[place % 4])
        self.world = world

    @torch.no_grad()
    def truth(self, request):
        """As far as a draft reaches."""
        said = (*request.tokens,)
        for _ in range(self.speculation.steps):
            if said not in self.world.likeliest:
                self.world.likeliest[said] = int(
                    self.world.model.logits(self.world.alone(said)[-1:]).argmax()
                )
            said = (*said, self.world.likeliest[said])
        return [*said[request.length :]]


class EngineMachine(RuleBasedStateMachine):
    """Adds, cancels, fails and steps in any order, on a fresh engine over the recordings of ``world``."""

    world: World
    seen: Counter
    added = Bundle("added")

    @initialize(
        budget=st.integers(4, LARGEST_BUDGET), running=st.none() | st.integers(2, 5),
        reuse=st.booleans(), mixed=st.booleans(),
    )  # fmt: skip
    def open(self, budget, running, reuse, mixed):
        options = SchedulerOptions(budget, max_running=running, prefix_reuse=reuse, mixed=mixed)
        self.engine = self.world.engine(options)
        self.requests, self.events, self.happened = [], [], set()

    def busy(self):
        return not self.engine.idle

    def _add(self, prompt, limit, sampling=GREEDY, stops=()):
        """The request for the bundle; none if it is longer than the cache and refused."""
        if self.world.speculation:
            sampling = GREEDY
        request = Request(len(self.requests), prompt, limit, sampling, frozenset(stops))
        if len(prompt) + limit <= self.world.room:
            self.engine.submit(request)
            self.requests.append(request)
            return [request]
        idle = self.engine.idle
        with pytest.raises(InputError, match=f"do not fit into a context of {self.world.room}"):
            self.engine.submit(request)
        self.engine.scheduler.check_invariants()
        assert self.engine.idle == idle
        self.happened.add("refused")
        return []

    @rule(target=added, prompts=st.lists(PROMPTS, min_size=2, max_size=5), limit=LIMITS)
    def add(self, prompts, limit):
        return multiple(*(request for prompt in prompts for request in self._add(prompt, limit)))

    @rule(target=added, prompt=PROMPTS, limit=LIMITS, sampling=SAMPLINGS, stops=st.sets(TOKENS, max_size=9))
    def add_with_sampling_and_stops(self, prompt, limit, sampling, stops):
        return multiple(*self._add(prompt, limit, sampling, stops))

    @rule(target=added, earlier=added, kept=st.integers(1, ROOM), more=TOKENS, limit=LIMITS)
    def add_with_a_known_prefix(self, earlier, kept, more, limit):
        return multiple(*self._add([*earlier.tokens[:kept], more], limit))

    @rule(request=consumes(added))
    def cancel(self, request):
        self.engine.cancel(request)
        assert request.finish is not None

    @precondition(busy)
    @rule(times=st.integers(1, 12))
    def step(self, times):
        for _ in range(times):
            self._step()

    @precondition(busy)
    @rule()
    def fail(self):
        def broken(batch):
            raise RuntimeError("mid-flight")

        if self.engine.scheduler.idle:
            return  # only ends are left to hand out
        self.engine.compute = broken
        with pytest.raises(RuntimeError, match="mid-flight"):
            self.engine.step()
        del self.engine.compute
        self.engine.scheduler.check_invariants()

    def _step(self):
        with self.engine.watched() as steps:
            events = self.engine.step()
        self.events += events
        self.engine.scheduler.check_invariants()
        if self.world.drafting and self.world.drafting.feeder:
            check_state(self.engine)
        # A request yields a second token in a prefill step only where it rides along.
        ridden = (
            steps
            and steps[0].kind == "prefill"
            and any(
                len(event.request.output) > 1 and not event.request.preemptions
                for event in events
                if event.token is not None
            )
        )
        self.happened |= {"mixed"} if ridden else set()
        several = Counter(event.request for event in events if event.token is not None)
        self.happened |= {"several tokens a step"} if max(several.values(), default=0) > 1 else set()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(sum(2 * (request.length + request.limit) for request in self.requests)):
            if self.engine.idle:
                break
            self._step()
        assert self.engine.idle, "somebody starves"
        memory = self.engine.scheduler.memory
        assert memory.pages.held == 0 and memory.rows.free == memory.rows.total
        assert memory.window_pages.free == memory.window_pages.total
        for request in self.requests:
            self.check_request(request)
        self.note()

    def check_request(self, request):
        own = [event for event in self.events if event.request is request]
        assert [event.token for event in own if event.token is not None] == request.output
        assert [event.finish for event in own if event.finish] == [request.finish]
        if request.finish == "length":
            assert len(request.output) == request.limit
        assert all(token not in request.stops for token in request.output[:-1])
        assert (request.finish == "stop") == bool(request.stops.intersection(request.output[-1:]))
        if request.output:
            self.world.check_alone(request)

    def note(self):
        """How many sequences had each interesting thing in them."""
        for request in self.requests:
            self.happened.add(request.finish)
            self.happened |= {"no token"} if request.limit == 0 else set()
            self.happened |= {"preempted"} if request.preemptions else set()
            self.happened |= {"reused"} if request.reused else set()
            self.happened |= {"restored"} if request.restored else set()
            self.happened |= {"drawn"} if request.sampling.temperature and request.output else set()
        self.seen.update(self.happened)


def interesting(window, speculation):
    """What must happen in the lives of a mode; a draft that is never right yields no several tokens."""
    found = {"length", "stop", "cancelled", "error", "no token", "preempted", "refused", "mixed"}
    found |= set() if window else {"reused", "restored"}
    if speculation is None:
        return found | {"drawn"}
    return found | ({"several tokens a step"} if speculation.topk > 1 else set())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", MODES)
def test_random_lives_of_the_engine(device, mode):
    """How many it takes until all has happened is chance: what is drawn differs with all modules that are loaded."""
    decode, prefill, window, speculation, drafting = MODES[mode]
    world, seen = World(torch.device(device), decode, prefill, window, speculation, drafting), Counter()
    lives = settings(max_examples=SEQUENCES, stateful_step_count=20, derandomize=True, database=None)
    try:
        for number in range(ROUNDS):
            # A name of its own makes lives of its own.
            machine = type(f"{mode} {number}", (EngineMachine,), {"world": world, "seen": seen})
            run_state_machine_as_test(machine, settings=lives)
            if interesting(window, speculation) <= seen.keys():
                break
        check_coverage(world, decode, prefill)
    finally:
        world.close()
    assert interesting(window, speculation) <= seen.keys(), seen


def check_coverage(world, decode, prefill):
    """Every kind of step replayed, and none went eager for another reason than those meant.

    How often is chance: what the drawn requests ask for differs with the versions of all that draws them.
    """
    forms = {"prefill": 1, "verify": 1} if world.speculation else {"prefill": 1, "decode": 2}
    for name, count in forms.items():
        found = world.phases.coverage(name)
        assert len(found) == count, "decode with and without draws"
        meant = (
            {"WASTE_CEILING"} | ({"MORE_KEYS"} if prefill == "full" else set())
            if name == "prefill"
            else set()
        )
        for form, coverage in found.items():
            assert coverage.captured > 0, f"{name} ({form}) never replayed"
            assert set(coverage.misses) <= meant, f"{name} ({form}) went eager: {coverage.last_facts}"
