# SPDX-License-Identifier: Apache-2.0
"""The bench: its routing, statistics and clock, and one quick run of everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

from fanfold_bench import cli, machine, results, routing, stats  # noqa: E402
from fanfold_bench.baselines.grouping import group_picks  # noqa: E402
from fanfold_bench.cases import (  # noqa: E402
    BEST_OF,
    EVERY_STRATEGY,
    PRESETS,
    Case,
    Variant,
    expand_against,
    parse_variant,
    preset_cases,
)
from fanfold_bench.clock import HOT, MEET, Clock, page_bytes  # noqa: E402
from fanfold_bench.load import busy_ns  # noqa: E402


class TestRouting:
    @pytest.mark.parametrize("kind", ["uniform", "skewed"])
    def test_every_token_takes_distinct_experts_in_range(self, kind: str) -> None:
        ids = routing.route(Case(ranks=3, tokens=50, top_k=5, experts=11, routing=kind))
        assert ids.shape == (3, 50, 5)
        assert ids.dtype == np.int32
        assert ids.min() >= 0
        assert ids.max() < 11
        assert all(len(set(row)) == 5 for row in ids.reshape(-1, 5).tolist())

    def test_all_experts_of_a_token_may_be_taken(self) -> None:
        ids = routing.route(Case(tokens=4, top_k=6, experts=6))
        assert (np.sort(ids, axis=2) == np.arange(6)).all()

    def test_skewed_routing_prefers_the_same_experts_on_all_ranks(self) -> None:
        case = Case(ranks=2, tokens=2000, top_k=2, experts=32, routing="skewed")
        loads = [np.bincount(own.reshape(-1), minlength=32) for own in routing.route(case)]
        assert loads[0].argmax() == loads[1].argmax()
        assert loads[0].max() > 3 * loads[0].mean()
        even = np.bincount(routing.route(Case(tokens=2000, top_k=2, experts=32)).reshape(-1))
        assert even.max() < 1.3 * even.mean()

    def test_equal_seeds_give_equal_routing(self) -> None:
        assert (routing.route(Case(seed=3)) == routing.route(Case(seed=3))).all()
        assert (routing.route(Case(seed=3)) != routing.route(Case(seed=4))).any()

    def test_a_recording_is_read_and_repeated_when_short(self, tmp_path: Path) -> None:
        path = tmp_path / "routing.npz"
        layer = np.arange(14, dtype=np.int16).reshape(7, 2) % 6
        np.savez(path, topk_ids=np.stack([layer + 1, layer, layer + 1]), num_experts=8)
        assert routing.load_recording(path).top_k == 2
        case = Case(ranks=2, tokens=5, top_k=1, experts=8, routing=str(path))
        ids = routing.route(case)
        assert ids.shape == (2, 5, 1)
        assert (ids.reshape(-1) == layer[np.arange(10) % 7, 0]).all()

    @pytest.mark.parametrize(
        ("arrays", "text"),
        [
            ({"x": np.zeros((2, 3), np.int32)}, r"must hold an integer array"),
            ({"x": np.full((1, 2, 2), 9, np.int32), "num_experts": np.int64(4)}, r"holds id 9"),
        ],
    )
    def test_a_file_without_routing_is_refused(
        self, tmp_path: Path, arrays: dict[str, Any], text: str
    ) -> None:
        np.savez(tmp_path / "r.npz", **arrays)
        with pytest.raises(ValueError, match=text):
            routing.load_recording(tmp_path / "r.npz")

    def test_a_recording_that_does_not_fit_the_case_is_refused(self) -> None:
        recording = routing.Recording(np.zeros((1, 4, 2), np.int32), num_experts=16)
        with pytest.raises(ValueError, match="top-k 2"):
            routing.recorded(recording, Case(top_k=3, experts=16))
        with pytest.raises(ValueError, match="16 experts"):
            routing.recorded(recording, Case(top_k=2, experts=8))

    def test_rows_go_once_to_each_rank_that_hosts_an_expert(self) -> None:
        case = Case(ranks=3, tokens=40, top_k=4, experts=10, routing="skewed")
        assert routing.first_expert(case).tolist() == [0, 4, 7, 10]
        ids = routing.route(case)
        ids[0, 0] = -1
        owner = [0] * 4 + [1] * 3 + [2] * 3
        want = np.zeros((3, 3), dtype=int)
        for source in range(3):
            for token in ids[source].tolist():
                for rank in {owner[e] for e in token if e >= 0}:
                    want[source, rank] += 1
        assert (routing.row_counts(ids, case) == want).all()

    def test_picks_are_grouped_by_rank_and_token(self) -> None:
        ids = torch.tensor([[3, 0, 2], [1, -1, 0]], dtype=torch.int32)
        picks = group_picks(ids, experts_per_rank=2)
        assert picks.row_rank.tolist() == [0, 0, 1]
        assert picks.row_token.tolist() == [0, 1, 0]
        by_row: dict[int, set[int]] = {}
        for row, expert in zip(picks.row.tolist(), picks.expert.tolist(), strict=True):
            by_row.setdefault(row, set()).add(expert)
        assert by_row == {0: {0}, 1: {0, 1}, 2: {2, 3}}
        assert sorted(picks.origin.tolist()) == [0, 1, 2, 3, 5]
        assert max(picks.column.tolist()) == 1


class TestStatistics:
    def test_quantiles_are_in_microseconds(self) -> None:
        got = stats.quantiles(np.arange(101) * 1000)
        assert (got.p10, got.p50, got.p90) == pytest.approx((10, 50, 90))
        with pytest.raises(ValueError, match="no samples"):
            stats.quantiles([])

    @staticmethod
    def block(value: int, foreign: float, rounds: int = 10) -> stats.Block:
        times = np.full(rounds, value, dtype=np.int64)
        return stats.Block(times, times * 2, foreign, seconds=0.5)

    def test_rounds_under_foreign_load_do_not_count(self) -> None:
        record = stats.Record(min_rounds=5)
        record.blocks += [self.block(1000, 0.1), self.block(9000, 1.5)]
        timing = record.timing()
        assert not timing.noisy
        assert timing.dispatch.p90 == pytest.approx(1)
        assert timing.round.p50 == pytest.approx(3)
        assert (timing.rounds, timing.rounds_all) == (10, 20)

    def test_without_quiet_rounds_all_count_and_the_record_is_noisy(self) -> None:
        record = stats.Record(min_rounds=5)
        record.blocks += [self.block(1000, 0.1, rounds=2), self.block(9000, 1.5)]
        timing = record.timing()
        assert timing.noisy
        assert timing.rounds == 12
        assert timing.foreign == pytest.approx(0.8)

    def test_measuring_ends_with_enough_quiet_rounds_or_with_patience(self) -> None:
        record = stats.Record(min_rounds=5)
        record.blocks.append(self.block(1000, 1.0))
        assert not record.enough(rounds=10, seconds=0.4, patience=2.0)
        assert record.enough(rounds=10, seconds=0.4, patience=0.5)
        record.blocks.append(self.block(1000, 0.0))
        assert record.enough(rounds=10, seconds=9.0, patience=9.0)
        assert record.enough(rounds=99, seconds=0.4, patience=9.0)

    def test_the_regime_follows_the_flags(self) -> None:
        assert stats.regime([33.0, 40.0]) == "NEAR"
        assert stats.regime([170.0]) == "FAR"
        assert stats.regime([33.0, 170.0]) == "MIXED"
        assert stats.regime([]) == "unknown"

    def test_busy_time_counts_user_nice_system_and_stolen(self) -> None:
        tick = 10**9 // os.sysconf("SC_CLK_TCK")
        assert busy_ns("cpu  1 2 3 400 500 600 700 8 9 10\ncpu0 5") == (1 + 2 + 3 + 8) * tick
        assert busy_ns("cpu  1 2 3 400") == 6 * tick
        assert busy_ns("nothing here") == 0


class TestClock:
    def test_ranks_agree_on_starts_and_results(self) -> None:
        fd = os.memfd_create("clock")
        try:
            os.ftruncate(fd, page_bytes(3))
            clocks = [Clock(fd, rank, 3) for rank in range(3)]
        finally:
            os.close(fd)
        seen: dict[int, tuple[list[int], int]] = {}

        def work(clock: Clock) -> None:
            starts = [clock.line_up(pace) for pace in (HOT, MEET, HOT, HOT, MEET)]
            clock.begin_block()
            clock.store(0, 10 + clock.rank, 30 - clock.rank)
            seen[clock.rank] = (starts, clock.agree(7 if clock.is_leader else 0))

        threads = [threading.Thread(target=work, args=(clock,)) for clock in clocks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen[0] == seen[1] == seen[2]
        starts, agreed = seen[0]
        assert agreed == 7
        assert starts == sorted(set(starts))
        dispatch, combine = clocks[0].slowest(1)
        assert (dispatch.tolist(), combine.tolist()) == ([12], [30])


class TestCases:
    def test_presets_fill_in_shapes(self) -> None:
        for name in PRESETS:
            cases = preset_cases(name, Case(strategy="broadcast", layout="gathered"))
            assert cases
            assert all(case.problem() is None for case in cases)
            assert {case.strategy for case in cases} == {"broadcast"}

    def test_best_stands_for_all_schemes_but_batched(self) -> None:
        wanted, run = expand_against(["gloo_batched,gloo_best"])
        assert wanted == ["gloo_batched", "gloo_best"]
        assert run == ["gloo_batched", *BEST_OF]
        assert expand_against(["none"]) == ([], [])
        with pytest.raises(ValueError, match="got nccl"):
            expand_against(["nccl"])

    @pytest.mark.parametrize(
        ("change", "text"),
        [({"top_k": 65}, "64 experts"), ({"ranks": 0}, "at least 1"), ({"dtype": "int8"}, "dtype")],
    )
    def test_a_case_that_cannot_run_says_why(self, change: dict[str, Any], text: str) -> None:
        problem = Case(**change).problem()
        assert problem is not None
        assert text in problem


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--against", "mpi"], "--against knows"),
            (["--top-k", "70"], "there are only 64 experts"),
            (["--routing", "missing.npz"], "cannot read a routing recording"),
            (["--from", "missing.json"], "cannot read results"),
        ],
    )
    def test_wrong_arguments_end_in_one_sentence(
        self, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(arguments) == cli.USAGE_ERROR
        assert text in capsys.readouterr().err

    def test_a_refused_scheduling_class_is_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "may_use", lambda name: name == "other")
        with pytest.raises(PermissionError, match="fifo is not permitted"):
            machine.choose_class("fifo", 2)
        assert machine.choose_class("other", 2) == ("other", None)
        chosen, note = machine.choose_class("auto", 2)
        assert chosen == "other"
        assert note is not None
        assert "not permitted" in note

    def test_auto_takes_fifo_only_while_every_rank_has_a_core(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "may_use", lambda name: True)
        assert machine.choose_class("auto", machine.cores()) == ("fifo", None)
        assert machine.choose_class("auto", machine.cores() + 1) == ("batch", None)


@pytest.mark.multiproc
def test_smoke_measures_fanfold_the_floor_and_gloo(tmp_path: Path) -> None:
    out, picture = tmp_path / "smoke.json", tmp_path / "smoke.png"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fanfold_bench", "--smoke", "--json", str(out)),
            *("--against", "gloo_batched", "gloo_best", "strategies", "--plot", str(picture)),
        ],
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    doc = json.loads(out.read_text())
    assert results.problems(doc) == []
    assert doc["strategy"] == "one_sided"
    assert doc["round_us"]["p50"] > 0
    assert doc["floor"]["by_store"].keys() == {"ordinary", "non_temporal", "interleaved"}
    assert {"gloo_batched", "gloo_best", *BEST_OF, *EVERY_STRATEGY} == doc["baselines"].keys()
    ours = [doc["baselines"][name] for name in EVERY_STRATEGY]
    assert all(entry["rows"] > 0 and entry["memory_bytes"] > 0 for entry in ours)
    assert doc["ratio"] > 0
    assert "Compared with" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_smoke_measures_what_recording_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "capture.json"
    arguments = ["--preset", "capture", "--smoke", "--json", str(out)]
    assert cli.main([*arguments, "--check", "--slack", "1000"]) == 0
    assert cli.main([*arguments, "--check", "--slack", "0"]) == 1
    entries = json.loads(out.read_text())["captures"]
    assert [entry["case"].removeprefix("64 x 8 ") for entry in entries] == [
        "int32 into int8",
        "int64 into int8",
        "int16 into int8",
        "int32 into int32",
        "int16 into int16",
    ]
    assert [entry["bytes_read"] for entry in entries] == [2048, 4096, 1024, 2048, 1024]
    assert all(entry["ratio"] > 0 and entry["copy_us"]["p50"] > 0 for entry in entries)
    assert "FAIL" in capsys.readouterr().out
    assert cli.main([*arguments, "--plot", str(tmp_path / "p.png")]) == cli.USAGE_ERROR


class TestVariants:
    def test_a_name_gives_strategy_layout_and_wire(self) -> None:
        assert parse_variant("fanfold_two_sided", "flat") == Variant("two_sided", "flat")
        name = "fanfold_low_latency.expert_major.fp8"
        assert parse_variant(name, "flat") == Variant("low_latency", "expert_major", fp8=True)
        assert all(parse_variant(each, "flat").name == each for each in EVERY_STRATEGY)

    @pytest.mark.parametrize(
        "name", ["fanfold_deepep", "fanfold_batched.sideways", "fanfold_batched.flat.fp4"]
    )
    def test_an_unknown_name_is_refused_with_those_known(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"one_sided, .* rank_major, .*got fanfold_"):
            expand_against([name])

    def test_strategies_stands_for_each_of_them(self) -> None:
        names, schemes = expand_against(["gloo_batched", "strategies"])
        assert names == schemes == ["gloo_batched", *EVERY_STRATEGY]
