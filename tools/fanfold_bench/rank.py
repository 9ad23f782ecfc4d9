# SPDX-License-Identifier: Apache-2.0
"""One rank process of the benchmark: ``python -m fanfold_bench.rank PLAN RANK``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fanfold_bench.cases import NONE, OURS, Case, Variant, parse_variant
from fanfold_bench.machine import available_bytes, die_with_parent, set_class


@dataclass(frozen=True)
class Plan:
    """What a group of rank processes is to do; written by launch.py."""

    cases: list[Case]
    schemes: list[str]
    sched: str
    rounds: int
    budget_s: float
    patience_s: float
    clock_fd: int
    window_fd: int
    library: str
    folder: str

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Plan:
        """Read what :meth:`save` wrote."""
        data = json.loads(path.read_text())
        data["cases"] = [Case(**case) for case in data["cases"]]
        return Plan(**data)


class Rank:
    """Everything a rank process holds while it works through its cases."""

    def __init__(self, plan: Plan, rank: int) -> None:
        import torch

        from fanfold_bench.clock import Clock
        from fanfold_bench.floor import Machine
        from fanfold_bench.measure import Limits

        torch.set_num_threads(1)
        self.plan, self.rank = plan, rank
        num_ranks = plan.cases[0].ranks
        self.clock = Clock(plan.clock_fd, rank, num_ranks)
        self.machine = Machine(Path(plan.library), plan.window_fd, self.clock)
        self.limits = Limits(plan.rounds, plan.budget_s, plan.patience_s)
        self._comm: Any = None
        self._group: Any = None

    def comm(self) -> Any:
        """The Fanfold communicator, opened at first use."""
        if self._comm is None:
            from fanfold_bench.exchange import open_communicator

            path = str(Path(self.plan.folder) / "ranks")
            self._comm = open_communicator(self.rank, self.clock.num_ranks, path)
        return self._comm

    def group(self) -> Any:
        """The gloo group, opened at first use."""
        if self._group is None:
            from fanfold_bench.baselines import Collectives

            store = str(Path(self.plan.folder) / "store")
            self._group = Collectives(self.rank, self.clock.num_ranks, store)
        return self._group

    def say(self, text: str) -> None:
        """Progress, from the leader only."""
        if self.clock.is_leader:
            print(f"  {text}", file=sys.stderr, flush=True)

    def run_case(self, case: Case) -> dict[str, Any]:
        """Measure one case; the result is complete on the leader."""
        from fanfold_bench.batch import make_batch
        from fanfold_bench.exchange import FanfoldExchange
        from fanfold_bench.floor import Floor
        from fanfold_bench.measure import check, measure_with_floor
        from fanfold_bench.results import case_result

        batch = make_batch(case, self.rank)
        floor = Floor(self.machine, batch)
        floor.check()
        exchange = None
        if case.strategy != NONE:
            exchange = FanfoldExchange(self.comm(), batch, Variant(case.strategy, case.layout))
            check(exchange, batch, self.clock, f"fanfold {case.strategy}")
        self.say(f"{case.name}: {case.strategy}, {case.layout}, and the floor")
        ours, floors = measure_with_floor(exchange, floor, self.machine, self.limits)
        if exchange is not None:
            check(exchange, batch, self.clock, f"fanfold {case.strategy}")
            exchange.close()
        baselines = {}
        for name in self.plan.schemes:
            self.say(f"{case.name}: {name}")
            baselines[name] = self.run_baseline(name, batch)
        if not self.clock.is_leader:
            return {}
        return case_result(case, batch.bytes_moved, ours, floors, baselines)

    def run_baseline(self, name: str, batch: Any) -> dict[str, Any]:
        """Measure one scheme, or say why not; complete on the leader."""
        from fanfold_bench.baselines import make_scheme
        from fanfold_bench.clock import COOL, HOT
        from fanfold_bench.exchange import FanfoldExchange
        from fanfold_bench.measure import check, measure
        from fanfold_bench.results import baseline_result

        case = batch.case
        if name.startswith(OURS):
            other = FanfoldExchange(self.comm(), batch, parse_variant(name, case.layout))
            check(other, batch, self.clock, name)
            before = self.flags()
            record = measure(other, self.clock, HOT, self.limits)
            flags = before + self.flags()
            wire, rows, memory = other.wire_bytes(), other.num_rows(), other.memory_bytes()
            other.close()
            if not self.clock.is_leader:
                return {}
            return {**baseline_result(record, wire, flags), "rows": rows, "memory_bytes": memory}
        if case.experts % case.ranks:
            return {"skipped": f"needs experts divisible by {case.ranks} ranks"}
        scheme = make_scheme(name, self.group(), batch)
        need = scheme.memory_bytes() * case.ranks
        fits = self.clock.agree(int(need < 0.7 * available_bytes()))
        if not fits:
            return {"skipped": f"needs about {need / 2**30:.1f} GiB of memory"}
        check(scheme, batch, self.clock, name)
        before = self.flags()
        record = measure(scheme, self.clock, COOL, self.limits)
        flags = before + self.flags()
        return baseline_result(record, scheme.wire_bytes(), flags) if self.clock.is_leader else {}

    def flags(self) -> list[float]:
        """Flag latency now, as a list that is empty on one core. Collective."""
        latency = self.machine.flag_latency()
        return [] if latency is None else [latency]

    def close(self) -> None:
        """Leave both groups."""
        if self._group is not None:
            self._group.close()
        if self._comm is not None:
            self._comm.close()


def work(plan: Plan, rank: int) -> None:
    """Run all cases; the leader appends one JSON line per case to the folder's ``results``."""
    from fanfold_bench.clock import Stopped

    state = Rank(plan, rank)
    try:
        rates = state.machine.copy_rates()
        for case in plan.cases:
            result = state.run_case(case)
            if state.clock.is_leader:
                result.update(sched=plan.sched, copy_gbs=rates)
                with (Path(plan.folder) / "results").open("a") as file:
                    file.write(json.dumps(result) + "\n")
        state.close()
    except Stopped:
        raise
    except BaseException:
        state.clock.abort()
        raise


def main(argv: list[str]) -> int:
    """Entry; failures leave one sentence in the folder for the launcher."""
    plan, rank = Plan.load(Path(argv[0])), int(argv[1])
    die_with_parent()
    set_class(plan.sched)  # before torch starts threads, so that they inherit it
    try:
        work(plan, rank)
    except Exception as error:
        text = f"rank {rank}: {type(error).__name__}: {error}"
        (Path(plan.folder) / f"error.{type(error).__name__}.{rank}").write_text(text)
        if os.environ.get("FANFOLD_BENCH_TRACEBACK"):
            traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
