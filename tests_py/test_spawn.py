# SPDX-License-Identifier: Apache-2.0
"""fanfold.testing.spawn: results, the first error, and no rank left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import ranks

import fanfold
from fanfold.testing import (
    RankEnded,
    process_outcomes,
    spawn_processes,
    spawn_threads,
    thread_outcomes,
)


def test_threads_return_the_results_by_rank() -> None:
    assert spawn_threads(3, lambda comm, x: (comm.rank, comm.num_ranks, x), "x") == [
        (0, 3, "x"),
        (1, 3, "x"),
        (2, 3, "x"),
    ]


def test_threads_raise_the_cause_and_name_its_rank() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.barrier()  # ends by PeerLost, not by a timeout

    start = time.monotonic()
    with pytest.raises(KeyError, match="the cause") as caught:
        spawn_threads(3, fn)
    assert time.monotonic() - start < 5
    notes = "".join(getattr(caught.value, "__notes__", ["rank 1 of 3 failed"]))
    assert "rank 1 of 3 failed" in notes


def test_threads_give_every_outcome() -> None:
    def fn(comm: fanfold.Communicator) -> int:
        if comm.rank == 1:
            raise ValueError("one")
        return int(comm.rank)

    outcomes = thread_outcomes(3, fn)
    assert [outcome.value for outcome in outcomes] == [0, None, 2]
    assert isinstance(outcomes[1].error, ValueError)


def test_threads_that_do_not_end_are_named() -> None:
    release = threading.Event()

    def fn(comm: fanfold.Communicator) -> None:
        if comm.rank == 2:
            release.wait(20)

    try:
        with pytest.raises(TimeoutError, match=r"ranks \[.*2\] of 3 did not end within 0.5 s"):
            spawn_threads(3, fn, timeout_s=0.5)
    finally:
        release.set()


@pytest.mark.multiproc
class TestProcesses:
    def test_results_by_rank_without_torch_in_the_child(self) -> None:
        for rank, found in enumerate(spawn_processes(3, ranks.about_me, "x")):
            assert found["rank"] == rank
            assert found["num_ranks"] == 3
            assert found["argument"] == "x"
            assert found["pid"] != os.getpid()
            assert not found["has_torch"]
            assert found["kind"] == "processes"

    def test_the_cause_is_raised_with_its_rank_and_traceback(self) -> None:
        start = time.monotonic()
        with pytest.raises(KeyError, match="the cause") as caught:
            spawn_processes(3, ranks.fail_on_rank_one)
        assert time.monotonic() - start < 15
        notes = "".join(getattr(caught.value, "__notes__", []))
        if sys.version_info >= (3, 11):
            assert "rank 1 of 3 failed" in notes
            assert "fail_on_rank_one" in notes

    def test_a_killed_rank_is_named_with_its_signal(self) -> None:
        with pytest.raises(RankEnded, match="rank 1 of 2 was ended by SIGKILL") as caught:
            spawn_processes(2, ranks.die_on_rank_one, int(signal.SIGKILL))
        assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)

    def test_an_exit_without_result_is_named(self) -> None:
        with pytest.raises(RankEnded, match="rank 1 of 2 exited 3 without a result"):
            spawn_processes(2, ranks.exit_on_rank_one, 3)

    def test_errors_of_the_library_keep_their_attributes(self) -> None:
        outcomes = process_outcomes(2, ranks.lose_rank_one)
        assert isinstance(outcomes[0].error, fanfold.PeerLost)
        assert outcomes[0].error.rank == 1

    def test_what_cannot_be_pickled_is_told_as_text(self) -> None:
        with pytest.raises(RuntimeError, match="cannot be pickled"):
            spawn_processes(1, ranks.return_a_lock)

    def test_a_stopped_rank_is_ended_and_nothing_is_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        pids = tmp_path / "pids"
        with pytest.raises(TimeoutError, match=r"ranks \[(0, )?1\] of 2 did not end"):
            spawn_processes(2, ranks.stop_on_rank_one, str(pids), timeout_s=3)
        for pid in pids.read_text().split():
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)
        assert [path.name for path in tmp_path.iterdir()] == ["pids"]

    def test_children_end_with_the_process_that_started_them(self, tmp_path: Path) -> None:
        pids = tmp_path / "pids"
        program = (
            "import sys; sys.path[:0] = sys.argv[2:]; from support import ranks;"
            " from fanfold.testing import spawn_processes;"
            " spawn_processes(2, ranks.sleep_long, sys.argv[1])"
        )
        folder = tmp_path / "tmp"
        folder.mkdir()
        with subprocess.Popen(
            [sys.executable, "-c", program, str(pids), str(Path(__file__).parent)],
            env={**os.environ, "TMPDIR": str(folder)},
        ) as parent:
            deadline = time.monotonic() + 20
            while not (pids.exists() and pids.read_text().count("\n") == 2):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            parent.kill()
        for pid in map(int, pids.read_text().split()):
            while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid):
                assert time.monotonic() < deadline, f"process {pid} lives on"
                time.sleep(0.02)
        assert list(folder.iterdir()) == []

    def test_functions_of_a_script_are_found(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "from fanfold.testing import spawn_processes\n"
            "def fn(comm):\n    return comm.rank * 10\n"
            "if __name__ == '__main__':\n    print(spawn_processes(2, fn))\n"
        )
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout == "[0, 10]\n", done.stderr


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"
