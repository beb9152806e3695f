"""Runs a notebook in a fresh kernel of this very interpreter."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import IO, Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from traitlets import default

CELL_SECONDS = 120
LOOK_SECONDS, END_SECONDS = 0.2, 30
"""How often Ctrl-C is looked for, which may reach another thread than the one that waits; how long a kernel may end."""


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels of the interpreter that runs this process, whatever kernels a user has registered."""

    @default("kernel_spec_manager")
    def _without_registered_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[], parent=self)


def execute(
    notebook: NotebookNode,
    folder: Path,
    *,
    cell_seconds: int = CELL_SECONDS,
    progress: Callable[[], object] | None = None,
) -> NotebookNode:
    """Runs a copy of a notebook; the kernel is gone when this returns, raises or is interrupted.

    Args:
        notebook: what to run; it is not changed.
        folder: working folder of the kernel.
        cell_seconds: time limit of one cell, in seconds.
        progress: called after each cell of code.

    Raises:
        nbclient.exceptions.CellExecutionError, CellTimeoutError, DeadKernelError: if a cell fails.
        KeyboardInterrupt: after Ctrl-C.
    """
    executed = deepcopy(notebook)

    def executed_one(**_: Any) -> None:
        if progress is not None:
            progress()

    client = NotebookClient(
        executed,
        kernel_name="python3",
        kernel_manager_class=ThisInterpreter,
        timeout=cell_seconds,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        on_cell_executed=executed_one,
    )
    _run(client)
    return executed


def _run(client: NotebookClient) -> None:
    """Runs a client in a thread of its own: in the main thread it would take Ctrl-C for a dead kernel."""
    failed: list[BaseException] = []
    # Not by joining the thread: before Python 3.13 a join that Ctrl-C interrupts takes it for ended from then on.
    ended = threading.Event()
    # A loop of its own, which ends every task that nbclient leaves behind when it closes.
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()
    # What the kernel's process itself says is kept off the terminal, and told if it dies.
    with tempfile.TemporaryFile() as said:

        def work() -> None:
            try:
                with runner:
                    runner.run(_execute(client, said))
            except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
                failed.append(error)
            finally:
                ended.set()

        threading.Thread(target=work, name="notebook", daemon=True).start()
        try:
            while not ended.wait(LOOK_SECONDS):
                pass
        except BaseException:
            with suppress(RuntimeError):  # the loop is closed: the notebook has ended, and its kernel
                loop.call_soon_threadsafe(_cancel_all, loop)
            ended.wait(END_SECONDS)
            raise
        if failed:
            if isinstance(failed[0], DeadKernelError):
                said.seek(0)
                failed[0].add_note(said.read()[-2000:].decode(errors="replace"))
            raise failed[0]


async def _execute(client: NotebookClient, said: IO[bytes]) -> None:
    try:
        await client.async_execute(stdout=said, stderr=said)
    finally:
        # A client that was cancelled while it cleaned up would do that once more as the interpreter exits, in a loop of
        # its own, and wait there for sockets of this one for ever.
        atexit.unregister(client._cleanup_kernel)  # noqa: SLF001 - it offers no other way
        if client.kc is not None:
            client.kc.stop_channels()
        if client.km is not None:  # cancelled while it started: nbclient leaves it until this process ends
            await ensure_async(client.km.shutdown_kernel(now=True))


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
