"""The lightning indexer's selection against a sort spelt out, whatever the requests and however wide the scores."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.models import indexer as module
from cglab.models.indexer import KeyRanges, index_scores, keep_best, select, select_all
from cglab.models.kv import PagedKV
from cglab.models.spans import Span
from tests.models.latent import TINY, padded

PAGE, CONTEXT = 4, 24
requests = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=4
)  # tokens in the cache, and new ones


def cache(count):
    """A cache of ``count`` requests on scattered pages, request i at row i + 1."""
    pages = count * CONTEXT // PAGE
    kv = PagedKV(TINY, pages=pages + 1, page_size=PAGE, rows=count + 1, max_context=CONTEXT, device="cpu",
                 dtype=torch.float32)  # fmt: skip
    kv.full.page_table[1:] = 1 + torch.randperm(pages).view(count, -1)
    return kv


def step(lengths):
    """Spans of the requests, their key ranges, and for each token the slots that it sees."""
    spans = [Span(row, start, length) for row, (start, length) in enumerate(lengths, start=1)]
    kv = cache(len(spans))
    seen = []
    for span in spans:
        table = kv.full.page_table[span.row].tolist()
        slots = [table[position // PAGE] * PAGE + position % PAGE for position in range(span.end)]
        seen += [slots[:end] for end in range(span.start + 1, span.end + 1)]
    return kv, KeyRanges.of(spans, kv.full), seen


def drawn(tokens, heads=3, width=4, values=(-1.0, 0.0, 1.0)):
    """Queries and gates of few values, so that many scores are equal."""
    choices = torch.tensor(values)
    return choices[torch.randint(len(values), (tokens, heads, width))], torch.tensor([0.5, 1.0])[
        torch.randint(2, (tokens, heads))
    ]


def best(scores, kept):
    """The slots of a token's best keys in the order of their positions; of equals the earlier ones."""
    order = sorted(range(len(scores)), key=lambda position: (-scores[position], position))
    return sorted(order[:kept])


@given(requests, st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
def test_p79_a_selection_is_the_best_keys_by_position_and_minus_one(lengths, kept, room, idle):
    kv, ranges, seen = step(lengths)
    index_keys = torch.randint(-1, 2, (kv.full.values.shape[1], 1, 4)).float()
    ranges = padded(ranges, idle, room)
    query, gates = drawn(len(seen) + idle)
    out = torch.full((len(seen) + idle, kept), 7, dtype=torch.int32)
    select(query, gates, index_keys, ranges, out)
    for row, slots in enumerate(seen):
        found = torch.einsum("hd,kd->hk", query[row], index_keys[slots, 0]).relu()
        expected = [slots[place] for place in best((gates[row] @ found).tolist(), kept)]
        assert out[row].tolist() == expected + [-1] * (kept - len(expected))
    assert (out[len(seen) :] == -1).all()


@given(requests, st.integers(0, 7))
def test_p78_padded_tokens_select_nothing_and_others_only_what_they_see(lengths, idle):
    _, ranges, seen = step(lengths)
    ranges = padded(ranges, idle)
    out = torch.full((len(seen) + idle, ranges.longest), 7, dtype=torch.int32)
    select_all(ranges, out)
    assert [[slot for slot in row if slot >= 0] for row in out.tolist()] == seen + [[]] * idle


@given(requests, st.integers(0, 3), st.integers(0, 5), st.integers(0, 5))
def test_recorded_ranges_are_those_of_the_spans(lengths, absent, idle, room):
    kv, ranges, _ = step(lengths)
    cu_q, cu_k = ([0], [0])
    for start, length in [*lengths, *[(0, 0)] * absent]:
        cu_q.append(cu_q[-1] + length)
        cu_k.append(cu_k[-1] + start + length)
    rows = [*range(1, len(lengths) + 1), *[0] * absent]
    rows, cu_q, cu_k = (torch.tensor(part, dtype=torch.int32) for part in (rows, cu_q, cu_k))
    tokens, keys = len(ranges.starts), len(ranges.slots)
    found = KeyRanges.recorded(
        kv.full, request_rows=rows, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, tokens=tokens + idle, keys=keys + room,
        longest=24,
    )  # fmt: skip
    assert found.slots[:keys].equal(ranges.slots) and (found.slots[keys:] == ranges.slots[-1]).all()
    assert found.starts[:tokens].equal(ranges.starts) and found.seq_lens[:tokens].equal(ranges.seq_lens)
    assert (found.seq_lens[tokens:] == 0).all() and found.longest == 24


def test_keeping_all_equals_keeping_the_best_where_there_are_no_more():
    _, ranges, seen = step([(5, 3), (0, 8)])
    chosen, scored = (torch.empty(len(seen), 8, dtype=torch.int32) for _ in range(2))
    select_all(ranges, chosen)
    scores = torch.randn(len(seen), len(ranges.slots))
    keep_best(scores, ranges.slots, ranges.starts, ranges.seq_lens, scored)
    assert chosen.equal(scored)


def test_no_score_is_computed_where_every_key_is_kept(monkeypatch):
    _, ranges, seen = step([(2, 4)])
    monkeypatch.setattr(module, "index_scores", None)
    out = torch.empty(len(seen), 6, dtype=torch.int32)
    select(torch.empty(0), torch.empty(0), torch.empty(0), ranges, out)
    assert out[-1].tolist() == seen[-1]
    with pytest.raises(TypeError):
        select(*drawn(len(seen)), torch.zeros(99, 1, 4), ranges, out[:, :5].contiguous())


def test_pieces_of_rows_select_what_all_rows_at_once_select(monkeypatch):
    kv, ranges, seen = step([(9, 12), (3, 7)])
    index_keys = torch.randn(kv.full.values.shape[1], 1, 4)
    query, gates = torch.randn(len(seen), 3, 4), torch.randn(len(seen), 3)
    whole, pieces = (torch.empty(len(seen), 5, dtype=torch.int32) for _ in range(2))
    select(query, gates, index_keys, ranges, whole)
    monkeypatch.setattr(module, "SCORE_BYTES", 3 * 21 * 8 * 2)  # two rows of the longer request
    select(query, gates, index_keys, ranges, pieces)
    assert whole.equal(pieces)


@given(requests, st.integers(1, 9))
def test_each_request_is_scored_apart_and_selects_what_it_selects_among_all(lengths, kept):
    kv, ranges, seen = step(lengths)
    index_keys = torch.randint(-1, 2, (kv.full.values.shape[1], 1, 4)).float()
    query, gates = drawn(len(seen))
    apart, packed = (torch.full((len(seen), kept), 7, dtype=torch.int32) for _ in range(2))
    scored, plain = [], module.index_scores

    def counted(query, gates, keys):
        scored.append((len(query), len(keys)))
        return plain(query, gates, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "index_scores", counted)
        select(query, gates, index_keys, ranges, apart)
    select(query, gates, index_keys, replace(ranges, spans=()), packed)
    assert apart.equal(packed)
    assert scored == [(length, start + length) for start, length in lengths if start + length > kept]


def test_scores_are_gated_sums_of_what_is_above_zero():
    query, gates, keys = torch.randn(5, 3, 4), torch.randn(5, 3), torch.randn(7, 4)
    expected = torch.zeros(5, 7, dtype=torch.float64)
    for head in range(3):
        found = (query[:, head].double() @ keys.double().T).clamp(min=0)
        expected += gates[:, head : head + 1].double() * found
    torch.testing.assert_close(index_scores(query, gates, keys), expected.float())
    assert index_scores(query.bfloat16(), gates, keys.bfloat16()).dtype == torch.float32


def test_p37_the_longest_is_a_number_of_the_host_and_padding_leaves_it():
    _, ranges, _ = step([(5, 3), (0, 4)])
    assert ranges.longest == 8 and padded(ranges, 4).longest == 8
    assert replace(ranges, longest=9).slots is ranges.slots
