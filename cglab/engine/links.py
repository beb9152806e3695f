"""What the ranks of a pipeline say to each other, each time under a deadline.

Proxies go from a stage to the next: on GPUs through NCCL, on a CPU through Gloo. NCCL refuses two ranks on one GPU:
where ranks share one, all proxies go through Gloo, which takes memory of the host alone, so that they are copied there
and back; that shows that a pipeline is right, and nothing of its speed. Tokens, and what all ranks agree on, go through
Gloo always, as they are needed on the host. Nothing tells the size of a message: every rank plans the same
batches. Where a peer is lost, late, or closes its connections, the wait ends in an error that names the peer; its own
rank then stops too, so that no rank is left waiting (B79).
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from cglab.errors import InputError, RankError
from cglab.models.stages import Proxy
from cglab.runners.ranks import ProcessRanks

BACKENDS: Final = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
PROXIES, TOKENS = 1, 2
"""Tags that keep the two kinds of messages of a pair of ranks apart."""
MOST_SENT = 16
"""Messages that may be under way before the oldest is waited for."""


@dataclass(frozen=True, slots=True)
class Joint:
    """How proxies get from a stage to the next; told in records.

    Attributes:
        kind: of the devices, ``cpu`` or ``cuda``.
        sharing: ranks on one device at most.
        staged: whether proxies are copied to host memory and back.
    """

    kind: str
    sharing: int
    staged: bool

    @classmethod
    def of(cls, kind: str, devices: Sequence[int], *, staged: bool = False) -> Joint:
        """Through host memory where two ranks have one GPU, or where it is asked for.

        Args:
            kind: of the devices.
            devices: index of each rank's device, by rank; the ranks see the same devices.
            staged: whether it is asked for.
        """
        sharing = max(Counter(devices).values())
        return cls(kind, sharing, staged or (kind == "cuda" and sharing > 1))

    def __str__(self) -> str:
        if self.staged:
            return f"gloo through host memory, one device shared by {self.sharing} stages"
        return "nccl" if self.kind == "cuda" else "gloo"


class StageLinks:
    """One rank among those of a pipeline; stage and rank have the same number.

    Args:
        device: where the proxies live.
        deadline: seconds after which a wait for another rank is an error: longer than the slowest step or capture.
        store: a file where the ranks meet, with ``rank`` and ``count``; None for what ``torchrun`` tells by its
            variables.
        rank: this one.
        count: ranks in all.
        staged: proxies go through host memory even where they need not.

    Attributes:
        joint: how proxies go.

    Raises:
        RankError: if not all ranks came before the deadline.
        InputError: without a store, where no ``torchrun`` has started this process.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        deadline: float,
        store: Path | None = None,
        rank: int = 0,
        count: int = 1,
        staged: bool = False,
    ) -> None:
        met: dict[str, Any] = {}
        if store is not None:
            met = {"init_method": store.resolve().as_uri(), "rank": rank, "world_size": count}
        elif "RANK" in os.environ:
            rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        else:
            raise InputError("no rank is told: start one process a stage with torchrun, or give a store")
        self.device, self.deadline, self.rank, self.count = device, deadline, rank, count
        self._sent: deque[tuple[int, dist.Work, Tensor]] = deque()
        with self._waiting("all ranks to come"):
            dist.init_process_group(BACKENDS[device.type], timeout=timedelta(seconds=deadline), **met)
            self._ranks = ProcessRanks()
            # Gloo connects on first use: here, where all ranks are at the same place. NCCL would, too: not yet.
            devices = self.gather(torch.tensor([device.index or 0])).flatten().tolist()
        self.joint = Joint.of(device.type, devices, staged=staged)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Within, what ``torch.distributed`` raises is told as this rank's wait."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise RankError(
                f"rank {self.rank} of {self.count} waited for {what}: lost, or not there within "
                f"{self.deadline:g} s ({reason}); see what that rank says itself, and start all of them again"
            ) from error

    def unrecorded(self, device: torch.device) -> str | None:
        """See ``Ranks``: nothing of this is recorded."""
        return "stages are joined between recordings"

    def gather(self, mine: Tensor) -> Tensor:
        """[count, *mine.shape] on the CPU: what each rank gave, in order; all of them call it.

        Raises:
            RankError: if one does not, before the deadline.
        """
        with self._waiting("what all ranks agree on"):
            return self._ranks.gather(mine.cpu())

    def receive(self, proxies: Sequence[Proxy], tokens: int) -> dict[str, Tensor]:
        """What the stage before hands over for so many tokens, by name.

        Raises:
            RankError: if it does not, before the deadline.
        """
        received = {proxy.name: proxy.empty(tokens, self.device) for proxy in proxies}
        landing = (
            {name: self._on_host(each) for name, each in received.items()} if self.joint.staged else received
        )
        with self._waiting(f"proxies of rank {self.rank - 1}"):
            works = [dist.irecv(each, self.rank - 1, tag=PROXIES) for each in landing.values()]
            for work in works:
                if work is not None:
                    work.wait()
        if self.joint.staged:
            for name, each in landing.items():
                received[name].copy_(each)
        return received

    def send(self, proxies: Mapping[str, Tensor]) -> None:
        """Hands proxies to the next stage; returns at once, and keeps them until they have gone.

        Through host memory once they are computed: the copy waits for them.
        """
        for each in proxies.values():
            sent = self._on_host(each).copy_(each) if self.joint.staged else each
            self._send(sent, self.rank + 1, PROXIES)

    def _on_host(self, like: Tensor) -> Tensor:
        """Host memory for a copy of a tensor to or from this rank's device; pinned, where that is a GPU."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")

    def hand_out(self, tokens: Tensor) -> list[int]:
        """The next tokens, which the last stage has chosen, to all other ranks: [chunks] int64."""
        on_host = tokens.cpu()
        for rank in range(self.count - 1):
            self._send(on_host, rank, TOKENS)
        return on_host.tolist()

    def tokens(self, count: int) -> list[int]:
        """The next tokens, as the last stage hands them out.

        Raises:
            RankError: if it does not, before the deadline.
        """
        received = torch.empty(count, dtype=torch.int64)
        with self._waiting(f"tokens of rank {self.count - 1}"):
            dist.recv(received, self.count - 1, tag=TOKENS)
        return received.tolist()

    def _send(self, tensor: Tensor, rank: int, tag: int) -> None:
        with self._waiting(f"rank {rank} to take what it is sent"):
            work = dist.isend(tensor.contiguous(), rank, tag=tag)
        if work is not None:
            self._sent.append((rank, work, tensor))
        while len(self._sent) > MOST_SENT:
            self._arrived()

    def _arrived(self) -> None:
        rank, work, _ = self._sent.popleft()
        with self._waiting(f"rank {rank} to take what it was sent"):
            work.wait()

    def settle(self) -> None:
        """Waits until everything that was sent has arrived."""
        while self._sent:
            self._arrived()

    def close(self) -> None:
        """Ends the connections, which every rank that waits for this one notices."""
        self._sent.clear()
        if dist.is_initialized():
            with suppress(RuntimeError):  # of peers that are gone before
                dist.destroy_process_group()
