// SPDX-License-Identifier: Apache-2.0
#include "config.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "device.h"
#include "fanfold/error.h"

namespace fanfold::python {
namespace {

template <class Field>
constexpr const char* expected() noexcept {
  if constexpr (std::is_same_v<Field, std::string>) return "a string";
  if constexpr (std::is_same_v<Field, bool>) return "a bool";
  if constexpr (std::is_floating_point_v<Field>) return "a number";
  return "an integer that its type holds";
}

[[noreturn]] void refuse(const char* name, const char* wanted, nb::handle got) {
  throw InvalidArgument(std::string(name) + ": expected " + wanted + ", got " +
                        nb::cast<std::string>(nb::repr(got)));
}

template <class Field>
Field to_field(nb::handle value, const char* name) {
  Field field{};
  if (!nb::try_cast(value, field)) refuse(name, expected<Field>(), value);
  return field;
}

std::vector<std::int32_t> to_table(nb::handle value, const char* name, const char* wanted) {
  std::vector<std::int32_t> table;
  nb::object list;
  try {
    list = nb::list(value);  // NumPy arrays and tuples, too
  } catch (nb::python_error&) {
    refuse(name, wanted, value);
  }
  if (!nb::try_cast(list, table)) refuse(name, wanted, value);
  return table;
}

/// Calls `visit(name, field)` for the fields that are numbers, bools or strings in both languages.
template <class Config, class Visit>
void visit_plain(Config& config, Visit&& visit) {
  visit("num_experts", config.num_experts);
  visit("top_k", config.top_k);
  visit("max_tokens_per_rank", config.max_tokens_per_rank);
  visit("hidden", config.hidden);
  visit("extra_bytes_per_token", config.extra_bytes_per_token);
  visit("dispatch_row_bytes", config.dispatch_row_bytes);
  visit("combine_row_bytes", config.combine_row_bytes);
  visit("max_recv_rows", config.max_recv_rows);
  visit("expert_alignment", config.expert_alignment);
  visit("max_local_experts", config.max_local_experts);
  visit("channel_bytes", config.channel_bytes);
  visit("max_in_flight", config.max_in_flight);
  visit("deterministic", config.deterministic);
  visit("name", config.name);
  visit("debug_poison", config.debug_poison);
}

nb::object from_placement(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::kLinear:
      return nb::str("linear");
    case Placement::Kind::kRoundRobin:
      return nb::str("round_robin");
    case Placement::Kind::kTable:
      break;
  }
  nb::object logical = nb::none();
  if (!placement.logical_of_expert.empty()) logical = nb::cast(placement.logical_of_expert);
  return nb::module_::import_("fanfold.placement").attr("Placement")(placement.table, logical);
}

/// "fp8_e4m3" or None.
Wire to_wire(const nb::dict& fields, const char* name) {
  const nb::object value = fields[name];
  if (value.is_none()) return Wire::kNone;
  const auto text = to_field<std::string>(value, name);
  try {
    return wire_from_name(text);
  } catch (const InvalidArgument&) {
    refuse(name, "None or \"fp8_e4m3\"", value);
  }
}

void set_knobs(const nb::dict& fields, TestKnobs& knobs) {
  const auto set = [&](const char* name, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    if (fields.contains(name)) field = to_field<Field>(fields[name], name);
  };
  set("row_guard_bytes", knobs.row_guard_bytes);
  set("first_epoch", knobs.first_epoch);
  set("delay_seed", knobs.delay_seed);
  set("kill_at_step", knobs.kill_at_step);
  set("stop_at_step", knobs.stop_at_step);
  set("isa", knobs.isa);
  set("streaming_stores", knobs.streaming_stores);
  set("min_worker_bytes", knobs.min_worker_bytes);
  set("min_pull_bytes", knobs.min_pull_bytes);
  set("max_store_bytes", knobs.max_store_bytes);
}

}  // namespace

Placement to_placement(nb::handle value) {
  constexpr const char* kExpected = "linear, round_robin, a list of ranks or a Placement";
  if (nb::isinstance<nb::str>(value)) return placement_from_name(nb::cast<std::string>(value));
  if (!nb::hasattr(value, "rank_of_expert")) {
    return Placement::from_table(to_table(value, "placement", kExpected));
  }
  std::vector<std::int32_t> ranks =
      to_table(value.attr("rank_of_expert"), "placement.rank_of_expert", "a list of ranks");
  const nb::object logical = value.attr("logical_of_expert");
  if (logical.is_none()) return Placement::from_table(std::move(ranks));
  return Placement::from_replicas(std::move(ranks), to_table(logical, "placement.logical_of_expert",
                                                             "None or a list of expert ids"));
}

AllToAllConfig to_config(const nb::dict& fields) {
  AllToAllConfig config;
  visit_plain(config, [&](const char* name, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    if (fields.contains(name)) field = to_field<Field>(fields[name], name);
  });
  const auto name = [&](const char* field, auto& target, auto from_name) {
    if (fields.contains(field)) target = from_name(to_field<std::string>(fields[field], field));
  };
  name("strategy", config.strategy, strategy_from_name);
  name("layout", config.layout, layout_from_name);
  name("weighting", config.weighting, weighting_from_name);
  name("check_ids", config.check_ids, check_ids_from_name);
  name("wire_scale", config.wire_scale, wire_scale_from_name);
  if (fields.contains("dtype")) config.dtype = to_dtype(fields["dtype"]);
  if (fields.contains("combine_dtype")) config.combine_dtype = to_dtype(fields["combine_dtype"]);
  if (fields.contains("placement")) config.placement = to_placement(fields["placement"]);
  if (fields.contains("device")) {
    const std::optional<int> gpu = to_gpu(fields["device"]);
    config.device = gpu ? DeviceType::kGpu : DeviceType::kCpu;
    config.device_index = gpu.value_or(0);
  }
  if (fields.contains("dispatch_wire")) config.dispatch_wire = to_wire(fields, "dispatch_wire");
  if (fields.contains("combine_wire")) config.combine_wire = to_wire(fields, "combine_wire");
  if (fields.contains("timeout_s")) {
    const auto timeout = to_timeout(to_field<double>(fields["timeout_s"], "timeout_s"));
    config.timeout = timeout.value_or(config.timeout);
  }
  set_knobs(fields, config.test_knobs);
  return config;
}

nb::dict to_dict(const AllToAllConfig& config) {
  nb::dict fields;
  visit_plain(config, [&](const char* name, const auto& field) { fields[name] = field; });
  fields["strategy"] = name_of(config.strategy);
  fields["layout"] = name_of(config.layout);
  fields["weighting"] = name_of(config.weighting);
  fields["check_ids"] = name_of(config.check_ids);
  fields["wire_scale"] = name_of(config.wire_scale);
  fields["dtype"] = name_of(config.dtype);
  fields["combine_dtype"] = name_of(config.combine_dtype.value_or(config.dtype));
  fields["placement"] = from_placement(config.placement);
  for (const auto& [name, wire] : {std::pair("dispatch_wire", config.dispatch_wire),
                                   std::pair("combine_wire", config.combine_wire)}) {
    if (wire == Wire::kNone) {
      fields[name] = nb::none();
    } else {
      fields[name] = name_of(wire);
    }
  }
  fields["timeout_s"] = std::chrono::duration<double>(config.timeout).count();
  fields["device"] = name_of_device(config.device, config.device_index);
  return fields;
}

}  // namespace fanfold::python
