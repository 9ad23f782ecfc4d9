# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's arithmetic: the offset table, sizes, owners of experts, ranks of a job."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys

import pytest
from support.flashinfer_rounds import owner

import fanfold
from fanfold.compat import flashinfer
from fanfold.compat.flashinfer import sizes

# (ep_size, max tokens, length of statistics) -> the ten offsets.
OFFSETS = {
    (1, 1, 0): [0, 4, 8, 12, 128, 256, 384, 512, 640, 640],
    (2, 3, 0): [0, 4, 8, 16, 128, 256, 384, 768, 1152, 1152],
    (8, 10, 0): [0, 4, 8, 40, 128, 256, 384, 1280, 2176, 2176],
    (4, 1024, 256): [0, 4, 8, 24, 128, 256, 384, 90496, 180608, 184704],
    (8, 4096, 0): [0, 4, 8, 40, 128, 256, 384, 360832, 721280, 721280],
    (64, 512, 0): [0, 4, 8, 264, 640, 896, 1152, 46208, 91264, 91264],
}
# Parameters by name; those behind "*" are keywords. Of the exchange: test_flashinfer_names.py.
SIGNATURES = {
    "Mapping": "world_size rank gpus_per_node * cp_size cp_config tp_size pp_size "
    "moe_cluster_size moe_tp_size moe_ep_size attn_tp_size attn_cp_size auto_parallel "
    "enable_attention_dp",
    "MnnvlConfig": "comm_backend allocation_granularity fabric_page_size",
    "MnnvlMemory": "mapping size",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_have_the_names_and_the_order_of_flashinfer(name: str) -> None:
    found = flashinfer
    for part in name.split("."):
        found = getattr(found, part)
    parameters = list(inspect.signature(found).parameters.values())  # type: ignore[arg-type]
    positional, _, keywords = SIGNATURES[name].partition(" * ")
    names = positional.split()
    assert [each.name for each in parameters[: len(names)]] == names
    for each in parameters[: len(names)]:
        assert each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, each
    rest = {each.name: each for each in parameters[len(names) :]}
    assert set(keywords.split()) <= set(rest)
    for each in rest.values():  # what we add has a default and is out of the way
        assert each.default is not inspect.Parameter.empty, each


def test_the_import_loads_neither_flashinfer_nor_torch_nor_vllm() -> None:
    program = (
        "import sys, fanfold.compat.flashinfer as f; f.Mapping; f.MoeAlltoAll; f.register;"
        "f.moe_a2a_get_workspace_size_per_rank(8, 10, 256, 256); f.MnnvlMemory;"
        "print({'torch', 'flashinfer', 'vllm', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_every_name_of_the_module_can_be_had_and_no_other() -> None:
    for name in flashinfer.__all__:
        assert getattr(flashinfer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'MnnvlMoe'"):
        _ = flashinfer.MnnvlMoe  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", OFFSETS)
def test_offsets_are_those_of_flashinfer(case: tuple[int, int, int]) -> None:
    assert sizes.metainfo_offsets(*case) == OFFSETS[case]
    module = flashinfer.get_moe_alltoall_module()
    assert module.moe_a2a_get_aux_data_size(*case) == OFFSETS[case][-1]


def test_the_fields_of_the_offset_table_are_exported_as_eleven_pairs() -> None:
    names, indices = flashinfer.get_moe_alltoall_module().moe_a2a_get_metainfo_index_pairs()
    assert names[:2] == [
        "MOE_A2A_FLAG_VAL_OFFSET_INDEX",
        "MOE_A2A_LOCAL_TOKEN_COUNTER_OFFSET_INDEX",
    ]
    assert names[9:] == ["MOE_A2A_PAYLOAD_DATA_OFFSET_INDEX", "MOE_A2A_NUM_METAINFO_FIELDS"]
    assert indices == [*range(10), 10]
    flashinfer.MoeAlltoAll._init_constants()
    index = flashinfer.MoeAlltoAll._METAINFO_INDEX
    assert index is not None
    assert [f"MOE_A2A_{name}" for name in index] == names
    assert index["RECV_COUNTERS_OFFSET_INDEX"] == 3


def test_sizes_are_those_of_flashinfer() -> None:
    of_class = flashinfer.MoeAlltoAll.get_moe_workspace_size_per_rank
    assert of_class(8, 8, 4096, 7168) == 942_342_528
    nvfp4 = 7168 // 2 + 7168 // 16 + 8 * 8
    of_function = flashinfer.moe_a2a_get_workspace_size_per_rank
    assert of_function(8, 4096, nvfp4, 2 * 7168) == 604_701_056
    # Nothing to send: the counters; with results of bfloat16 their rows besides.
    aux = sizes.aux_data_size(8, 10)
    assert of_function(8, 10, 0, 0) == aux == 2176
    assert of_function(8, 10, 2 * 128, 0) == aux + 8 * 10 * 128 * 2
    assert of_function(8, 10, 0, 0, 32) == sizes.aux_data_size(8, 10, 32)


@pytest.mark.parametrize(
    ("num_experts", "world", "expected"),
    [
        (32, 4, [8, 8, 8, 8]),
        (384, 5, [77, 77, 77, 77, 76]),
        (6, 4, [2, 2, 1, 1]),
        (8, 5, [2, 2, 2, 1, 1]),
        (10, 3, [4, 3, 3]),
    ],
)
def test_the_first_ranks_own_one_expert_more(
    num_experts: int, world: int, expected: list[int]
) -> None:
    first = sizes.first_experts(num_experts, world)
    assert [after - before for before, after in itertools.pairwise(first)] == expected
    owners = [owner(expert, num_experts, world) for expert in range(num_experts)]
    assert [owners.count(rank) for rank in range(world)] == expected


def test_a_size_that_cannot_be_is_named() -> None:
    with pytest.raises(fanfold.InvalidArgument, match="max_num_tokens: expected at least 1, got 0"):
        flashinfer.moe_a2a_get_workspace_size_per_rank(2, 0, 1, 1)
    with pytest.raises(ValueError, match="ep_size: expected at least 1, got 0"):
        sizes.aux_data_size(0, 1)


# --- The mapping --------------------------------------------------------------------------------


def test_ranks_have_tensor_parallelism_innermost() -> None:
    found = [
        (each.pp_rank, each.cp_rank, each.tp_rank, each.moe_tp_rank, each.moe_ep_rank)
        for each in (
            flashinfer.Mapping(16, rank, 4, tp_size=4, cp_size=2, pp_size=2, moe_ep_size=2)
            for rank in (0, 1, 3, 4, 9, 15)
        )
    ]
    assert found == [
        (0, 0, 0, 0, 0),
        (0, 0, 1, 0, 1),
        (0, 0, 3, 1, 1),
        (0, 1, 0, 0, 0),
        (1, 0, 1, 0, 1),
        (1, 1, 3, 1, 1),
    ]


def test_sizes_left_out_are_worked_out_as_flashinfer_does() -> None:
    neither = flashinfer.Mapping(8, 3, tp_size=8)
    assert (neither.moe_tp_size, neither.moe_ep_size, neither.attn_tp_size) == (8, 1, 8)
    experts = flashinfer.Mapping(8, 3, tp_size=8, moe_ep_size=8)
    assert (experts.moe_tp_size, experts.moe_ep_size, experts.moe_ep_rank) == (1, 8, 3)
    parts = flashinfer.Mapping(8, 5, tp_size=8, moe_tp_size=2)
    assert (parts.moe_ep_size, parts.moe_ep_rank, parts.moe_tp_rank) == (4, 1, 1)
    assert not experts.is_multi_node()
    assert flashinfer.Mapping(16, 9, 8, tp_size=16).is_multi_node()
    assert flashinfer.Mapping(16, 9, 8, tp_size=16).node_rank == 1


def test_every_expert_is_given_out_also_with_a_rest() -> None:
    given = [
        flashinfer.Mapping(4, rank, 4, tp_size=4, moe_ep_size=4).ep_experts(6) for rank in range(4)
    ]
    assert given == [[0, 1], [2, 3], [4], [5]]


def test_gpus_per_node_may_be_the_function_that_vllm_passes() -> None:
    assert flashinfer.Mapping(2, 1, lambda: 2, tp_size=2).local_rank == 1
    wrong = flashinfer.Mapping(2, 1, "eight", tp_size=2)
    with pytest.raises(fanfold.InvalidArgument, match="gpus_per_node: expected an int"):
        wrong.is_multi_node()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"world_size": 4, "tp_size": 2}, r"world_size: expected 1 \(pp_size\)"),
        ({"world_size": 4, "tp_size": 4, "moe_ep_size": 3}, "tp_size: expected"),
        ({"world_size": 2, "rank": 2, "tp_size": 2}, "rank: expected 0 to 1, got 2"),
    ],
)
def test_a_mapping_that_does_not_multiply_up_is_refused(values: dict[str, int], text: str) -> None:
    with pytest.raises(fanfold.InvalidArgument, match=text):
        flashinfer.Mapping(**values)
