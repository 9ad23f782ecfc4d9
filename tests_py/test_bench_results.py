# SPDX-License-Identifier: Apache-2.0
"""The bench's verdicts, its JSON and what it writes from them."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from fanfold_bench import acceptance, cli, machine, plot, report, results, strategy_goals  # noqa: E402
from fanfold_bench.cases import BEST_OF, PRESETS, Case, preset_cases  # noqa: E402


def spread(p50: float) -> dict[str, float]:
    return {"p10": p50 * 0.9, "p50": p50, "p90": p50 * 1.2}


def phases(dispatch: float, combine: float) -> dict[str, Any]:
    both = (spread(dispatch), spread(combine), spread(dispatch + combine))
    return dict(zip(results.PHASES, both, strict=True))


def a_baseline(microseconds: float, noisy: bool = False) -> dict[str, Any]:
    entry = phases(microseconds * 0.6, microseconds * 0.4)
    more = {"rounds": 50, "foreign_load": 0.1, "noisy": noisy, "regime": "FAR"}
    return {**entry, **more, "wire_bytes": [1000, 800]}


def a_result(case: Case, round_us: float = 18.0, regime: str = "FAR") -> dict[str, Any]:
    """What a run leaves for one case in which Fanfold takes 1.25 times its floor."""
    ours = phases(round_us * 0.4, round_us * 0.6)
    floor = phases(round_us * 0.32, round_us * 0.48)
    shares = {"dispatch": 0.8, "combine": 0.8, "round": 0.8}
    result = {
        "case": case.name,
        **case.to_json(),
        **ours,
        "rounds": 100,
        "bytes": 1000,
        "bytes_by_phase": {"dispatch": 600, "combine": 400},
        "floor_us": floor["round_us"]["p50"],
        "floor_fraction": 0.8,
        "floor": {
            **floor,
            "store": "interleaved",
            "fractions": shares,
            "contiguous": {"store": "non_temporal", "fractions": dict(shares)},
        },
        "flag_ns": {"before": 170.0, "after": 180.0, "all": [170.0, 180.0]},
        "regime": regime,
        "foreign_load": 0.05,
        "noisy": False,
        "sched": "fifo",
        "baselines": {
            "gloo_batched": a_baseline(round_us * 190),
            **{name: a_baseline(round_us * (50 + i)) for i, name in enumerate(BEST_OF)},
        },
    }
    return results.finish(result, ["gloo_batched", "gloo_best"])


def a_document(*cases: dict[str, Any]) -> dict[str, Any]:
    facts = machine.describe()
    run = {"machine": facts, "commit": "abc", "command": "c", "date": "d", "notes": ["n"]}
    return results.document(run, cases)


class TestVerdicts:
    def verdicts(self, result: dict[str, Any], slack: float = 1.0) -> dict[str, str]:
        return {line.what: line.verdict for line in acceptance.judge(result, slack)}

    def test_the_table_preset_holds_exactly_the_cases_with_goals(self) -> None:
        for case in preset_cases("table", Case()):
            assert acceptance.find_goal(a_result(case)) is not None
        assert len(PRESETS["table"]) == len(acceptance.GOALS)

    def test_a_good_run_passes_every_goal(self) -> None:
        lines = acceptance.judge(a_result(Case(tokens=32)))
        assert [line.verdict for line in lines] == ["pass"] * 5
        assert acceptance.exit_status(lines) == 0

    def test_a_slow_round_fails_unless_there_is_slack(self) -> None:
        result = a_result(Case(tokens=32), round_us=45)
        assert self.verdicts(result)["round p50"] == "FAIL"
        assert self.verdicts(result, slack=2)["round p50"] == "pass"
        assert acceptance.exit_status(acceptance.judge(result)) == 1

    def test_cores_that_share_a_cache_must_combine_nearer_to_the_floor(self) -> None:
        far, near = (a_result(Case(tokens=32), regime=regime) for regime in ("FAR", "NEAR"))
        for result in (far, near):
            result["floor"]["contiguous"]["fractions"]["combine"] = 0.6
        assert self.verdicts(far)["combine, of floor (FAR)"] == "pass"
        assert self.verdicts(near)["combine, of floor"] == "FAIL"

    def test_a_noisy_run_gets_no_verdict(self) -> None:
        result = a_result(Case(tokens=32))
        result["noisy"] = True
        assert set(self.verdicts(result).values()) == {"noisy"}
        assert acceptance.exit_status(acceptance.judge(result)) == 3

    def test_a_noisy_baseline_spoils_only_its_own_ratio(self) -> None:
        result = a_result(Case(tokens=32))
        result["baselines"]["gloo_batched"]["noisy"] = True
        verdicts = self.verdicts(result)
        assert verdicts["against gloo_batched"] == "noisy"
        assert verdicts["against gloo_best"] == "pass"

    def test_a_wait_near_a_scheduler_tick_fails(self) -> None:
        result = a_result(Case(ranks=4, tokens=32), round_us=140)
        assert self.verdicts(result)["combine p90"] == "pass"
        result["combine_us"]["p90"] = 4100.0
        assert self.verdicts(result)["combine p90"] == "FAIL"

    def test_other_strategies_have_no_goals(self) -> None:
        assert acceptance.judge(a_result(Case(tokens=32, strategy="broadcast"))) == []

    def test_a_skipped_baseline_is_missing(self) -> None:
        result = a_result(Case(tokens=32))
        result["baselines"]["gloo_batched"] = {"skipped": "needs memory", "ratio": None}
        assert self.verdicts(result)["against gloo_batched"] == "missing"


class TestDocument:
    def test_ratios_are_of_medians_and_the_first_name_counts(self) -> None:
        result = a_result(Case(tokens=32), round_us=20)
        assert (result["against"], result["ratio"]) == ("gloo_batched", pytest.approx(190))
        best = result["baselines"]["gloo_best"]
        assert (best["of"], best["ratio"]) == (BEST_OF[0], pytest.approx(50))

    def test_one_case_also_lies_at_the_top(self) -> None:
        doc = a_document(a_result(Case()))
        assert results.problems(doc) == []
        for key in ("dispatch_us", "combine_us", "round_us"):
            assert set(doc[key]) == {"p10", "p50", "p90"}
        for key in ("bytes", "floor_us", "floor_fraction", "against", "ratio"):
            assert key in doc
        two = a_document(a_result(Case()), a_result(Case(tokens=1)))
        assert results.problems(two) == []
        assert "round_us" not in two

    @pytest.mark.parametrize(
        ("path", "value", "text"),
        [
            (("cases", 0, "round_us"), None, "round_us must have"),
            (("cases", 0, "round_us", "p90"), 0.1, "not in order"),
            (("cases", 0, "floor_us"), None, "floor_us must be a number"),
            (("cases",), [], "non-empty"),
            (("schema",), 99, "schema"),
        ],
    )
    def test_a_broken_document_is_reported(
        self, path: tuple[Any, ...], value: Any, text: str
    ) -> None:
        doc = copy.deepcopy(a_document(a_result(Case())))
        place: Any = doc
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert any(text in problem for problem in results.problems(doc))

    def test_markdown_names_machine_command_and_goals(self, tmp_path: Path) -> None:
        doc = a_document(a_result(Case()))
        (tmp_path / "in.json").write_text(json.dumps(doc))
        out = tmp_path / "out.md"
        args = ["--from", str(tmp_path / "in.json"), "--check", "--markdown", str(out)]
        assert cli.main(args) == 0
        text = out.read_text()
        for part in ("SPDX", doc["machine"]["cpu"], "`abc`", "`c`", "## Goals", "190.0x", "FAR"):
            assert part in text
        assert report.microseconds(12345.6) == "12346"


def an_entry(microseconds: float, rows: int = 100, sent: int = 1000) -> dict[str, Any]:
    return {**a_baseline(microseconds), "rows": rows, "wire_bytes": [sent, sent], "memory_bytes": 1}


class TestStrategyGoals:
    def judged(self, tokens: int, hidden: int, **entries: dict[str, Any]) -> dict[str, str]:
        result = a_result(Case(tokens=tokens, hidden=hidden))
        result["baselines"] = {name.replace("__", "."): entry for name, entry in entries.items()}
        return {line.what: line.verdict for line in strategy_goals.judge([result])}

    def test_a_ratio_of_times_is_judged(self) -> None:
        for took, verdict in ((9.0, "pass"), (11.0, "FAIL")):
            lines = self.judged(
                32, 2048, gloo_batched=an_entry(400), fanfold_one_sided__expert_major=an_entry(took)
            )
            assert lines == {"one_sided.expert_major times as fast as gloo_batched": verdict}

    def test_rows_per_second_count_the_rows_of_the_layout(self) -> None:
        lines = self.judged(
            4096,
            2048,
            fanfold_one_sided__rank_major=an_entry(100, rows=100),
            fanfold_high_throughput__flat_by_expert=an_entry(300, rows=200),
        )
        assert list(lines.values()) == ["pass"]  # 2 / 3 of the rows per second

    def test_bytes_may_not_exceed_their_limit(self) -> None:
        for sent, verdict in ((550, "pass"), (560, "FAIL")):
            lines = self.judged(
                128,
                7168,
                fanfold_one_sided__expert_major=an_entry(100),
                fanfold_low_latency__expert_major__fp8=an_entry(90, sent=sent),
            )
            assert list(lines.values()) == [verdict, "pass"]

    def test_what_was_not_measured_is_missing(self) -> None:
        lines = self.judged(1, 2048, fanfold_broadcast__gathered=an_entry(10))
        assert list(lines.values()) == ["missing"]


def test_the_picture_has_a_line_per_strategy(tmp_path: Path) -> None:
    cases = []
    for tokens in (1, 8):
        result = a_result(Case(tokens=tokens))
        result["baselines"] = {"fanfold_batched.expert_major": an_entry(10.0 * tokens)}
        cases.append(result)
    series = plot.series_by_shape(cases)
    assert series == {(2, 2048, 8): {"fanfold_batched.expert_major": [(1, 10.0), (8, 80.0)]}}
    plot.draw({"cases": cases}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--against strategies"):
        plot.draw({"cases": [a_result(Case())]}, tmp_path / "picture.png")
