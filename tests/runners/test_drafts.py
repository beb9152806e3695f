"""T3 and T4, the draft loop and the seed step: separate and fused, whom they refuse, and what they lean on."""

import logging

import pytest
import torch

from cglab.errors import AddressError, InputError, ModelError
from cglab.graphs.options import CaptureFailedWarning, Options
from cglab.graphs.out_forms import same_bits
from cglab.models.assistant import Assistant
from cglab.models.loading import random_model
from cglab.runners.draft_loop import DraftLoopRunner
from cglab.runners.seed_step import SeedRunner
from cglab.runners.verify import VerifyRunner

from .conftest import ASSISTANT

backends = pytest.mark.parametrize("backend", ["full", "breakable"])
branches = pytest.mark.parametrize("topk", [1, 3])
kinds = pytest.mark.parametrize("windows", [False, True], ids=["full-attention", "windows"])
SWITCH = "CGLAB_DISABLE_SEED_GRAPH=1"


def options_for(backend, **options):
    return Options(backend, strict=True, clone=True, **options)


@pytest.fixture
def also(shared):
    """Makes runners of another phase over a shared world, and closes them."""
    made = []

    def make(one, phase, options, buckets=(4,)):
        made.append(one.another(phase, buckets, options))
        made[-1].capture()
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@backends
@branches
@kinds
def test_the_fused_form_is_the_seed_step_and_then_the_loop(shared, also, backend, topk, windows):
    fused = shared("fused", backend, topk=topk, windows=windows)
    values = fused.inputs([9, 5, 1])
    where = {name: values[name] for name in ("request_rows", "seq_lens")}
    seed, loop = (also(fused, phase, options_for(backend)) for phase in ("seed", "loop"))
    p, index, hidden = seed.run(3, **values)
    apart = loop.run(3, topk_p=p, topk_index=index, hidden=hidden, **where)
    assert all(map(same_bits, fused.runner.run(3, **values), apart))


@backends
@branches
def test_p09_the_loop_is_a_plain_draft_of_one_request_after_the_other(shared, backend, topk):
    """Beam search spelt out: forward by forward, one row at a time, over the assistant itself."""
    one = shared("fused", backend, topk=topk)
    committed = [9, 5, 2]
    values = one.inputs(committed)
    draft = one.runner.run(3, **values)
    for request in range(3):
        alone = {name: value[request : request + 1] for name, value in values.items()}
        prefix = one.runner.frozen(alone)
        frontier, made = [(1.0, (), int(alone["input_ids"]), alone["hidden"])], []
        for _ in range(one.steps):
            new = []
            for score, path, token, hidden in frontier:
                with torch.no_grad():
                    p, index, after = one.runner.draft(one.tensor([token]), hidden, prefix)
                for q, t in zip(p[0].tolist(), index[0].tolist(), strict=True):
                    new.append((score * q, (*path, t), t, after))
            frontier = sorted(new, key=lambda node: -node[0])[:topk]
            made += new
        best = sorted(made, key=lambda node: -node[0])[: one.runner.tokens - 1]
        assert sorted(draft.draft_tokens[request].tolist()) == sorted(node[2] for node in best)


def test_a_single_step_is_the_seed_step_alone(shared, also):
    one = shared("fused", "full", topk=3)
    seed = also(one, "seed", options_for("full"))
    about = (one.runner.model, one.kv, one.group, (4,), options_for("full"))
    runner = DraftLoopRunner(*about, steps=1, topk=3, tokens=4, fused=True)
    runner.capture()
    values = one.inputs([5, 4])
    draft = runner.run(2, **values)
    assert same_bits(draft.draft_tokens, seed.run(2, **values)[1])
    assert draft.parent_list.tolist() == [[-1], [-1]]
    runner.close()


@backends
@pytest.mark.parametrize("phase", ["seed", "fused"])
def test_callers_with_embeddings_run_the_eager_step_with_their_reason(shared, backend, phase):
    one = shared(phase, backend)
    values = one.inputs([5, 4])
    given = one.model.embedding(values["input_ids"]).detach()
    looked_up = one.runner.run_live_eager(2, **values)
    assert all(map(same_bits, one.runner.run(2, **values, embeddings=given), looked_up))
    other = one.runner.run(2, **values, embeddings=given.flip(0))
    assert not same_bits(other[-1], looked_up[-1])
    assert one.runner.coverage().reasons == {"EMBEDDINGS": 2} and one.runner.coverage().captured == 0
    assert one.runner.coverage().last_facts["EMBEDDINGS"] == "embeddings (2, 32)"


@backends
@pytest.mark.parametrize("phase", ["seed", "loop", "fused"])
@branches
def test_p24_callers_with_positions_on_several_axes_run_eager_with_their_reason(shared, backend, phase, topk):
    one = shared(phase, backend, topk=topk)
    values = one.inputs([5, 4])
    same = (values["seq_lens"] - 1).expand(3, -1)
    plain = one.runner.run_live_eager(2, **values)
    assert all(map(same_bits, one.runner.run(2, **values, positions=same), plain))
    one.runner.run(2, **values, positions=same + torch.tensor([[0], [2], [1]], device=one.device))
    assert one.runner.coverage().reasons == {"POSITION_AXES": 2} and one.runner.coverage().captured == 0
    assert one.runner.coverage().last_facts["POSITION_AXES"] == "3 axes"


def test_the_eager_seed_step_is_the_assistant_and_nothing_else(shared):
    """What S0 calls unchanged: the same numbers as without any runner."""
    one = shared("seed", "full", topk=3)
    values = one.inputs([5, 4])
    p, index, hidden = one.runner.run_live_eager(2, **values)
    with torch.no_grad():
        attend = one.runner.frozen(values).attend
        logits, after = one.runner.model(
            values["input_ids"], values["hidden"], values["seq_lens"] - 1, attend
        )
    best = logits.float().softmax(-1).topk(3)
    assert same_bits(hidden, after) and same_bits(p, best.values) and same_bits(index, best.indices)


def test_the_kill_switch_captures_nothing_and_says_so(shared, also):
    one = shared("seed", "full")
    off = also(one, "seed", Options("full", kill_switch=SWITCH))
    values = one.inputs([5, 4])
    assert all(map(same_bits, off.run(2, **values), one.runner.run_live_eager(2, **values)))
    assert off.captured.captured_sizes == []
    assert off.coverage().reasons == {"KILL_SWITCH": 1}
    assert off.coverage().last_facts == {"KILL_SWITCH": SWITCH}


class Failing(SeedRunner):
    """A seed step that cannot be recorded."""

    def step(self, **inputs):
        inputs["seq_lens"].sum().item()
        return super().step(**inputs)


def test_a_failed_capture_runs_eager_with_the_reason_and_is_not_silent(shared):
    one = shared("seed", "full")
    runner = Failing(one.runner.model, one.kv, one.group, (2, 4), Options("full"), topk=1)
    with pytest.warns(CaptureFailedWarning, match="seed_step, bucket 4"):
        runner.capture()
    values = one.inputs([5, 4])
    assert all(map(same_bits, runner.run(2, **values), one.runner.run_live_eager(2, **values)))
    assert runner.coverage().reasons == {"CAPTURE_FAILED": 1} and runner.coverage().captured == 0
    facts = runner.coverage().last_facts["CAPTURE_FAILED"]
    assert "the host waits for the device" in facts or "item" in facts
    runner.close()


def test_p42_a_failed_capture_leaves_the_targets_cache_as_it_was_and_where_it_was(speculative):
    """Nothing is exchanged for a capture, so nothing is to be put back: the step before goes on as it did."""
    one = speculative("seed", "full", (2,))
    values = one.inputs([5, 4])
    first = one.runner.run(2, **values)
    places, before = [each.data_ptr() for each in one.kv.caches().values()], one.cache()
    runner = Failing(one.runner.model, one.kv, one.group, (2, 4), Options("full"), topk=1)
    with pytest.warns(CaptureFailedWarning, match="seed_step, bucket 4"):
        runner.capture()
    assert [each.data_ptr() for each in one.kv.caches().values()] == places
    assert all(map(same_bits, one.cache(), before))
    assert all(map(same_bits, one.runner.run(2, **values), first))
    runner.close()


@pytest.mark.parametrize("phase", ["seed", "loop", "fused"])
def test_p85_an_assistant_bound_to_another_target_after_a_capture_is_refused(speculative, phase):
    one = speculative(phase, "full", (2,))
    values = one.inputs([5, 4])
    first = one.runner.run(2, **values)
    one.runner.model.bind(random_model(one.config, device=one.device, dtype=torch.float32, seed=9))
    with pytest.raises(AddressError, match=r"target\.embedding is another module"):
        one.runner.run(2, **values)
    one.runner.model.bind(one.model)
    assert all(map(same_bits, first, one.runner.run(2, **values)))


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (lambda one: setattr(one.model.embedding.weight, "data", one.model.embedding.weight.data.clone()),
         r"target\.embedding\.weight"),
        (lambda one: setattr(one.model, "rotary", one.model.rotary.clone()), r"target\.rotary"),
        (lambda one: setattr(one.runner.model.pre.weight, "data", one.runner.model.pre.weight.data.clone()),
         r"assistant\.pre\.weight"),
        (lambda one: setattr(one.kv.full, "keys", one.kv.full.keys.clone()), r"kv\.keys"),
    ],
    ids=["embedding", "rotary", "own", "cache"],
)  # fmt: skip
def test_p85_what_a_draft_reads_of_its_target_is_under_the_address_contract(speculative, move, name):
    one = speculative("fused", "full", (2,))
    values = one.inputs([5, 4])
    one.runner.run(2, **values)
    move(one)
    with pytest.raises(AddressError, match=f"moved: {name}"):
        one.runner.run(2, **values)


def test_p85_an_assistant_without_a_target_is_captured_by_none(shared):
    one = shared("seed", "full")
    with pytest.raises(ModelError, match="bound to no target"):
        SeedRunner(Assistant(ASSISTANT), one.kv, one.group, (2,), options_for("full"), topk=1)


@pytest.mark.parametrize(
    ("steps", "topk", "tokens"), [(0, 1, 2), (3, 1, 5), (3, 1, 1), (2, 3, 14), (3, 0, 2), (3, 98, 4)]
)
def test_a_draft_that_cannot_be_is_refused(shared, steps, topk, tokens):
    one = shared("seed", "full")
    about = (one.runner.model, one.kv, one.group, (2,), options_for("full"))
    with pytest.raises(InputError, match="give"):
        DraftLoopRunner(*about, steps=steps, topk=topk, tokens=tokens, fused=False)


def test_a_seed_of_other_branches_than_the_loops_is_refused(shared):
    one, other = shared("loop", "full", topk=3), shared("loop", "full", topk=1)
    with pytest.raises(InputError, match="1 branches come from the seed step, the loop has 3"):
        one.runner.run(2, **other.inputs([5, 4]))


def test_captures_are_logged_as_a_server_does(shared, also, caplog):
    one = shared("seed", "full")
    with caplog.at_level(logging.INFO, logger="cglab.runners"):
        for phase in ("loop", "seed"):
            also(one, phase, options_for("full"), (1, 2))
    assert [record.getMessage() for record in caplog.records if record.name == "cglab.runners"] == [
        "Capture Frozen-KV MTP draft graph begin.",
        "Capture Frozen-KV MTP draft graph end (captured 2 batch sizes).",
        "Capture Frozen-KV MTP seed graph begin.",
        "Capture Frozen-KV MTP seed graph end (captured 2 batch sizes).",
    ]


def speculate(one, runners, run):
    """Greedy rounds of eight requests that end in waves: the tokens of each, and how often each size ran."""
    seed, loop, verify = runners
    committed, output, width = [1 + i % 3 for i in range(8)], [[] for _ in range(8)], verify.width
    newest = one.tensor([10 + i for i in range(8)])
    hidden = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(one.device)
    for live in (8, 7, 5, 3, 2, 1):
        rows, lens = one.tensor(list(range(1, live + 1))), one.tensor(committed[:live])
        where = {"request_rows": rows, "seq_lens": lens}
        newest, hidden = newest[:live], hidden[:live]
        p, index, after = run(seed, live, {"input_ids": newest, "hidden": hidden, **where})
        draft = run(loop, live, {"topk_p": p, "topk_index": index, "hidden": after, **where})
        ids = torch.cat((newest.unsqueeze(1), draft.draft_tokens), 1)
        places = [one.slots_of(r + 1)[committed[r] + i] for r in range(live) for i in range(width)]
        step = {"input_ids": ids.flatten(), "out_slots": one.tensor(places), "request_rows": rows}
        verified = run(verify, live, step | {"seq_lens": lens + width})
        chosen = verified.tokens.view(live, width).tolist()
        accepted = []
        for r, (drafted, said) in enumerate(zip(draft.draft_tokens.tolist(), chosen, strict=True)):
            agreed = next((i for i, t in enumerate(drafted) if t != said[i]), len(drafted))
            output[r] += said[: agreed + 1]
            committed[r] += min(agreed + 1, 2)  # so that a row's 16 tokens last
            accepted.append(min(agreed, 1))
        newest = one.tensor([chosen[r][n] for r, n in enumerate(accepted)])
        hidden = verified.hidden.view(live, width, -1)[torch.arange(live), accepted].clone()
    return output


@backends
def test_b72_speculation_on_a_batch_that_ends_in_waves_equals_eager(shared, also, backend):
    one = shared("seed", backend)
    options, before = options_for(backend), one.cache()
    loop = also(one, "loop", options, (1, 2, 4, 8))
    verify = VerifyRunner(one.model, one.kv, one.group, (1, 2, 4, 8), options, width=4, steps=one.steps)
    verify.capture()
    runners = (one.runner, loop, verify)
    captured = speculate(one, runners, lambda runner, live, values: runner.run(live, **values))
    one.restore(before)
    eager = speculate(one, runners, lambda runner, live, values: runner.run_live_eager(live, **values))
    verify.close()
    assert captured == eager
    assert all(runner.coverage().eager == 0 and runner.coverage().captured == 6 for runner in runners)
