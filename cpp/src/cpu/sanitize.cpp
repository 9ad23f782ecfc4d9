// SPDX-License-Identifier: Apache-2.0
#include "cpu/backend.h"

namespace fanfold::cpu {
namespace {

template <class Id>
Id sanitized(Id id, const exec::SanitizeParams& params, Id invalid) noexcept {
  if (params.policy == SanitizePolicy::kPadding) return id;
  const plan::ExpertMap& map = *params.map;
  const auto global = static_cast<std::int64_t>(id);
  const bool local = global >= 0 && global < map.num_experts &&
                     map.rank_of[static_cast<std::size_t>(global)] == params.rank;
  if (!local) return invalid;
  if (params.policy == SanitizePolicy::kPaddingAndNonLocal) return id;
  return static_cast<Id>(map.local_of[static_cast<std::size_t>(global)]);
}

template <class Id>
void run(const exec::SanitizeParams& params) {
  const auto invalid = static_cast<Id>(params.invalid_expert_id);
  const TensorView& ids = params.ids;
  const bool flat = ids.ndim == 2;  // [n, K]: one source
  const std::int64_t num_sources = flat ? 1 : ids.shape[0];
  const std::int64_t num_rows = ids.shape[flat ? 0 : 1];
  const std::int64_t top_k = ids.shape[flat ? 1 : 2];
  const std::size_t row_dim = flat ? 0 : 1;
  for (std::int64_t source = 0; source < num_sources; ++source) {
    const auto* in = static_cast<const Id*>(ids.data) + (flat ? 0 : source * ids.strides[0]);
    auto* out = static_cast<Id*>(params.out.data) + (flat ? 0 : source * params.out.strides[0]);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const bool has_token = row < params.counts[source];
      for (std::int64_t k = 0; k < top_k; ++k) {
        const Id id = in[row * ids.strides[row_dim] + k];
        out[row * params.out.strides[row_dim] + k] =
            has_token ? sanitized(id, params, invalid) : invalid;
      }
    }
  }
}

}  // namespace

void sanitize(const exec::SanitizeParams& params) {
  switch (params.ids.dtype) {
    case DType::kInt16:
      return run<std::int16_t>(params);
    case DType::kInt64:
      return run<std::int64_t>(params);
    case DType::kUInt32:
      return run<std::uint32_t>(params);
    default:  // the caller has checked: int32
      return run<std::int32_t>(params);
  }
}

}  // namespace fanfold::cpu
