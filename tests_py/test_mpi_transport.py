# SPDX-License-Identifier: Apache-2.0
"""mpi4py communicators as what carries the rows, under mpirun with OpenMPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.mpi import Job, mpirun, reason_to_skip
from support.transport_scenarios import NAMES

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """All scenarios on one job of four ranks."""
    return mpirun(tmp_path_factory.mktemp("mpi"), 4, "scenarios")


@pytest.mark.parametrize("name", NAMES)
def test_scenario(scenarios: Job, name: str) -> None:
    for errors in scenarios.values:
        assert errors is not None, scenarios.text
        assert errors.get(name, "not run: one before failed") == ""


def test_messages_arrive_complete_and_in_order(tmp_path: Path) -> None:
    job = mpirun(tmp_path, 3, "messages", 60)
    assert job.values == [True] * 3, job.text
    assert job.status == 0, job.text


def test_a_long_message_arrives_while_its_sender_does_something_else(tmp_path: Path) -> None:
    job = mpirun(tmp_path, 2, "a_long_message", options=["--mca", "btl", "tcp,self"])
    assert job.values[1] is not None, job.text
    assert job.values[1] < 1.5
    assert job.status == 0, job.text


def test_mishaps(tmp_path: Path) -> None:
    job = mpirun(tmp_path, 3, "mishaps")
    assert job.values == ["works"] * 3, job.text
    assert job.status == 0, job.text


def test_ways_to_make_one(tmp_path: Path) -> None:
    job = mpirun(tmp_path, 3, "ways_to_make_one")
    assert job.values == ["works"] * 3, job.text
    assert job.status == 0, job.text


def test_a_process_ends_well_with_an_open_communicator(tmp_path: Path) -> None:
    job = mpirun(tmp_path, 2, "leave_open")
    assert job.values == ["left"] * 2, job.text
    assert job.status == 0, job.text


def test_what_mpi_still_uses_outlives_the_interpreter(tmp_path: Path) -> None:
    job = mpirun(tmp_path, 1, "leave_to_mpi")
    assert job.values == ["left"], job.text
    assert job.status == 0, job.text
    assert "freed" not in job.text


def test_other_threads_are_refused_where_mpi_may_not_be_called(tmp_path: Path) -> None:
    job = mpirun(tmp_path, 2, "a_thread_of_its_own")
    for told in job.values:
        assert told is not None, job.text
        assert len(told) == 2, told
        assert re.search("thread", told[0])
        assert "expected the main thread" in told[1]
    assert job.status == 0, job.text


@pytest.mark.parametrize("strategy", ["broadcast", "batched"])
def test_a_dead_rank_is_named_where_mpirun_lets_the_others_live(
    tmp_path: Path, strategy: str
) -> None:
    job = mpirun(tmp_path, 3, "rounds_until_a_rank_dies", strategy, options=["--enable-recovery"])
    assert job.values[1] is None
    for told in (job.values[0], job.values[2]):
        assert isinstance(told, list), job.text
        _, rank, seconds, text = told
        assert rank == 1, text
        assert "rank 1" in text
        assert seconds < 10
