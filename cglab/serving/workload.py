"""What is sent to a server, decided before it starts: token ids, limits and the starts of the lanes.

A body is the JSON of one ``/generate`` request. Its canonical form (sorted keys, no spaces) is a line of the data
file that SGLang's serving benchmark reads, and what the hash is over: two arms compare only if theirs are equal.
Prompts are token ids and never text, so token counts are exact whatever the tokenizer makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from cglab.engine.load import Load
from cglab.errors import InputError

AT_CONCURRENCY_1, PER_LANE = 16, 8
"""Requests of a point (S3): 16 with one lane, 8 for each lane above."""
LANE_OFFSET = 0.05
"""Seconds between the starts of two lanes. A client's own offset depends on the arm's latency, which alone turned
-4 % into +9 % (S3)."""
STEADY_DECODE = (1000, 512)
"""Tokens in and out of the control point, in which decoding is nearly all of the time (S3)."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """One point of a comparison, the same for all arms.

    Attributes:
        name: of the point, unique within a recipe.
        load: the requests, from a seed; greedy.
        vocabulary: token ids are drawn from 0 to ``vocabulary - 1``.
        lane_offset: seconds between the starts of two lanes.
        warmups: requests of the same lengths and other tokens that are sent before, one by one.

    Raises:
        InputError: for a load that samples, no vocabulary, or a negative offset or number of warm-ups.
    """

    name: str
    load: Load
    vocabulary: int
    lane_offset: float = LANE_OFFSET
    warmups: int = 2

    def __post_init__(self) -> None:
        if self.load.temperature != 0:
            raise InputError(
                f"{self.name}: temperature {self.load.temperature}; arms are compared on greedy tokens, give 0"
            )
        if self.vocabulary < 1 or self.lane_offset < 0 or self.warmups < 0:
            raise InputError(
                f"{self.name}: vocabulary={self.vocabulary}, lane_offset={self.lane_offset}, "
                f"warmups={self.warmups}: need at least 1, 0 and 0"
            )

    def bodies(self) -> list[Body]:
        """The requests in order of sending, as ``/generate`` takes them."""
        return [_body(each.prompt, each.limit) for each in self.load.requests(self.vocabulary)]

    def warm_bodies(self) -> list[Body]:
        """As long as the measured ones, of other tokens: a warm-up must leave no prefix that they could hit."""
        others = replace(self.load, seed=self.load.seed + 1_000_003, count=max(self.warmups, 1))
        return [_body(each.prompt, each.limit) for each in others.requests(self.vocabulary)][: self.warmups]

    def prefix_body(self) -> Body | None:
        """One request whose prompt is the shared prefix, which puts it into the cache; None without a prefix."""
        return _body(self.load.prefix(self.vocabulary), 1) if self.load.shared_prefix else None

    @property
    def payload(self) -> str:
        """sha256 of what is sent, from :func:`payload_hash`."""
        return payload_hash(self.bodies())

    def as_dict(self) -> dict[str, Any]:
        """Plain values: the workload of a record."""
        return {
            "name": self.name, **self.load.as_dict(), "vocabulary": self.vocabulary,
            "lane_offset_s": self.lane_offset, "warmups": self.warmups,
        }  # fmt: skip


def point(
    new_tokens: int,
    output_tokens: int,
    concurrency: int,
    *,
    vocabulary: int,
    cached: int = 0,
    count: int | None = None,
    seed: int = 0,
    lane_offset: float = LANE_OFFSET,
) -> Workload:
    """A point in S3's terms.

    Args:
        new_tokens: fresh tokens of each prompt.
        output_tokens: new tokens of each request.
        concurrency: lanes.
        vocabulary: of the model.
        cached: tokens of a shared prefix that is in the cache before.
        count: requests; None for 16 with one lane and 8 for each lane above.
        seed: of the tokens.
        lane_offset: seconds between the starts of two lanes.

    Raises:
        InputError: as :class:`Workload` and :class:`cglab.engine.load.Load`.
    """
    many = requests_at(concurrency) if count is None else count
    name = (
        f"{f'{cached} cached + ' if cached else ''}{new_tokens} new, {output_tokens} out, {concurrency} lanes"
    )
    load = Load(many, concurrency, new_tokens, output_tokens, shared_prefix=cached, seed=seed)
    return Workload(name, load, vocabulary, lane_offset)


def steady_decode(concurrency: int, *, vocabulary: int, count: int | None = None) -> Workload:
    """The control point: 1000 tokens in, 512 out, where a change of prefill hardly shows."""
    return point(*STEADY_DECODE, concurrency, vocabulary=vocabulary, count=count)


def requests_at(concurrency: int) -> int:
    """Requests of a point: 16 with one lane, 8 for each lane above (S3)."""
    return AT_CONCURRENCY_1 if concurrency == 1 else PER_LANE * concurrency


def canonical(body: Body) -> str:
    """The one spelling of a body that is written and hashed."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def payload_hash(bodies: Iterable[Body]) -> str:
    """sha256 over the canonical lines of the bodies, in order: equal for byte-identical payloads only."""
    return sha256("".join(f"{canonical(body)}\n" for body in bodies).encode()).hexdigest()


def write_data_file(path: Path, workload: Workload) -> str:
    """Writes one canonical line a request.

    Args:
        path: of the file; an earlier one is replaced.
        workload: what to send.

    Returns:
        The hash, which is that of the file's bytes.
    """
    content = "".join(f"{canonical(body)}\n" for body in workload.bodies())
    path.write_text(content, encoding="utf-8")
    return sha256(content.encode()).hexdigest()


def require_equal_payloads(payloads: Mapping[str, str]) -> str:
    """The hash that all arms sent.

    Args:
        payloads: by arm, what was recorded of its requests.

    Raises:
        InputError: if two differ: a comparison of different work shows nothing.
    """
    first, *others = payloads.items()
    for name, payload in others:
        if payload != first[1]:
            raise InputError(
                f"arm {name!r} was sent other requests than {first[0]!r} (sha256 {payload[:12]} and {first[1][:12]}); "
                "give both arms the same workload and seed, and compare again"
            )
    return first[1]


def _body(prompt: list[int], limit: int) -> Body:
    return {
        "input_ids": prompt,
        "sampling_params": {"ignore_eos": True, "max_new_tokens": limit, "temperature": 0.0},
    }
