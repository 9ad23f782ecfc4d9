# SPDX-License-Identifier: Apache-2.0
"""Names and parameters of FlashInfer's one-sided all-to-all, from a table and from its files."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from support import vllm_files

from fanfold.compat import flashinfer

# Of FlashInfer 0.7.2.post1: parameters in order, those behind "*" by name only.
FUNCTIONS = {
    "moe_a2a_initialize": "workspace ep_rank ep_size max_num_tokens eplb_stats_num_experts "
    "* backend",
    "moe_a2a_dispatch": "token_selected_experts input_payloads workspace metainfo "
    "runtime_max_tokens_per_rank ep_rank ep_size top_k num_experts enable_pdl eplb_local_stats "
    "enable_rank_mask active_rank_mask * backend recv_view_cache",
    "moe_a2a_combine": "payload local_num_tokens workspace metainfo runtime_max_tokens_per_rank "
    "ep_rank ep_size top_k combine_payload_offset payload_in_workspace output_dtype output_scales "
    "output_scalar_scale sf_layout output * use_low_precision enable_pdl enable_rank_mask "
    "active_rank_mask backend",
    "moe_a2a_sanitize_expert_ids": "expert_ids workspace metainfo ep_rank invalid_expert_id "
    "enable_pdl * backend",
    "moe_a2a_wrap_payload_tensor_in_workspace": "workspace leading_shape slice_start slice_end "
    "dtype",
    "moe_a2a_get_workspace_size_per_rank": "ep_size max_num_tokens "
    "total_dispatch_payload_size_per_token combine_payload_size_per_token eplb_stats_num_experts "
    "* backend",
    "moe_a2a_active_rank_mask": "active_ranks ep_size",
    "get_moe_alltoall_module": "backend",
}
METHODS = {
    "__init__": "mapping max_num_tokens top_k num_experts workspace_size_per_rank hidden_size "
    "mnnvl_config eplb_stats_num_experts enable_rank_mask * backend",
    "dispatch": "token_selected_experts input_payloads runtime_max_tokens_per_rank "
    "invalid_token_expert_id expert_id_payload_index eplb_local_stats active_rank_mask",
    "combine": "payload runtime_max_tokens_per_rank payload_in_workspace output_dtype "
    "output_scales output_scalar_scale sf_layout output * use_low_precision active_rank_mask",
    "get_combine_payload_tensor_in_workspace": "runtime_max_tokens_per_rank hidden_size dtype",
    "get_workspace": "workspace_size_per_rank ep_rank ep_size max_num_tokens mapping "
    "eplb_stats_num_experts * backend",
    "get_moe_workspace_size_per_rank": "ep_size top_k max_num_tokens hidden_size "
    "extra_payload_bytes_per_token eplb_stats_num_experts * backend",
    "checkpoint_prepare": "",
    "checkpoint_restore": "comm_backend",
    "_init_constants": "backend",
    "_reset_workspace": "",
}


def described(function: Any) -> str:
    """The parameters of a function of ours, as the table has them."""
    words = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(parameter.name)
    return " ".join(word for word in words if word != "self")


def of_file(function: ast.FunctionDef) -> str:
    """The same of a function in a file."""
    words = [each.arg for each in function.args.args]
    if function.args.kwonlyargs:
        words += ["*", *(each.arg for each in function.args.kwonlyargs)]
    return " ".join(word for word in words if word not in ("self", "cls"))


def test_functions_and_methods_have_flashinfers_parameters() -> None:
    for name, expected in FUNCTIONS.items():
        assert described(getattr(flashinfer, name)) == expected, name
    for name, expected in METHODS.items():
        assert described(getattr(flashinfer.MoeAlltoAll, name)) == expected, name


def test_the_table_is_that_of_an_installed_flashinfer() -> None:
    root = vllm_files.installed("flashinfer")
    if root is None:
        pytest.skip("flashinfer is not installed: the table was not compared with its real file")
    module = ast.parse((root / "comm" / "trtllm_moe_alltoall.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    assert {name: of_file(functions[name]) for name in FUNCTIONS} == FUNCTIONS
    (cls,) = [
        node
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name == "MoeAlltoAll"
    ]
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    assert {name: of_file(methods[name]) for name in METHODS} == METHODS


# Of a mapping, for 16 ranks.
SHAPES = [
    {"tp_size": 16, "moe_ep_size": 16},
    {"tp_size": 4, "pp_size": 4, "moe_ep_size": 2},
    {"tp_size": 4, "pp_size": 2, "cp_size": 2},
    {"tp_size": 8, "pp_size": 2, "moe_tp_size": 4},
    {"tp_size": 2, "pp_size": 8},
    {"tp_size": 16, "moe_cluster_size": 4},
]
PLACES = [
    "tp_rank", "cp_rank", "pp_rank", "moe_ep_rank", "moe_tp_rank", "tp_group", "cp_group",
    "pp_group", "moe_ep_group", "moe_tp_group", "moe_cluster_rank", "moe_cluster_group",
    "attn_tp_size", "attn_cp_size", "local_rank", "node_rank",
]  # fmt: skip
QUESTIONS = [
    "has_tp", "has_cp", "has_pp", "has_moe_ep", "has_moe_tp", "has_moe_cluster", "is_multi_node",
    "is_first_pp_rank", "is_last_pp_rank", "is_second_last_pp_rank", "prev_pp_rank",
    "next_pp_rank",
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_hold_this_rank_and_divide_the_world(shape: dict[str, int]) -> None:
    for rank in range(16):
        where = flashinfer.Mapping(16, rank, 8, **shape)
        assert flashinfer.Mapping.from_dict(where.to_dict()) == where
        for kind in ("tp", "cp", "pp", "moe_ep", "moe_tp"):
            group = getattr(where, f"{kind}_group")
            assert group[getattr(where, f"{kind}_rank")] == rank
            assert len(group) == getattr(where, f"{kind}_size")
        assert where.pp_group.count(where.next_pp_rank()) == 1
        assert flashinfer.Mapping(16, where.next_pp_rank(), 8, **shape).prev_pp_rank() == rank
    layers = [flashinfer.Mapping(3, rank, pp_size=3).pp_layers(7) for rank in range(3)]
    assert layers == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("shape", SHAPES)
def test_places_are_those_of_an_installed_flashinfer(shape: dict[str, int]) -> None:
    root: Path | None = vllm_files.installed("flashinfer")
    if root is None:
        pytest.skip("flashinfer is not installed: mappings were not compared with its own")
    with vllm_files.loaded_alone(root, ["flashinfer.comm.mapping"]) as (module,):
        for rank in range(16):
            ours = flashinfer.Mapping(16, rank, 8, **shape)
            theirs = module.Mapping(16, rank, 8, **shape)
            for place in PLACES:
                if "moe" in place and "group" in place and ours.cp_size > 1:
                    continue  # theirs leave out the rank itself
                assert getattr(ours, place) == getattr(theirs, place), (place, rank)
            for question in QUESTIONS:
                assert getattr(ours, question)() == getattr(theirs, question)(), (question, rank)
            assert ours.pp_layers(13) == theirs.pp_layers(13)
