"""Whether two servers compute the same: greedy token ids, and the logprobs of the prompts bit by bit.

S3 holds its arms equal by both, on 13 requests. Requests are sent one by one, so that both servers see the same batch
every time, after the cache was emptied, so that no arm reuses what the other computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, nan
from typing import Any

from cglab.errors import InputError, ServerError
from cglab.measure.parity import Parity, compare_tokens
from cglab.serving.diagnosis import Fault
from cglab.serving.endpoint import Endpoint, odd, read_json
from cglab.serving.workload import Body, point

LOGPROB_REQUESTS = 13
"""Requests whose prompts' logprobs are compared (S3)."""


@dataclass(frozen=True, slots=True)
class Replies:
    """What a server made of prompts, greedy.

    Attributes:
        prompts: token ids by request.
        tokens: new token ids by request.
        logprobs: logprob of each prompt token after the first, by request; None where they were not asked for.
        refused: why the server gave no logprobs, in its words; empty if it was not asked, or gave them.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...] | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class ServerParity:
    """Two servers beside each other.

    Attributes:
        tokens: of the greedy outputs; ``step`` and ``row`` are the first difference.
        equal_outputs: requests whose whole output is equal.
        outputs: requests.
        logprobs_compared: prompt tokens whose logprobs were compared; 0 where they were not asked for.
        logprobs_equal: of them, equal bit by bit.
        largest_difference: between two finite logprobs of one token; None where there are none.
        first_difference: request and position of the first logprob that differs; None if none does.
        refused: why a server gave no logprobs; empty if none refused.
    """

    tokens: Parity
    equal_outputs: int
    outputs: int
    logprobs_compared: int = 0
    logprobs_equal: int = 0
    largest_difference: float | None = None
    first_difference: tuple[int, int] | None = None
    refused: str = ""

    @property
    def bitwise(self) -> bool:
        """Whether every token and every logprob that was compared is equal."""
        return self.equal_outputs == self.outputs and self.logprobs_equal == self.logprobs_compared

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record: the verdict on the tokens, and the logprobs beside it."""
        plain = asdict(self)
        del plain["tokens"]
        return {**self.tokens.as_dict(), **plain, "bitwise": self.bitwise}

    def __str__(self) -> str:
        text = f"{self.equal_outputs} of {self.outputs} outputs equal ({self.tokens})"
        if self.logprobs_compared:
            text += f"; {self.logprobs_equal} of {self.logprobs_compared} input logprobs bitwise equal"
        if self.first_difference is not None:
            request, position = self.first_difference
            text += f", first at request {request}, token {position}"
        if self.first_difference is not None and self.largest_difference is not None:
            text += f"; largest difference {self.largest_difference:.3g}"
        if self.refused:
            text += f"; no logprobs were compared: {self.refused}"
        return text


def ask(
    server: Endpoint, prompts: Sequence[Sequence[int]], new_tokens: int, *, logprobs: bool = False
) -> Replies:
    """Greedy continuations, one request at a time, from an empty cache.

    Args:
        server: with nothing else to do.
        prompts: token ids.
        new_tokens: of each; nothing else ends one.
        logprobs: also of the prompts' own tokens.

    Raises:
        InputError: without prompts or tokens.
        ServerError: if the server does not answer, its cache cannot be emptied (requests are in flight), or the
            reply has another number of tokens.
    """
    if not prompts or new_tokens < 1:
        raise InputError(f"{len(prompts)} prompts and {new_tokens} new tokens; give at least one of each")
    server.post("/flush_cache")
    tokens, told = [], []
    for prompt in prompts:
        reply = _generate(server, list(prompt), new_tokens, logprobs)
        tokens.append(tuple(reply["output_ids"]))
        if len(tokens[-1]) != new_tokens:
            raise odd(server, f"asked for {new_tokens} tokens, it gave {len(tokens[-1])}")
        if logprobs:
            told.append(_logprobs(server, reply, len(prompt)))
    return Replies(tuple(map(tuple, prompts)), tuple(tokens), tuple(told) if logprobs else None)


def ask_all(server: Endpoint, prompts: Sequence[Sequence[int]], new_tokens: int) -> Replies:
    """Tokens and logprobs; tokens alone, with the reason, from a server that refuses logprobs (DFLASH of 0.5.16 does).

    Args:
        server: as :func:`ask`.
        prompts: token ids.
        new_tokens: of each.

    Raises:
        InputError: as :func:`ask`.
        ServerError: as :func:`ask`.
    """
    try:
        return ask(server, prompts, new_tokens, logprobs=True)
    except ServerError as error:
        if error.fault != Fault.REFUSED or "logprob" not in str(error):
            raise
        why = str(error).split("\n", 1)[0].split(" Most likely", 1)[0]
    return replace(ask(server, prompts, new_tokens), refused=why)


def compare(one: Replies, other: Replies) -> ServerParity:
    """Two servers' replies to the same prompts; the second is the reference.

    Raises:
        InputError: if the prompts differ.
    """
    if one.prompts != other.prompts:
        raise InputError("the replies are to different prompts; ask both servers the same")
    equal = sum(1 for ours, theirs in zip(one.tokens, other.tokens, strict=True) if ours == theirs)
    tokens = compare_tokens(one.tokens, other.tokens)
    if one.logprobs is None or other.logprobs is None:
        return ServerParity(tokens, equal, len(one.tokens), refused=one.refused or other.refused)
    pairs = [
        (request, position, ours, theirs)
        for request, (row, reference) in enumerate(zip(one.logprobs, other.logprobs, strict=True))
        for position, (ours, theirs) in enumerate(zip(row, reference, strict=True), start=1)
    ]
    # By their bits: 0.0 equals -0.0, and a NaN that both have is the same one.
    apart = [pair for pair in pairs if pair[2].hex() != pair[3].hex()]
    return ServerParity(
        tokens,
        equal,
        len(one.tokens),
        len(pairs),
        len(pairs) - len(apart),
        max((far for *_, ours, theirs in pairs if isfinite(far := abs(ours - theirs))), default=None),
        apart[0][:2] if apart else None,
    )


def parity_bodies(vocabulary: int, *, count: int = LOGPROB_REQUESTS, tokens: int = 128) -> list[Body]:
    """The prompts that S3's check is made of, of a fixed seed: ``count`` of ``tokens`` random token ids."""
    return point(tokens, 1, 1, vocabulary=vocabulary, count=count, seed=3).bodies()


def _generate(server: Endpoint, prompt: list[int], new_tokens: int, logprobs: bool) -> dict[str, Any]:
    body: Body = {
        "input_ids": prompt,
        "sampling_params": {"ignore_eos": True, "max_new_tokens": new_tokens, "temperature": 0.0},
    }
    if logprobs:
        body |= {"return_logprob": True, "logprob_start_len": 0}
    reply = read_json(server, "/generate", server.post("/generate", body))
    if not isinstance(reply.get("output_ids"), list):
        raise odd(server, f"/generate was answered without output_ids: {str(reply)[:200]}")
    return reply


def _logprobs(server: Endpoint, reply: dict[str, Any], length: int) -> tuple[float, ...]:
    found = reply.get("meta_info", {}).get("input_token_logprobs")
    if not isinstance(found, list) or len(found) != length:
        fact = f"/generate told {len(found or [])} input logprobs of a prompt of {length} tokens"
        raise odd(server, f"{fact}: this version or its speculative mode does not return them")
    # Nothing comes before the first token. A NaN, as of a corrupt replay, is null in JSON.
    return tuple(nan if each[0] is None else float(each[0]) for each in found[1:])
