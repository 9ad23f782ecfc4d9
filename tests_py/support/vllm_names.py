# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.33.0 calls things: the methods that its drivers use, and what they take, in order."""

from __future__ import annotations

GATHERED = ["self", "hidden_states", "is_sequence_parallel"]
BASE_MANAGER = {
    "__init__": ["self", "cpu_group", "tcp_store_group"],
    "get_handle": ["self", "kwargs"],
    "dispatch_router_logits": [
        "self",
        "hidden_states",
        "router_logits",
        "is_sequence_parallel",
        "extra_tensors",
    ],
    "dispatch": [
        "self",
        "hidden_states",
        "topk_weights",
        "topk_ids",
        "is_sequence_parallel",
        "extra_tensors",
    ],
    "combine": GATHERED,
    "allocate_combine_input": ["self", "shape", "dtype", "device", "is_sequence_parallel"],
    "combine_into_output": ["self", "hidden_states", "output", "is_sequence_parallel"],
    "query_active_mask": ["self"],
    "query_fault": ["self"],
    "clean_buffers": ["self"],
    "set_num_sms": ["self", "num_sms"],
    "max_sms_used": ["self"],
    "checkpoint_prepare": ["self"],
    "checkpoint_restore": ["self"],
    "destroy": ["self"],
}
BASE_ATTRIBUTES = [
    "cpu_group",
    "tcp_store_group",
    "dp_group",
    "tp_group",
    "dp_rank",
    "dp_world_size",
    "rank",
    "world_size",
    "internode",
    "support_fault_tolerance",
]
MULTICAST = ["self", "x", "cu_tokens_across_sp_cpu", "is_sequence_parallel"]
ONE_SIDED_NEEDS = [
    "self",
    "max_num_tokens",
    "top_k",
    "num_experts",
    "hidden_size",
    "dispatch_format",
    "extra_payload_bytes_per_token",
]

BASE_FILE = "distributed/device_communicators/base_device_communicator.py"
MANAGER_FILE = "distributed/device_communicators/all2all.py"
# By class: the file that has it (None: no longer, or not yet, in vLLM), and what it adds.
MANAGERS: dict[str, tuple[str | None, dict[str, list[str]]]] = {
    "AgRsAll2AllManager": (MANAGER_FILE, {}),
    "NaiveAll2AllManager": (None, {"naive_multicast": MULTICAST}),
    "DeepEPHTAll2AllManager": (MANAGER_FILE, {}),
    "DeepEPLLAll2AllManager": (MANAGER_FILE, {}),
    "FlashInferNVLinkOneSidedManager": (
        MANAGER_FILE,
        {"__init__": ["self", "cpu_group"], "initialize": ONE_SIDED_NEEDS, "cleanup": ["self"]},
    ),
    "FlashInferNVLinkTwoSidedManager": (
        MANAGER_FILE,
        {
            "initialize": ["self", "world_size", "rank", "gpus_per_node"],
            "ensure_alltoall_workspace_initialized": ["self"],
            "cleanup": ["self"],
        },
    ),
}

KERNEL_FILE = "model_executor/layers/fused_moe/modular_kernel.py"
PREPARE_FOLDER = "model_executor/layers/fused_moe/prepare_finalize"
BASE_PREPARE = {
    "activation_format": ["self"],
    "topk_indices_dtype": ["self"],
    "max_num_tokens_per_rank": ["self"],
    "num_dispatchers": ["self"],
    "output_is_reduced": ["self"],
}
OPTIONAL_PREPARE = {
    "post_init_setup": ["self", "fused_experts"],
    "allocate_fused_expert_output": [
        "self",
        "shape",
        "dtype",
        "device",
        "weight_and_reduce_impl",
    ],
    "supports_async": ["self"],
    "supports_dbo": ["self"],
    "supports_deferred_moe_finalize": ["self"],
}
TO_EXPERTS = [
    "self",
    "a1",
    "topk_weights",
    "topk_ids",
    "num_experts",
    "expert_map",
    "apply_router_weight_on_input",
    "quant_config",
    "defer_input_quant",
]
FROM_EXPERTS = [
    "self",
    "output",
    "fused_expert_output",
    "topk_weights",
    "topk_ids",
    "apply_router_weight_on_input",
    "weight_and_reduce_impl",
]
MODULAR = {**BASE_PREPARE, "prepare": TO_EXPERTS, "finalize": FROM_EXPERTS}
ASYNC = {**MODULAR, "prepare_async": TO_EXPERTS, "finalize_async": FROM_EXPERTS}
NAIVE_INIT = ["self", "is_sequence_parallel", "num_dispatchers"]
PREPARES: dict[str, tuple[str | None, dict[str, list[str]]]] = {
    "MoEPrepareAndFinalizeNaiveDPEPModular": (
        "naive_dp_ep.py",
        {**MODULAR, "__init__": NAIVE_INIT, "set_lora_context": ["self", "ctx"]},
    ),
    "MoEPrepareAndFinalizeNaiveDPEPMonolithic": (
        "naive_dp_ep.py",
        {
            **BASE_PREPARE,
            "__init__": NAIVE_INIT,
            "prepare": ["self", "a1", "router_logits", "quant_config", "defer_input_quant"],
            "finalize": ["self", "fused_expert_output"],
        },
    ),
    "DeepEPHTPrepareAndFinalize": (
        "deepep_ht.py",
        {
            **ASYNC,
            "__init__": ["self", "buffer", "num_dispatchers", "dp_size", "rank_expert_offset"],
            "maybe_roundup_layer_hidden_size": ["hidden_size", "dtype"],
        },
    ),
    "DeepEPLLPrepareAndFinalize": (
        "deepep_ll.py",
        {
            **ASYNC,
            "__init__": [
                "self",
                "buffer",
                "max_tokens_per_rank",
                "num_dispatchers",
                "use_fp8_dispatch",
                "global_to_physical",
                "physical_to_global",
                "local_expert_global_ids",
            ],
            "maybe_roundup_layer_hidden_size": ["hidden_size"],
            "post_init_setup": ["self", "fused_experts"],
        },
    ),
    "FlashInferNVLinkOneSidedPrepareAndFinalize": (
        "flashinfer_nvlink_one_sided.py",
        {**MODULAR, "__init__": [*ONE_SIDED_NEEDS, "num_dispatchers"]},
    ),
    "FlashInferNVLinkTwoSidedPrepareAndFinalize": (
        "flashinfer_nvlink_two_sided.py",
        {**MODULAR, "__init__": ["self", "num_dispatchers"]},
    ),
    "AllToAllBatchedPrepareAndFinalize": (
        None,
        {
            **MODULAR,
            "__init__": [
                "self",
                "max_num_tokens",
                "num_local_experts",
                "num_dispatchers",
                "rank",
                "is_sequence_parallel",
            ],
            "capacities": ["self", "topk"],
        },
    ),
}
# What the base classes leave to theirs.
ABSTRACT_MODULAR = {*BASE_PREPARE, "prepare", "finalize"}
