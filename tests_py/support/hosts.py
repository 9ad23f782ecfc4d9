# SPDX-License-Identifier: Apache-2.0
"""Two hosts that are network namespaces of this machine, and what ranks on them do."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fanfold
from support.rounds import make, works
from support.transport_scenarios import NEED_MEMORY, raises

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from support import hosts; hosts.main(*sys.argv[2:])"
)
INTERFACE = "fanfold0"
NETWORK = "10.213.77"
DEADLINE_S = 3.0
NAMES = ("a", "b")  # of the hosts
REMOTE_SHELL = """#!/bin/bash
# What mpirun starts its daemon on the second host with.
shift
exec ip netns exec {namespace} unshare --uts bash -c "hostname {namespace}; $*"
"""


def reason_to_skip() -> str:
    """What is missing to make network namespaces; empty if nothing is."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed (tools/setup --for test)"
    name = f"fanfold-{os.getpid()}-try"
    tried = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        return f"network namespaces cannot be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Hosts:
    """Two namespaces with a cable between them."""

    def __init__(self) -> None:
        self.namespaces = [f"fanfold-{os.getpid()}-{name}" for name in NAMES]

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def _ip(self, *args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True, text=True)

    def open(self) -> None:
        for name in self.namespaces:
            self._ip("netns", "add", name)
        one, other = self.namespaces
        ends = ("netns", one, "type", "veth", "peer", "name", INTERFACE, "netns", other)
        self._ip("link", "add", "name", INTERFACE, *ends)
        for host, name in enumerate(self.namespaces):
            self._ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            self._ip("-n", name, "link", "set", INTERFACE, "up")
            self._ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Pull the cable."""
        self._ip("-n", self.namespaces[1], "link", "set", INTERFACE, "down")

    def close(self) -> None:
        """Kill what still runs there, and remove them."""
        for name in self.namespaces:
            listed = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def inside(self, host: int) -> list[str]:
        """What to put before a command that runs on a host."""
        return ["ip", "netns", "exec", self.namespaces[host]]


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts; nothing of them is left afterwards."""
    hosts = Hosts()
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()


class Ranks:
    """Ranks 0 and 1 on the first host, 2 and 3 on the second."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._log = (folder / "log").open("w+")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], host: int, **environment: str) -> None:
        self._started.append(
            subprocess.Popen(
                [*self._hosts.inside(host), *command],
                stdout=self._log,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **environment},
            )
        )

    def _python(self, kind: str, rank: int) -> list[str]:
        return [
            sys.executable,
            "-c",
            BOOT,
            json.dumps(sys.path),
            kind,
            str(self._folder),
            str(rank),
        ]

    def start_gloo(self) -> None:
        for rank in range(4):
            self.start(self._python("gloo", rank), rank // 2, GLOO_SOCKET_IFNAME=INTERFACE)

    def start_mpi(self) -> None:
        shell = self._folder / "remote_shell"
        shell.write_text(REMOTE_SHELL.format(namespace=self._hosts.namespaces[1]))
        shell.chmod(0o700)
        network = f"{NETWORK}.0/24"
        places = ",".join(f"{self._hosts.address(host)}:2" for host in range(2))
        options = {
            "mpi_yield_when_idle": "1",
            "plm_rsh_agent": str(shell),
            "btl": "tcp,vader,self",
            "btl_tcp_if_include": network,
            "oob_tcp_if_include": network,
        }
        self.start(
            [
                *("mpirun", "--allow-run-as-root", "--oversubscribe", "-H", places, "-n", "4"),
                *(word for name, value in options.items() for word in ("--mca", name, value)),
                *self._python("mpi", -1),
            ],
            0,
        )

    def wait_for(self, suffix: str, timeout_s: float) -> list[Any]:
        """Wait until every rank has written its file; returns what the files hold."""
        files = [self._folder / f"{rank}.{suffix}" for rank in range(4)]
        deadline = time.monotonic() + timeout_s
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, (
                f"{suffix}: not all within {timeout_s} s\n{self.text}"
            )
            time.sleep(0.02)
        return [json.loads(file.read_text()) for file in files]

    @property
    def text(self) -> str:
        """What the ranks have printed."""
        self._log.flush()
        return (self._folder / "log").read_text()

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        self._log.close()


# -- what a rank does ------------------------------------------------------------------------------


def _write(folder: Path, name: str, value: Any) -> None:
    part = folder / f".{name}"
    part.write_text(json.dumps(value))
    part.rename(folder / name)


def _rounds_until_the_cut(create: Callable[..., fanfold.Communicator], folder: Path) -> None:
    with raises(fanfold.Unsupported, "host"):
        create(transport="shared_memory")
    comm = create(transport="auto")
    told: dict[str, Any] = {
        "kind": comm.kind,
        "hosts": comm.hosts,
        "shares_memory": comm.shares_memory,
        "refused": [],
    }
    for strategy in NEED_MEMORY:
        try:
            make(comm, strategy=strategy)
        except fanfold.Unsupported as error:
            told["refused"].append(str(error))
    exchanges = [make(comm, strategy=each) for each in ("auto", "broadcast", "batched")]
    told["auto"] = exchanges[0].choice()
    for _ in range(5):
        for a2a in exchanges:
            works(a2a, comm.rank, num_rounds=1)
    a2a = make(comm, strategy="gather_scatter", timeout_s=DEADLINE_S)
    works(a2a, comm.rank, num_rounds=1)
    _write(folder, f"{comm.rank}.works", told)
    last = time.monotonic()
    try:
        while True:
            works(a2a, comm.rank, num_rounds=1)
            last = time.monotonic()
    except (fanfold.PeerTimeout, fanfold.PeerLost) as error:
        end = [type(error).__name__, error.rank, time.monotonic() - last, str(error)]
    _write(folder, f"{comm.rank}.cut", end)
    time.sleep(20)  # until the test ends all: nobody is to learn of the cut from who leaves


def main(kind: str, folder: str, rank: str) -> None:
    """Run one rank."""
    place = Path(folder)
    if kind == "mpi":
        _rounds_until_the_cut(
            lambda **options: fanfold.Communicator.from_mpi(timeout_s=20.0, **options), place
        )
        return
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{place / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=4)
    _rounds_until_the_cut(
        lambda **options: fanfold.Communicator.from_torch(timeout_s=20.0, **options), place
    )


def is_installed(kind: str) -> bool:
    """Whether what carries the messages is there."""
    if kind == "mpi":
        return shutil.which("mpirun") is not None and bool(importlib.util.find_spec("mpi4py"))
    return True
