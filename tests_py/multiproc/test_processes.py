# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: killed, frozen, forked; ways to make a group; nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ranks
from support.rounds import ALL_STRATEGIES, STRATEGIES

import fanfold
from fanfold.testing import RankEnded, process_outcomes, spawn_processes, spawn_threads

pytestmark = pytest.mark.multiproc
# All steps, and more than two rounds have: 2 ranks x (rows, fences, flags, reads, sums). Of the
# others: the first, one in the middle of round 0, one in its combine or in round 1.
KILL_STEPS = {
    "one_sided": range(44),
    "broadcast": range(12),
    "gather_scatter": (0, 4, 8),
    "batched": (0, 5, 10),
    "two_sided": (0, 6, 17),
    "low_latency": (0, 10, 20),
    "high_throughput": (0, 12, 20),
}
STOP_STEPS = {
    "one_sided": list(range(30)),
    "broadcast": list(range(12)),
    "gather_scatter": [1, 5],
    "batched": [2, 6],
    "two_sided": [1, 9],
    "low_latency": [3, 12],
    "high_throughput": [4, 19],
}
NOTICE_S = 1.0


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test after which the temporary folder or shared memory holds something of ours."""

    def in_shared_memory() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("*fanfold*")}

    before = in_shared_memory()
    folder = tmp_path / "tmp"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield
    assert list(folder.iterdir()) == []
    assert in_shared_memory() <= before


@pytest.mark.parametrize(
    ("strategy", "step"), [(name, step) for name in ALL_STRATEGIES for step in KILL_STEPS[name]]
)
def test_a_rank_killed_at_any_step_is_lost_to_its_peers(strategy: str, step: int) -> None:
    outcomes = process_outcomes(3, ranks.rounds_until_a_peer_dies, strategy, step)
    assert isinstance(outcomes[1].error, RankEnded)
    assert outcomes[1].error.signal == signal.SIGKILL
    for survivor in (0, 2):
        assert outcomes[survivor].error is None, outcomes[survivor].text
        rank, seconds, text = outcomes[survivor].value
        assert rank == 1, text
        assert "rank 1 is gone" in text
        assert seconds < NOTICE_S


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_frozen_at_any_step_comes_back_by_reset(strategy: str, num_ranks: int) -> None:
    steps = STOP_STEPS[strategy]
    if strategy in STRATEGIES:
        steps = steps[:: num_ranks - 1]
    ends = spawn_processes(
        num_ranks, ranks.rounds_with_a_frozen_rank, strategy, steps, 1, timeout_s=100
    )
    for step, *of_step in zip(steps, *ends, strict=True):
        assert ("PeerTimeout", 1) in of_step, (step, of_step)


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_a_rank_that_returns_early_is_lost_to_its_peers(strategy: str) -> None:
    assert spawn_processes(3, ranks.leave_early, strategy) == ["lost", "left", "lost"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_are_the_same_bits_over_threads_processes_and_instruction_sets(
    strategy: str,
) -> None:
    wanted = spawn_threads(3, ranks.result_bits, strategy, "auto")
    assert spawn_processes(3, ranks.result_bits, strategy, "auto") == wanted
    assert spawn_processes(3, ranks.result_bits, strategy, "portable") == wanted
    assert spawn_threads(3, ranks.result_bits, strategy, "portable") == wanted


def test_strategies_give_the_same_bits() -> None:
    assert spawn_processes(3, ranks.result_bits, "one_sided", "auto") == spawn_threads(
        3, ranks.result_bits, "broadcast", "auto"
    )


def test_from_env_takes_what_torchrun_sets() -> None:
    assert spawn_processes(2, ranks.use_from_env, f"run-{os.getpid()}") == [0, 1]


def test_from_torch_bootstraps_over_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = str(tmp_path / "store")
    assert spawn_processes(3, ranks.use_from_torch, store) == [(0, 2), (-1, -1), (1, 2)]


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import fanfold
from support.rounds import make, works
with fanfold.Communicator.from_env(timeout_s=30) as comm:
    with make(comm) as a2a:
        works(a2a, comm.rank)
    sys.stdout.write(f"rank {{comm.rank}} of {{comm.num_ranks}} worked\\n")
"""


@pytest.mark.slow
def test_torchrun_starts_a_group(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(script)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == ["rank 0 of 2 worked", "rank 1 of 2 worked"]
    for path in Path(os.environ["XDG_RUNTIME_DIR"]).glob("torch*"):
        path.unlink()


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_does_not_disturb(strategy: str) -> None:
    assert spawn_processes(2, ranks.use_in_a_forked_child, strategy) == [0, 0]


def test_closed_exchanges_leave_no_file_open() -> None:
    for before, after in spawn_processes(2, ranks.count_open_files, 6):
        assert after <= before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_joins_is_named(tmp_path: Path, rank: int) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    text = ranks.join_alone(str(folder / "ep"), rank, 2)
    assert f"rank {1 - rank}" in text
    assert list(folder.iterdir()) == []


def test_a_rendezvous_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(fanfold.InvalidArgument, match=r"rendezvous|directory"):
        fanfold.Communicator.processes(
            rank=0, num_ranks=1, rendezvous=str(folder / "ep"), timeout_s=1
        )


@pytest.mark.parametrize(("rank", "num_ranks"), [(2, 2), (-1, 2), (0, 0), (0, 1025)])
def test_ranks_out_of_range_are_refused(tmp_path: Path, rank: int, num_ranks: int) -> None:
    with pytest.raises(fanfold.InvalidArgument, match="rank"):
        fanfold.Communicator.processes(
            rank=rank, num_ranks=num_ranks, rendezvous=str(tmp_path / "ep"), timeout_s=1
        )
