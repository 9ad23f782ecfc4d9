// SPDX-License-Identifier: Apache-2.0
#include "api/config.h"

#include <algorithm>
#include <sstream>

#include "base/byte_math.h"
#include "base/format.h"
#include "base/kernels.h"
#include "exchange/exchange.h"
#include "fanfold/error.h"

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
    config.dispatch_row_bytes =
        config.hidden * size_of(config.dtype) + config.extra_bytes_per_token;
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
    config.strategy = Strategy::kBroadcast;
    return "broadcast: the strategy that gives layout gathered";
  }
  config.strategy = Strategy::kOneSided;
  return "one_sided: all ranks share the memory of this machine, and it moves each row once";
}

}  // namespace

Capabilities capabilities_of(Strategy strategy) {
  return strategy == Strategy::kBroadcast ? exchange::broadcast_capabilities()
                                          : exchange::one_sided_capabilities();
}

ResolvedConfig resolve(const AllToAllConfig& config, int num_ranks) {
  check_scalars(config);
  check_range("num_ranks", num_ranks, 1, AllToAll::kMaxRanks);
  check_range("max_tokens_per_rank * num_ranks * top_k",
              config.max_tokens_per_rank * num_ranks * config.top_k, 1, INT32_MAX);
  ResolvedConfig resolved{config, {}};
  AllToAllConfig& out = resolved.config;
  if (out.check_ids == CheckIds::kAuto) out.check_ids = CheckIds::kRaise;
  resolve_sizes(out);
  resolved.choice = resolve_strategy(out);
  const Capabilities record = capabilities_of(out.strategy);
  if (std::find(record.layouts.begin(), record.layouts.end(), out.layout) == record.layouts.end()) {
    throw Unsupported(str("layout: strategy ", name_of(out.strategy), " gives ",
                          list_layouts(record), "; got ", name_of(out.layout)));
  }
  if (out.layout != Layout::kExpertMajor && out.weighting != Weighting::kApplied) {
    throw InvalidArgument(str("weighting: layout ", name_of(out.layout), " expects applied, got ",
                              name_of(out.weighting)));
  }
  return resolved;
}

std::vector<std::pair<std::string, std::string>> encode(const AllToAllConfig& config) {
  std::string table;
  for (const std::int32_t rank : config.placement.table) table += str(rank, ' ');
  constexpr const char* kPlacements[] = {"linear", "round_robin", "table "};
  return {
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
      {"placement", kPlacements[static_cast<int>(config.placement.kind)] + table},
      {"combine_dtype", name_of(config.combine_dtype.value_or(config.dtype))},
      {"max_in_flight", str(config.max_in_flight)},
      {"deterministic", config.deterministic ? "true" : "false"},
      {"check_ids", name_of(config.check_ids)},
      {"row_guard_bytes", str(config.test_knobs.row_guard_bytes)},
      {"first_epoch", str(config.test_knobs.first_epoch)},
  };
}

std::string flatten(const std::vector<std::pair<std::string, std::string>>& fields) {
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
