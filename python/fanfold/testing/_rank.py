# SPDX-License-Identifier: Apache-2.0
"""What a process started by `fanfold.testing.spawn_processes` runs."""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import pickle
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import fanfold
from fanfold.testing.spawn import Outcome, describe_error


def _end_with_parent(folder: Path) -> None:
    """End this process when the one that started it is gone, and remove what that one cannot."""
    while os.read(0, 1 << 12):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _run(group: dict[str, Any], rank: int, call: bytes) -> Outcome:
    """Join the group, call the function, leave."""
    comm = None
    try:
        fn, args = pickle.loads(call)
        comm = fanfold.Communicator.processes(
            rank=rank,
            num_ranks=group["num_ranks"],
            rendezvous=group["rendezvous"],
            timeout_s=group["timeout_s"],
        )
        outcome = Outcome(value=fn(comm, *args))
    except BaseException as error:
        return Outcome(error=error, text=describe_error(error))
    with contextlib.suppress(fanfold.PeerLost, fanfold.PeerTimeout):
        comm.close()  # waits for the peers
    return outcome


def _pickled(outcome: Outcome) -> bytes:
    """Pickle an outcome; what cannot travel becomes text."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
    except BaseException as problem:
        what = describe_error(outcome.error) if outcome.error is not None else repr(outcome.value)
        error = RuntimeError(f"{what}\n(it cannot be pickled: {problem})")
        return pickle.dumps(Outcome(error=error, text=outcome.text))
    return data


def main(start: dict[str, Any]) -> None:
    """Run one rank; `start` is the first message on standard input, the others follow."""
    result_fd = start["result_fd"]
    os.set_inheritable(result_fd, False)
    preparation, group, call = pickle.load(sys.stdin.buffer)
    multiprocessing.spawn.prepare(preparation)
    folder = Path(group["rendezvous"]).parent
    threading.Thread(
        target=_end_with_parent, args=(folder,), name="end with parent", daemon=True
    ).start()
    outcome = _run(group, start["rank"], call)
    with os.fdopen(result_fd, "wb") as pipe:
        pipe.write(_pickled(outcome))
