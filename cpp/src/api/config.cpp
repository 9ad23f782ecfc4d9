// SPDX-License-Identifier: Apache-2.0
#include "api/config.h"

#include <algorithm>
#include <sstream>

#include "base/byte_math.h"
#include "base/format.h"
#include "base/kernels.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"
#include "plan/expert_map.h"
#include "plan/wire.h"

namespace fanfold::api {
namespace {

using base::str;

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;
constexpr std::int64_t kMaxRowBytes = std::int64_t{1} << 40;

void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw InvalidArgument(str(name, ": expected a value in [", low, ", ", high, "], got ", value));
}

std::string list_layouts(const Capabilities& record) {
  std::string text;
  for (const Layout layout : record.layouts) {
    text += str(text.empty() ? "" : ", ", name_of(layout));
  }
  return text;
}

void check_scalars(const AllToAllConfig& config) {
  check_range("num_experts", config.num_experts, 1, 1 << 24);
  check_range("top_k", config.top_k, 1, AllToAll::kMaxTopK);
  check_range("max_tokens_per_rank", config.max_tokens_per_rank, 1, kMaxTokens);
  check_range("hidden", config.hidden, 1, kMaxRowBytes);
  check_range("extra_bytes_per_token", config.extra_bytes_per_token, 0, kMaxRowBytes);
  check_range("max_in_flight", config.max_in_flight, 1, 64);
  if (config.timeout.count() < 1) {
    throw InvalidArgument(str("timeout: expected more than 0 s, got ",
                              base::format_duration(config.timeout.count())));
  }
  check_range("row_guard_bytes", config.test_knobs.row_guard_bytes, 0, 4096);
  if (config.test_knobs.row_guard_bytes % 16 != 0) {
    throw InvalidArgument(
        str("row_guard_bytes: expected a multiple of 16, got ", config.test_knobs.row_guard_bytes));
  }
  if (config.test_knobs.first_epoch == 0 ||
      config.test_knobs.first_epoch >= (std::uint64_t{1} << 47)) {
    throw InvalidArgument(
        str("first_epoch: expected a value in [1, 2^47), got ", config.test_knobs.first_epoch));
  }
  base::kernels(base::isa_from_name(config.test_knobs.isa.c_str()));
}

void resolve_sizes(AllToAllConfig& config) {
  if (!config.combine_dtype) {
    if (!is_summable(config.dtype)) {
      throw InvalidArgument(
          str("combine_dtype: expected float32, float16 or bfloat16 to be given, "
              "since rows of dtype ",
              name_of(config.dtype), " cannot be added; got none"));
    }
    config.combine_dtype = config.dtype;
  }
  if (!is_summable(*config.combine_dtype)) {
    throw InvalidArgument(str("combine_dtype: expected float32, float16 or bfloat16, got ",
                              name_of(*config.combine_dtype)));
  }
  if (!config.dispatch_row_bytes) {
    config.dispatch_row_bytes = config.extra_bytes_per_token +
                                (config.dispatch_wire == Wire::kNone
                                     ? config.hidden * size_of(config.dtype)
                                     : plan::packed_row_bytes(config.hidden, config.wire_scale));
  }
  if (!config.combine_row_bytes) {
    config.combine_row_bytes = config.hidden * size_of(*config.combine_dtype);
  }
  check_range("dispatch_row_bytes", *config.dispatch_row_bytes, 1, kMaxRowBytes);
  check_range("combine_row_bytes", *config.combine_row_bytes, 1, kMaxRowBytes);
  config.combine_row_bytes = base::align_up(*config.combine_row_bytes, 4);
}

std::string resolve_strategy(AllToAllConfig& config) {
  if (config.strategy != Strategy::kAuto) {
    return str(name_of(config.strategy), ": asked for by name");
  }
  if (config.layout == Layout::kGathered) {
    config.strategy = Strategy::kGatherScatter;
    return "gather_scatter: layout gathered wants every row on every rank, and sums go home once";
  }
  if (config.dispatch_wire != Wire::kNone || config.combine_wire != Wire::kNone) {
    config.strategy = Strategy::kLowLatency;
    return "low_latency: the strategy that packs rows for the wire";
  }
  const bool exact = !config.max_recv_rows;
  if (exact && (config.layout == Layout::kFlat || config.layout == Layout::kFlatByExpert)) {
    config.strategy = Strategy::kHighThroughput;
    return str("high_throughput: layout ", name_of(config.layout),
               " of as many rows as arrive, in symmetric memory that grows with them");
  }
  config.strategy = Strategy::kOneSided;
  return "one_sided: all ranks share the memory of this machine, and it moves each row once";
}

bool needs_shared_memory(Strategy strategy) noexcept {
  switch (strategy) {
    case Strategy::kOneSided:
    case Strategy::kTwoSided:
    case Strategy::kHighThroughput:
    case Strategy::kLowLatency:
      return true;
    case Strategy::kBroadcast:
    case Strategy::kGatherScatter:
    case Strategy::kBatched:
    case Strategy::kAuto:
      return false;
  }
  return true;
}

/// Where the ranks reach no memory of each other, for the reason `no_memory`.
std::string resolve_strategy_without_memory(AllToAllConfig& config, const std::string& no_memory) {
  const bool is_auto = config.strategy == Strategy::kAuto;
  if (needs_shared_memory(config.strategy)) {
    throw Unsupported(str("strategy: ", name_of(config.strategy),
                          " needs memory that all ranks share, expected broadcast, gather_scatter, "
                          "batched or auto: ",
                          no_memory));
  }
  if (is_auto && (config.dispatch_wire != Wire::kNone || config.combine_wire != Wire::kNone)) {
    throw Unsupported(
        str("dispatch_wire, combine_wire: only low_latency packs rows for the wire, "
            "and needs memory that all ranks share; expected none: ",
            no_memory));
  }
  if (!is_auto) return str(name_of(config.strategy), ": asked for by name");
  config.strategy = Strategy::kGatherScatter;
  return str("gather_scatter: the ranks share no memory (", no_memory,
             "), and of what goes through collectives it takes the fewest steps");
}

std::string resolve_strategy_on_gpu(AllToAllConfig& config) {
  if (config.strategy == Strategy::kTwoSided || config.strategy == Strategy::kHighThroughput) {
    throw Unsupported(
        str("strategy: expected one_sided, low_latency, broadcast, gather_scatter or ",
            "batched (device 'cuda' has these), got ", name_of(config.strategy)));
  }
  if (config.strategy != Strategy::kAuto) {
    return str(name_of(config.strategy), ": asked for by name");
  }
  if (config.dispatch_wire != Wire::kNone || config.combine_wire != Wire::kNone) {
    config.strategy = Strategy::kLowLatency;
    return "low_latency: the strategy that packs rows for the wire";
  }
  config.strategy = Strategy::kOneSided;
  return "one_sided: kernels reach the memory of all GPUs, and it moves each row once";
}

/// What kernels cannot do.
void check_gpu(const AllToAllConfig& config, int num_ranks, const Capabilities& record) {
  check_range("device_index", config.device_index, 0, INT16_MAX);
  check_range("top_k on device 'cuda'", config.top_k, 1, record.max_top_k);
  check_range("num_ranks on device 'cuda'", num_ranks, 1, record.max_ranks);
  check_range("max_tokens_per_rank * num_ranks on device 'cuda'",
              config.max_tokens_per_rank * num_ranks, 1, exec::kMaxDeviceRows - 1);
  check_range("dispatch_row_bytes on device 'cuda'", config.dispatch_row_bytes.value_or(1), 1,
              exec::kMaxDeviceHidden);
  check_range("combine_row_bytes on device 'cuda'", config.combine_row_bytes.value_or(1), 1,
              exec::kMaxDeviceHidden);
  if (config.check_ids == CheckIds::kRaise) {
    throw InvalidArgument(
        "check_ids: expected drop on device 'cuda' (its ids cannot be looked at without waiting), "
        "got raise");
  }
}

void check_layout(const AllToAllConfig& config, const Capabilities& record) {
  if (std::find(record.layouts.begin(), record.layouts.end(), config.layout) ==
      record.layouts.end()) {
    throw Unsupported(str("layout: strategy ", name_of(config.strategy), " gives ",
                          list_layouts(record),
                          config.device == DeviceType::kGpu ? " on device 'cuda'; got " : "; got ",
                          name_of(config.layout)));
  }
  if (!is_per_expert(config.layout) && config.weighting != Weighting::kApplied) {
    throw InvalidArgument(str("weighting: layout ", name_of(config.layout),
                              " expects applied, got ", name_of(config.weighting)));
  }
  const bool is_flat = config.layout == Layout::kFlat || config.layout == Layout::kFlatByExpert;
  if (config.max_recv_rows) {
    check_range("max_recv_rows", *config.max_recv_rows, 1, INT32_MAX);
    if (!is_flat) {
      throw InvalidArgument(str("max_recv_rows: expected none (only flat and flat_by_expert have ",
                                "it), got ", *config.max_recv_rows, " with layout ",
                                name_of(config.layout)));
    }
  }
  check_range("expert_alignment", config.expert_alignment, 1, 65536);
  if (config.expert_alignment != 1 && config.layout != Layout::kFlatByExpert) {
    throw InvalidArgument(str("expert_alignment: expected 1 (only flat_by_expert has groups), got ",
                              config.expert_alignment, " with layout ", name_of(config.layout)));
  }
}

/// Counts and offsets of rows are int32.
void check_rows(const AllToAllConfig& config, int num_ranks) {
  if (config.layout != Layout::kFlatByExpert) return;
  const plan::ExpertMap map =
      plan::build_expert_map(config.placement, config.num_experts, num_ranks);
  const std::int64_t experts = std::max(map.max_local_experts, config.max_local_experts);
  check_range(
      "rows of layout flat_by_expert",
      config.max_tokens_per_rank * num_ranks * std::min<std::int64_t>(config.top_k, experts) +
          experts * (config.expert_alignment - 1),
      0, INT32_MAX);
}

void check_wires(const AllToAllConfig& config, const Capabilities& record) {
  for (const auto& [name, wire] : {std::pair("dispatch_wire", config.dispatch_wire),
                                   std::pair("combine_wire", config.combine_wire)}) {
    if (wire == Wire::kNone || record.wires) continue;
    throw Unsupported(str(name, ": strategy ", name_of(config.strategy),
                          " sends rows as they are (low_latency packs them); got ", name_of(wire)));
  }
  if (config.combine_wire != Wire::kNone && !is_per_expert(config.layout)) {
    throw InvalidArgument(
        str("combine_wire: expected none (it packs the sums of layouts per "
            "expert), got ",
            name_of(config.combine_wire), " with layout ", name_of(config.layout)));
  }
  if (config.dispatch_wire != Wire::kNone && !is_summable(config.dtype)) {
    throw InvalidArgument(
        str("dtype: expected float32, float16 or bfloat16 (dispatch_wire packs "
            "it), got ",
            name_of(config.dtype)));
  }
}

}  // namespace

ResolvedConfig resolve(const AllToAllConfig& config, int num_ranks, const std::string& no_memory) {
  check_scalars(config);
  check_range("num_ranks", num_ranks, 1, AllToAll::kMaxRanks);
  check_range("max_tokens_per_rank * num_ranks * top_k",
              config.max_tokens_per_rank * num_ranks * config.top_k, 1, INT32_MAX);
  ResolvedConfig resolved{config, {}};
  AllToAllConfig& out = resolved.config;
  const bool is_on_gpu = out.device == DeviceType::kGpu;
  if (out.check_ids == CheckIds::kAuto) {
    out.check_ids = is_on_gpu ? CheckIds::kDrop : CheckIds::kRaise;
  }
  resolve_sizes(out);
  if (no_memory.empty()) {
    resolved.choice = is_on_gpu ? resolve_strategy_on_gpu(out) : resolve_strategy(out);
  } else {
    resolved.choice = resolve_strategy_without_memory(out, no_memory);
  }
  const Capabilities record = exchange::capabilities_of(out.strategy, out.device);
  if (is_on_gpu) check_gpu(out, num_ranks, record);
  check_layout(out, record);
  check_wires(out, record);
  check_range("channel_bytes", out.channel_bytes, 4096, std::int64_t{1} << 30);
  check_range("max_local_experts", out.max_local_experts, 0, out.num_experts);
  check_rows(out, num_ranks);
  return resolved;
}

namespace {

std::string list(const std::vector<std::int32_t>& values) {
  std::string text;
  for (const std::int32_t value : values) text += str(text.empty() ? "" : " ", value);
  return text.empty() ? "none" : text;
}

std::string text_of(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::kLinear:
      return "linear";
    case Placement::Kind::kRoundRobin:
      return "round_robin";
    case Placement::Kind::kTable:
      return "table " + list(placement.table);
  }
  return {};
}

}  // namespace

Fields encode(const Placement& placement) {
  return {{"placement", text_of(placement)},
          {"placement.logical_of_expert", list(placement.logical_of_expert)}};
}

Fields encode(const AllToAllConfig& config) {
  Fields fields = {
      {"device", config.device == DeviceType::kCpu ? "cpu" : "cuda"},
      {"num_experts", str(config.num_experts)},
      {"top_k", str(config.top_k)},
      {"max_tokens_per_rank", str(config.max_tokens_per_rank)},
      {"hidden", str(config.hidden)},
      {"dtype", name_of(config.dtype)},
      {"dispatch_row_bytes", str(config.dispatch_row_bytes.value_or(0))},
      {"combine_row_bytes", str(config.combine_row_bytes.value_or(0))},
      {"strategy", name_of(config.strategy)},
      {"layout", name_of(config.layout)},
      {"weighting", name_of(config.weighting)},
      {"combine_dtype", name_of(config.combine_dtype.value_or(config.dtype))},
      {"max_recv_rows", str(config.max_recv_rows.value_or(0))},
      {"expert_alignment", str(config.expert_alignment)},
      {"max_local_experts", str(config.max_local_experts)},
      {"dispatch_wire", name_of(config.dispatch_wire)},
      {"combine_wire", name_of(config.combine_wire)},
      {"wire_scale", name_of(config.wire_scale)},
      {"channel_bytes", str(config.channel_bytes)},
      {"max_in_flight", str(config.max_in_flight)},
      {"deterministic", config.deterministic ? "true" : "false"},
      {"check_ids", name_of(config.check_ids)},
      {"row_guard_bytes", str(config.test_knobs.row_guard_bytes)},
      {"first_epoch", str(config.test_knobs.first_epoch)},
  };
  const Fields placement = encode(config.placement);
  fields.insert(fields.end(), placement.begin(), placement.end());
  return fields;
}

std::string flatten(const Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) text += str(name, '=', value, '\n');
  return text;
}

void compare_encoded(const std::vector<std::string>& by_rank, const std::string& what) {
  for (std::size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] == by_rank[0]) continue;
    std::istringstream first(by_rank[0]);
    std::istringstream other(by_rank[rank]);
    std::string mine;
    std::string theirs;
    while (std::getline(first, mine) && std::getline(other, theirs)) {
      if (mine == theirs) continue;
      const std::size_t equals = mine.find('=');
      throw InvalidArgument(str(what, ": ", mine.substr(0, equals),
                                " differs between ranks: rank 0 has ", mine.substr(equals + 1),
                                ", rank ", rank, " has ", theirs.substr(theirs.find('=') + 1)));
    }
    throw InvalidArgument(str(what, ": the configurations of rank 0 and rank ", rank,
                              " have different fields; all ranks must run one version"));
  }
}

}  // namespace fanfold::api
