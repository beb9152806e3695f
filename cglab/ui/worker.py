"""The one thread that touches the device: jobs in order, a stop between their parts, and an end with its owner.

A capture must not meet CUDA calls of another thread, and a widget's callback must not hold the kernel up. So
callbacks queue jobs, and this thread does them. Grad mode, dispatch modes and the current CUDA device belong to a
thread: whatever the notebook's own thread has entered, jobs run without gradients, in no dispatch mode, on the device
that is named.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import torch

from cglab.errors import ClosedError

Progress = Callable[[str, float], None]
"""Told what is done, and the share of the job that is behind it, 0 to 1."""

PATIENCE = 10.0
"""Seconds that an end waits for the part of a job that runs; the interpreter's own end waits no longer (N12)."""


class StoppedError(Exception):
    """The user pressed stop; a job ends with it between two of its parts, and leaves everything usable."""


class Watch:
    """What a job calls between its parts: it tells how far it is, and ends it where a stop was asked for.

    Args:
        told: where progress goes.
    """

    def __init__(self, told: Progress) -> None:
        self._told, self._stop = told, threading.Event()

    def __call__(self, what: str, share: float) -> None:
        """Tells progress.

        Raises:
            StoppedError: if a stop was asked for.
        """
        self.check()
        self._told(what, share)

    def check(self) -> None:
        """Only ends a job that is to stop.

        Raises:
            StoppedError: if a stop was asked for.
        """
        if self._stop.is_set():
            raise StoppedError

    def stop(self) -> None:
        """Asks for a stop; from any thread."""
        self._stop.set()


Job = Callable[[Watch], None]
"""Reports its own errors, and calls its watch between its parts."""


class Worker:
    """Runs jobs one after another on a thread of its own, which starts with the first one.

    Args:
        device: of all jobs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._jobs: SimpleQueue[tuple[Job, Watch] | None] = SimpleQueue()
        self._watches: list[Watch] = []  # of the jobs that have not ended, the one that runs first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._end: weakref.finalize[..., Any] | None = None

    @property
    def thread(self) -> int | None:
        """Ident of the thread; None before the first job."""
        return None if self._thread is None else self._thread.ident

    def submit(self, job: Job, told: Progress) -> Watch:
        """Queues a job and returns at once.

        Args:
            job: what to do.
            told: where its progress goes; called from the worker's thread.

        Returns:
            What stops it, before it begins too.

        Raises:
            ClosedError: after ``close``.
        """
        watch = Watch(told)
        with self._changed:
            if self._end is not None and not self._end.alive:
                raise ClosedError("this dashboard was closed and does no work any more; open a new one")
            self._watches.append(watch)
            self._jobs.put((job, watch))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="cglab device worker", daemon=True)
                # At the interpreter's end too: a daemon in the middle of a kernel would crash it (N12).
                self._end = weakref.finalize(self, _end, self._jobs, self._watches, self._thread)
                self._thread.start()
        return watch

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until no job is left.

        Args:
            seconds: at most so long; None without end.

        Returns:
            Whether none is left.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._watches, seconds)

    def close(self) -> None:
        """Stops what runs and what waits, and ends the thread; may be called from the thread itself."""
        with self._changed:
            end = self._end
        if end is not None:
            end()

    def _work(self) -> None:
        while (taken := self._jobs.get()) is not None:
            job, watch = taken
            try:
                with ExitStack() as modes:
                    modes.enter_context(torch.inference_mode(mode=False))
                    modes.enter_context(torch.no_grad())
                    if self.device.type == "cuda":
                        modes.enter_context(torch.cuda.device(self.device))
                    job(watch)
            except BaseException as error:  # noqa: BLE001 - told as any thread's is, and the next job is done
                threading.excepthook(
                    threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread))
                )
            finally:
                del job, taken  # and what they hold: an idle worker keeps no model (N02)
                with self._changed:
                    self._watches.remove(watch)
                    self._changed.notify_all()


def _end(jobs: SimpleQueue[Any], watches: list[Watch], thread: threading.Thread) -> None:
    for watch in tuple(watches):
        watch.stop()
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(PATIENCE)
