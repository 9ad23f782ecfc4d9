# SPDX-License-Identifier: Apache-2.0
"""Conformance of dispatch: which rows come, in which order, with which counts and ids."""

from __future__ import annotations

import numpy

from fanfold.testing.floats import Array
from fanfold.testing.harness import Harness, expect, expect_equal
from fanfold.testing.oracle import is_per_expert
from fanfold.testing.suite import check
from fanfold.testing.trials import Case, PayloadKind, Setup, Trial, random_ids

ID_DTYPES = ("int16", "int32", "int64")


def has_padded_ids(case: Case) -> bool:
    """Say whether the layout can have rows without a token, and ids in them."""
    return case.layout in ("rank_major", "flat")


def no_ids(rng: numpy.random.Generator, num_tokens: int, setup: Setup) -> Array:
    """Give every token no expert, by different negative ids."""
    del rng
    ids = -1 - numpy.arange(num_tokens * setup.top_k) % 3
    return ids.reshape(num_tokens, setup.top_k)


def one_expert(rng: numpy.random.Generator, num_tokens: int, setup: Setup) -> Array:
    """Send every token to expert 5, in one place of its list."""
    ids = numpy.full((num_tokens, setup.top_k), -1)
    ids[numpy.arange(num_tokens), rng.integers(0, setup.top_k, num_tokens)] = 5
    return ids


def few_experts(rng: numpy.random.Generator, num_tokens: int, setup: Setup) -> Array:
    """Draw from two experts, so that most tokens name one twice."""
    return rng.integers(0, min(2, setup.num_experts), (num_tokens, setup.top_k))


def valid_ids(rng: numpy.random.Generator, num_tokens: int, setup: Setup) -> Array:
    """Draw valid ids only."""
    return rng.integers(0, setup.num_experts, (num_tokens, setup.top_k))


@check()
def every_token_reaches_each_rank_of_its_experts_once(harness: Harness) -> None:
    """Counts arrivals by an id that each row carries, without the oracle's rows."""
    setup = Setup(extra_bytes=0, hidden=1, dtype="float32")
    trial = harness.trial(setup, kinds=[PayloadKind("int32")], num_tokens=[6, 3, 0, 5])
    for source, payloads in enumerate(trial.oracle.payloads):
        payloads[0][:] = source * 1000 + numpy.arange(len(payloads[0]))
    with harness.create(setup) as a2a:
        recv = a2a.dispatch(**harness.arguments(trial))
        rows = harness.tensors.to_array(recv.payloads[0])
        is_token = harness.tensors.to_array(recv.source_rank) >= 0
        mine = rows[is_token].astype(numpy.int32)
        arrived = [
            numpy.frombuffer(each, numpy.int32)
            for each in harness.comm.all_gather_bytes(mine.tobytes())
        ]
        recv.release()
    for source, num_tokens in enumerate(trial.oracle.num_tokens):
        for token in range(num_tokens):
            for host in range(harness.num_ranks):
                wanted = _arrivals(harness.case, trial, source, token, host)
                got = int((arrived[host] == source * 1000 + token).sum())
                expect(got == wanted, f"token {source}:{token}: {got} rows on rank {host}")


def _arrivals(case: Case, trial: Trial, source: int, token: int, host: int) -> int:
    """Return how many rows of a token `host` must get."""
    if case.layout == "gathered":
        return 1
    rank_of = trial.oracle.rank_of
    ids = {i for i in trial.oracle.topk_ids[source][token].tolist() if i >= 0}
    local = [expert for expert in ids if rank_of[expert] == host]
    return len(local) if is_per_expert(case.layout) else int(bool(local))


@check(core=True)
def rows_keep_the_order_of_source_rank_and_token(harness: Harness) -> None:
    """Looks at the origins that came, whatever the oracle says."""
    setup = Setup(max_tokens=9, expert_alignment=2)
    layout = harness.case.layout
    with harness.create(setup) as a2a:
        for seed in range(5):
            recv = harness.dispatch(a2a, harness.trial(setup, seed))
            ranks = harness.tensors.to_array(recv.source_rank).astype(numpy.int64)
            tokens = harness.tensors.to_array(recv.source_token)
            order = ranks * 1000 + tokens
            groups = order if layout == "expert_major" else [order.reshape(-1)]
            if layout == "flat_by_expert":
                groups = numpy.split(order, harness.tensors.to_array(recv.offsets)[1:-1])
            for group in groups:
                sequence = group[group >= 0]
                expect(bool((numpy.diff(sequence) > 0).all()), f"order: {sequence}")
            recv.release()


@check(core=True)
def counts_on_the_host_equal_those_of_the_tensors(harness: Harness) -> None:
    """`host_counts()` gives the same numbers as the tensors."""
    setup = Setup()
    with harness.create(setup) as a2a:
        recv = harness.dispatch(a2a, harness.trial(setup))
        counts = recv.host_counts()
        array = harness.tensors.to_array
        expect_equal("rank_counts", numpy.int32(counts.rank_counts), array(recv.rank_counts))
        expect_equal("expert_counts", numpy.int32(counts.expert_counts), array(recv.expert_counts))
        expect_equal("num_rows", numpy.int32([counts.num_rows]), array(recv.num_rows))
        recv.release()


@check(applies=has_padded_ids, core=True)
def ids_past_the_counts_are_invalid(harness: Harness) -> None:
    """Stale ids of an earlier, fuller round never show."""
    setup = Setup(max_recv_rows=20)
    with harness.create(setup) as a2a:
        full = harness.trial(setup, 1, num_tokens=[6] * harness.num_ranks, ids=valid_ids)
        for invalid in (-1, setup.num_experts, 0, -77):
            harness.dispatch(a2a, full).release()
            sparse = harness.trial(setup, 2, num_tokens=[1, 0, 2, 0], invalid_expert_id=invalid)
            harness.dispatch(a2a, sparse).release()


@check(core=True)
def a_round_of_zero_tokens_is_ordinary(harness: Harness) -> None:
    """No rank has a token."""
    setup = Setup()
    with harness.create(setup) as a2a:
        for limit in (1, setup.max_tokens):
            trial = harness.trial(setup, num_tokens=[0] * harness.num_ranks, round_max_tokens=limit)
            harness.exchange(a2a, trial)


@check(core=True)
def ranks_without_tokens_take_part(harness: Harness) -> None:
    """Every rank is the empty one in turn, and the only full one."""
    setup = Setup()
    with harness.create(setup) as a2a:
        for rank in range(harness.num_ranks):
            empty = [0 if r == rank else 4 for r in range(harness.num_ranks)]
            harness.exchange(a2a, harness.trial(setup, rank, num_tokens=empty))
            only = [4 - each for each in empty]
            harness.exchange(a2a, harness.trial(setup, 10 + rank, num_tokens=only))


@check()
def one_token_travels_alone(harness: Harness) -> None:
    """A single token, with room for one."""
    setup = Setup(max_tokens=1)
    with harness.create(setup) as a2a:
        harness.exchange(a2a, harness.trial(setup, num_tokens=[0, 0, 1, 0], ids=valid_ids))


@check()
def all_tokens_may_go_to_one_expert(harness: Harness) -> None:
    """The capacity of one expert is R * M: nothing is dropped."""
    setup = Setup(max_tokens=8)
    with harness.create(setup) as a2a:
        trial = harness.trial(setup, num_tokens=[8] * harness.num_ranks, ids=one_expert)
        harness.exchange(a2a, trial)
        total = 8 * harness.num_ranks
        wanted = total if trial.oracle.rank_of[5] == harness.rank else 0
        expect(int(trial.oracle.received(harness.rank).expert_counts.sum()) == wanted, "oracle")


@check()
def tokens_without_an_expert_become_zeros(harness: Harness) -> None:
    """All ids are negative: counts are zero, and so is the result."""
    setup = Setup()
    with harness.create(setup) as a2a:
        trial = harness.trial(setup, num_tokens=[5, 6, 1, 0], ids=no_ids)
        recv = harness.dispatch(a2a, trial)
        expect(not harness.tensors.to_array(recv.expert_counts).any(), "expert_counts: not zero")
        out = recv.combine(
            harness.experts(a2a, recv.handle, trial), out=harness.out(trial, "float32")
        )
        expect(not harness.tensors.to_array(out).any(), "out: not zero")


@check(core=True)
def duplicate_experts_merge(harness: Harness) -> None:
    """A token that names an expert twice sends one row and has the sum of the weights."""
    for setup in (Setup(top_k=5), Setup(top_k=4, num_experts=4), Setup(top_k=2, num_experts=1)):
        with harness.create(setup) as a2a:
            harness.exchange(a2a, harness.trial(setup, ids=few_experts))


@check(core=True)
def experts_may_be_spread_unevenly(harness: Harness) -> None:
    """E mod R is not zero; every kind of placement."""
    for placement in ("linear", "round_robin", [3, 0, 0, 3, 0, 1, 0]):
        setup = Setup(num_experts=7, placement=placement)
        with harness.create(setup) as a2a:
            trial = harness.trial(setup, num_tokens=[6, 1, 4, 2])
            wanted = trial.oracle.local_experts(harness.rank)
            expect(list(a2a.local_experts) == wanted, f"local_experts: {a2a.local_experts}")
            harness.exchange(a2a, trial)


@check()
def a_rank_may_have_no_expert(harness: Harness) -> None:
    """Fewer experts than ranks."""
    for placement in ("linear", [2, 2]):
        setup = Setup(num_experts=2, placement=placement)
        with harness.create(setup) as a2a:
            harness.exchange(a2a, harness.trial(setup, num_tokens=[3, 0, 6, 2]))


@check(num_ranks=1)
def a_rank_alone_is_ordinary(harness: Harness) -> None:
    """R = 1 has the same semantics."""
    setup = Setup()
    with harness.create(setup) as a2a:
        for seed in range(4):
            harness.exchange(a2a, harness.trial(setup, seed))


@check(num_ranks=3)
def payload_rows_may_have_any_size(harness: Harness) -> None:
    """Rows of 1, 3, 5, 24 and other odd numbers of bytes, alone."""
    setup = Setup(extra_bytes=400)
    kinds = [PayloadKind("uint8")]
    kinds += [PayloadKind("uint8", (n,)) for n in (1, 3, 5, 7, 15, 17, 24, 31, 33, 63, 65, 129)]
    kinds += [PayloadKind("int16", (3,)), PayloadKind("float64", (2, 2)), PayloadKind("int64")]
    with harness.create(setup) as a2a:
        for seed, kind in enumerate(kinds):
            harness.dispatch(a2a, harness.trial(setup, seed, kinds=[kind])).release()


@check(num_ranks=3)
def several_payloads_travel_together(harness: Harness) -> None:
    """Up to sixteen payloads of mixed types; each keeps its rows."""
    setup = Setup(extra_bytes=512)
    hidden = PayloadKind(setup.dtype, (setup.hidden,))
    sets = (
        [hidden, PayloadKind("uint8", (3,)), PayloadKind("float32")],
        [
            PayloadKind("uint8", (1,)),
            PayloadKind("int64", (2,)),
            hidden,
            PayloadKind("uint8", (5,)),
        ],
        [hidden] + [PayloadKind("uint8", (n,)) for n in range(1, 16)],
    )
    with harness.create(setup) as a2a:
        for seed, kinds in enumerate(sets):
            harness.exchange(a2a, harness.trial(setup, seed, kinds=kinds))


@check(num_ranks=2)
def every_id_type_gives_the_same_rows(harness: Harness) -> None:
    """int16, int32, int64 with -1; uint32 with valid ids; each with a row stride too."""
    setup = Setup(max_tokens=5)
    with harness.create(setup) as a2a:
        for seed, dtype in enumerate((*ID_DTYPES, "uint32")):
            trial = harness.trial(setup, seed, ids=valid_ids if dtype == "uint32" else random_ids)
            ids = trial.oracle.topk_ids[harness.rank].astype(dtype)
            wide = numpy.full((len(ids), setup.top_k + 3), 99, dtype)
            wide[:, 1 : setup.top_k + 1] = ids
            strided = harness.tensors.to_tensor(wide, dtype)[:, 1 : setup.top_k + 1]
            for given in (harness.tensors.to_tensor(ids, dtype), strided):
                harness.exchange(a2a, trial, topk_ids=given)


@check(num_ranks=2)
def weights_and_payload_rows_may_be_strided(harness: Harness) -> None:
    """Any row stride; the rows themselves are contiguous."""
    setup = Setup()
    with harness.create(setup) as a2a:
        trial = harness.trial(setup, num_tokens=[6, 4])
        to_tensor = harness.tensors.to_tensor
        weights = trial.oracle.topk_weights
        expect(weights is not None, "trial without weights")
        wide: Array = numpy.repeat(weights[harness.rank], 2, axis=0) if weights else None
        rows = numpy.zeros((trial.oracle.num_tokens[harness.rank], setup.hidden + 5), "float32")
        rows[:, 2 : 2 + setup.hidden] = trial.oracle.payloads[harness.rank][0]
        harness.exchange(
            a2a,
            trial,
            topk_weights=to_tensor(wide, "float32")[::2],
            payloads=[to_tensor(rows, "float32")[:, 2 : 2 + setup.hidden]],
        )


@check(num_ranks=3)
def ids_past_the_last_expert_are_dropped_and_counted(harness: Harness) -> None:
    """check_ids="drop": such an id means no expert, and comes out as -1."""
    setup = Setup(check_ids="drop")

    def too_large(rng: numpy.random.Generator, num_tokens: int, setup: Setup) -> Array:
        ids = random_ids(rng, num_tokens, setup)
        ids[rng.random(ids.shape) < 0.3] = setup.num_experts
        ids[rng.random(ids.shape) < 0.1] = 2**31 - 1
        return ids

    with harness.create(setup) as a2a:
        dropped = 0
        for seed in range(4):
            trial = harness.trial(setup, seed, ids=too_large)
            harness.exchange(a2a, trial)
            dropped += int((trial.oracle.topk_ids[harness.rank] >= setup.num_experts).sum())
            expect(a2a.num_dropped_ids == dropped, f"num_dropped_ids: {a2a.num_dropped_ids}")


@check(num_ranks=2)
def any_top_k_works(harness: Harness) -> None:
    """No compiled list of sizes."""
    for top_k in (1, 2, 6, 10, 16, 22, 33, 64):
        setup = Setup(top_k=top_k, num_experts=40, max_tokens=3)
        with harness.create(setup) as a2a:
            harness.exchange(a2a, harness.trial(setup, top_k))


@check(num_ranks=2, core=True)
def guard_bytes_between_rows_stay_untouched(harness: Harness) -> None:
    """Rows that do not touch each other show a store past a row's end."""
    setup = Setup(knobs={"row_guard_bytes": 64}, hidden=7)
    with harness.create(setup) as a2a:
        for seed in range(3):
            harness.exchange(a2a, harness.trial(setup, seed), zero_copy=bool(seed % 2))


@check(num_ranks=3, on_gpu=False)
def token_counts_that_the_caller_knows_are_verified(harness: Harness) -> None:
    """`num_tokens_per_rank` changes nothing when it is right."""
    setup = Setup()
    with harness.create(setup) as a2a:
        trial = harness.trial(setup, num_tokens=[4, 0, 6])
        harness.exchange(a2a, trial, num_tokens_per_rank=[4, 0, 6])


@check(num_ranks=2)
def a_tensor_may_say_how_many_rows_are_tokens(harness: Harness) -> None:
    """`num_tokens`: rows past it are padding, whatever their ids say.

    On a GPU, where the number is known when the work runs, the result has a row for each of them.
    """
    setup = Setup(max_tokens=8)
    with harness.create(setup) as a2a:
        trial = harness.trial(setup, num_tokens=[3, 5], ids=valid_ids)
        here = trial.oracle.num_tokens[harness.rank]
        to_tensor = harness.tensors.to_tensor

        def padded(array: Array) -> Array:
            return numpy.concatenate([array, array[:1].repeat(8 - here, axis=0)])

        oracle = trial.oracle
        weights = oracle.topk_weights[harness.rank] if oracle.topk_weights else None
        recv = harness.dispatch(
            a2a,
            trial,
            topk_ids=to_tensor(padded(oracle.topk_ids[harness.rank]).astype("int32"), "int32"),
            payloads=[to_tensor(padded(oracle.payloads[harness.rank][0]), setup.dtype)],
            topk_weights=to_tensor(padded(weights), "float32"),
            num_tokens=to_tensor(numpy.int32([here]), "int32"),
        )
        num_rows = here if harness.tensors.device == "cpu" else 8
        ones = to_tensor(numpy.ones((num_rows, setup.hidden), numpy.float32), "float32")
        out = recv.combine(harness.experts(a2a, recv.handle, trial), out=ones)
        harness.check_result(out[:here], trial)
        expect(not harness.tensors.to_array(out[here:]).any(), "out: padding is not zero")
