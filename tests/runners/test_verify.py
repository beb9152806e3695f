"""T2, verify: chains and trees against the tokens one after the other, and what a caller may not ask of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.errors import CaptureError, InputError, TokenRangeError
from cglab.graphs.coverage import Reason
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.models import draft_tree
from cglab.models.attention import DecodeAttention
from cglab.runners.decode import DecodeRunner
from cglab.runners.verify import VerifyRunner

backends = pytest.mark.parametrize("backend", ["full", "breakable"])
kinds = pytest.mark.parametrize("windows", [False, True], ids=["full-attention", "windows"])


def plain_path(one, tokens, places, start, row):
    """Logits after the last of ``tokens``, by one forward over them as a chain from position ``start`` of a row on."""
    count = len(tokens)
    slots = {name: one.tensor(where[:count]) for name, where in places.items()}
    attend = DecodeAttention(
        one.kv, request_rows=one.tensor([row]), seq_lens=one.tensor([start + count]), width=count, **slots
    )
    with torch.no_grad():
        hidden = one.model(one.tensor(tokens), one.tensor(list(range(start, start + count))), attend)
        return one.model.logits(hidden)[-1]


def places_of(one, values, request):
    """Slots of a request's positions from the first uncommitted one on, in each pool."""
    span = slice(request * one.width, (request + 1) * one.width)
    return {name: values[name][span].tolist() for name in values if name.endswith("out_slots")}


@backends
@kinds
@settings(max_examples=6)
@given(
    topk=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
    committed=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_every_node_is_scored_as_by_one_plain_forward_over_its_path(
    shared, backend, windows, topk, seed, committed
):
    one = shared("verify", backend, topk=topk, windows=windows)
    values, before = one.inputs(committed, seed), one.cache()
    live, width = len(committed), one.width
    logits = one.runner.run(live, **values)[1].view(live, width, -1)
    ids = values["input_ids"].view(live, width)
    seen = torch.ones(live, width, width, dtype=torch.bool).tril()
    if topk > 1:
        seen = draft_tree.ancestors(values["parent_list"], values["top_scores_index"], topk)
    for request, start in enumerate(committed):
        places = places_of(one, values, request)
        for node in range(width):
            one.restore(before)
            tokens = ids[request][seen[request, node]].tolist()
            wanted = plain_path(one, tokens, places, start, request + 1)
            torch.testing.assert_close(logits[request, node], wanted, rtol=1e-3, atol=1e-4)


@backends
def test_b77_a_draft_of_no_tokens_is_the_decode_step(shared, backend):
    one = shared("verify", backend)
    options = Options(backend, strict=True, clone=True)
    plain = DecodeRunner(one.model, one.kv, one.group, (1, 2, 4), options)
    alone = VerifyRunner(one.model, one.kv, one.group, (1, 2, 4), options, width=1, steps=0)
    values = {name: value[:: one.width] for name, value in one.inputs([6, 5, 4]).items()}
    values |= {"request_rows": one.tensor([1, 2, 3]), "seq_lens": one.tensor([7, 6, 5])}
    for runner in (plain, alone):
        runner.capture()
    got = alone.run(3, **values)
    wanted = plain.run(3, **values, positions=values["seq_lens"] - 1)
    for runner in (plain, alone):
        runner.close()
    assert same_bits(got.tokens, wanted[0]) and same_bits(got.logits, wanted[1])


@backends
def test_p04_a_batch_of_another_width_runs_eager_although_its_requests_fit(shared, backend):
    one = shared("verify", backend)
    wide, before = one.inputs([6, 5, 4]), one.cache()
    keep = [i for i in range(3 * one.width) if i % one.width < 3]
    narrow = {name: value[keep] if len(value) > 3 else value for name, value in wide.items()}
    narrow["seq_lens"] = wide["seq_lens"] - 1
    whole = one.runner.run(3, **wide)
    one.restore(before)
    part = one.runner.run(3, **narrow)
    torch.testing.assert_close(part.logits, whole.logits[keep], rtol=1e-3, atol=1e-4)
    assert one.runner.coverage().reasons == {"WIDTH": 1} and one.runner.coverage().captured == 1
    assert one.runner.coverage().last_facts == {"WIDTH": "3 tokens a request, captured 4"}


def test_b71_a_batch_without_drafts_is_told_as_one_of_another_width(shared):
    one = shared("verify", "full")
    values = {name: value[:: one.width] for name, value in one.inputs([6, 5, 4]).items()}
    miss = one.runner.ineligible(values | {"request_rows": one.tensor([1, 2, 3])})
    assert miss.reason is Reason.WIDTH and miss.facts == "1 tokens a request, captured 4"


def test_p08_hidden_states_that_a_capture_does_not_hand_out_are_refused(shared, speculative):
    one, without = shared("verify", "full"), speculative("verify", "full", settings={"hidden": False})
    values = one.inputs([6, 5, 4])
    with_them, got = one.runner.run(3, **values), without.runner.run(3, **values)
    assert same_bits(got.tokens, with_them.tokens) and with_them.hidden.shape == (3 * one.width, 32)
    with pytest.raises(InputError, match="no hidden states; make the runner with hidden=True"):
        _ = got.hidden


class ReadsLengths(VerifyRunner):
    """A step that chooses by lengths read on the host, which a recording would keep for ever."""

    def step(self, **inputs):
        longest = max(inputs["seq_lens"].tolist())
        return super().step(**inputs | {"out_slots": inputs["out_slots"] + longest - longest % 2})


@backends
def test_b44_a_body_that_reads_lengths_on_the_host_is_refused(shared, backend):
    one = shared("verify", backend)
    runner = ReadsLengths(
        one.model, one.kv, one.group, (2, 4), Options(backend, strict=True), width=one.width, steps=one.steps
    )
    with pytest.raises(CaptureError):
        runner.capture()
    runner.close()


@backends
@pytest.mark.parametrize("topk", [1, 3])
def test_b44_lengths_and_rows_are_data_of_one_recording(shared, backend, topk):
    """Recorded over lengths of one width at the reserved row; every other batch must follow its own."""
    one = shared("verify", backend, topk=topk)
    outputs = [one.runner.run(2, **one.inputs(committed)).logits for committed in ([9, 1], [1, 9], [4, 4])]
    assert not any(same_bits(a, b) for a in outputs for b in outputs if a is not b)
    assert one.runner.coverage().captured == 3


@pytest.mark.parametrize("phase", ["verify", "seed", "loop"])
@pytest.mark.parametrize("wrong", [4510424140297813696, -1])
def test_b73_token_ids_that_leave_a_graph_are_range_checked_in_debug_mode(
    speculative, monkeypatch, phase, wrong
):
    one = speculative(phase, "full", (1, 2), debug=True)
    values = one.inputs([5, 4])
    one.runner.run(2, **values)
    replay = one.runner.captured.replay

    def garbage(key):
        stored = replay(key)
        stored.leaves[one.runner.tokens_at].fill_(wrong)
        return stored

    monkeypatch.setattr(one.runner.captured, "replay", garbage)
    with pytest.raises(TokenRangeError, match=rf"token {wrong} at 0 .* 0 to 96"):
        one.runner.run(2, **values)


def test_a_tree_deeper_than_a_window_would_see_too_much_and_is_refused(shared):
    """A node sees its whole way to the root; plain decoding forgets what left the window (it gave other tokens)."""
    one = shared("verify", "full", topk=3, windows=True)
    about = (one.model, one.kv, one.group, (1,), Options("eager"))
    VerifyRunner(*about, width=7, topk=3, steps=5).close()
    VerifyRunner(*about, width=7, steps=6).close()  # a chain's mask knows the window
    with pytest.raises(
        InputError, match="6 steps is deeper than the window of 6 .* at most 5 steps, or topk=1"
    ):
        VerifyRunner(*about, width=7, topk=3, steps=6)
