# SPDX-License-Identifier: Apache-2.0
"""Ranks on two hosts, which are network namespaces: what works, and a cable that is pulled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import DEADLINE_S, Hosts, Ranks, is_installed, reason_to_skip, two_hosts
from support.transport_scenarios import NEED_MEMORY

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """Skips where there can be none; and nothing of them is left."""
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    before = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout
    yield
    assert subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout == before


@pytest.fixture
def pair(hosts: None) -> Iterator[Hosts]:
    with two_hosts() as pair:
        yield pair


@pytest.mark.parametrize("kind", ["gloo", "mpi"])
def test_ranks_on_two_hosts_work_until_one_is_cut_off(
    pair: Hosts, tmp_path: Path, kind: str
) -> None:
    if not is_installed(kind):
        pytest.skip("mpirun or mpi4py is not installed (tools/setup --for test)")
    ranks = Ranks(pair, tmp_path)
    try:
        (ranks.start_mpi if kind == "mpi" else ranks.start_gloo)()
        for told in ranks.wait_for("works", 80):
            assert told["kind"] == kind
            assert told["hosts"] == [0, 0, 1, 1]
            assert told["shares_memory"] is False
            assert len(told["refused"]) == len(NEED_MEMORY)
            assert all("host" in text for text in told["refused"]), told
            assert not told["auto"].startswith(NEED_MEMORY), told["auto"]
        pair.cut()
        ends = ranks.wait_for("cut", DEADLINE_S + 20)
        named = [end[1] for end in ends]
        for rank, (_, late, seconds, text) in enumerate(ends):
            # A rank may be a step ahead of its neighbour, which waits for the other host: it then
            # names the neighbour.
            culprit = late if late // 2 != rank // 2 else named[late]
            assert culprit // 2 != rank // 2, (rank, text)
            assert f"rank {late}" in text
            assert seconds < DEADLINE_S + 5, text
    finally:
        ranks.close()
