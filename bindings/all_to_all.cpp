// SPDX-License-Identifier: Apache-2.0
#include "fanfold/all_to_all.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "exchange.h"
#include "fanfold/error.h"

namespace fanfold::python {
namespace {

using namespace nanobind::literals;
using Seconds = std::optional<double>;
using nogil = nb::gil_scoped_release;
using Counts = std::optional<std::vector<std::int64_t>>;

DispatchInputs to_inputs(Arguments& args, Framework& framework, nb::handle topk_ids,
                         nb::handle payloads, nb::handle topk_weights,
                         std::optional<std::int64_t> round_max_tokens, const Routing* routing,
                         const Counts& num_tokens_per_rank, nb::handle num_tokens,
                         std::optional<std::int64_t> invalid_expert_id, Seconds timeout_s,
                         nb::handle stream) {
  check_stream(stream);
  DispatchInputs inputs;
  inputs.topk_ids = args.view(topk_ids, "topk_ids");
  inputs.payloads = args.views(payloads, "payloads", framework);
  inputs.topk_weights = args.view(topk_weights, "topk_weights");
  inputs.round_max_tokens = round_max_tokens;
  if (routing != nullptr) inputs.routing = *routing;
  inputs.num_tokens_per_rank = num_tokens_per_rank;
  inputs.num_tokens = args.view(num_tokens, "num_tokens");
  inputs.invalid_expert_id = invalid_expert_id;
  inputs.timeout = to_timeout(timeout_s);
  return inputs;
}

nb::object wrap(nb::handle self, Received received, Framework framework) {
  return nb::cast(BoundReceived{std::move(received), nb::borrow(self), framework, {}});
}

nb::object dispatch(nb::handle self, nb::handle topk_ids, nb::handle payloads,
                    nb::handle topk_weights, std::optional<std::int64_t> round_max_tokens,
                    const Routing* routing, const Counts& num_tokens_per_rank,
                    nb::handle num_tokens, std::optional<std::int64_t> invalid_expert_id,
                    Seconds timeout_s, nb::handle stream) {
  auto& bound = *nb::inst_ptr<BoundAllToAll>(self);
  Arguments args(bound.types);
  const DispatchInputs inputs =
      to_inputs(args, bound.framework, topk_ids, payloads, topk_weights, round_max_tokens, routing,
                num_tokens_per_rank, num_tokens, invalid_expert_id, timeout_s, stream);
  Received received;
  {
    const nogil released;
    received = bound.core.dispatch(inputs);
  }
  return wrap(self, std::move(received), bound.framework);
}

Round dispatch_send(BoundAllToAll& bound, nb::handle topk_ids, nb::handle payloads,
                    nb::handle topk_weights, std::optional<std::int64_t> round_max_tokens,
                    const Routing* routing, const Counts& num_tokens_per_rank,
                    nb::handle num_tokens, std::optional<std::int64_t> invalid_expert_id,
                    Seconds timeout_s, nb::handle stream) {
  Arguments args(bound.types);
  const DispatchInputs inputs =
      to_inputs(args, bound.framework, topk_ids, payloads, topk_weights, round_max_tokens, routing,
                num_tokens_per_rank, num_tokens, invalid_expert_id, timeout_s, stream);
  const nogil released;
  return bound.core.dispatch_send(inputs);
}

nb::object dispatch_recv(nb::handle self, const Round& handle, Seconds timeout_s) {
  auto& bound = *nb::inst_ptr<BoundAllToAll>(self);
  Received received;
  {
    const nogil released;
    received = bound.core.dispatch_recv(handle, to_timeout(timeout_s));
  }
  return wrap(self, std::move(received), bound.framework);
}

nb::object combine_buffer(BoundAllToAll& self, const Round& handle,
                          std::optional<std::int64_t> hidden, nb::handle dtype) {
  std::optional<DType> type;
  if (!dtype.is_none()) type = to_dtype(dtype);
  return self.tensor(self.core.combine_buffer(handle, hidden, type), self.framework);
}

void combine_send(BoundAllToAll& self, nb::handle y, const Round& handle, bool release) {
  Arguments args(self.types);
  CombineInputs inputs;
  inputs.y = args.view(y, "y");
  inputs.release = release;
  const nogil released;
  self.core.combine_send(inputs, handle);
}

/// `out` of a combine: given, or made in the framework of the payloads.
nb::object out_tensor(BoundAllToAll& self, nb::handle out, std::int64_t num_tokens,
                      std::int64_t hidden, Arguments& args, CombineInputs& inputs) {
  if (!out.is_none()) {
    inputs.out = args.output(out, "out");
    return nb::borrow(out);
  }
  return new_tensor(*self.core.config().combine_dtype, {num_tokens, hidden}, self.framework,
                    inputs.out);
}

nb::object combine_recv(BoundAllToAll& self, const Round& handle, nb::handle out,
                        nb::handle topk_weights, Seconds timeout_s) {
  Arguments args(self.types);
  CombineInputs inputs;
  const auto [num_tokens, hidden] = self.core.out_shape(handle);
  const nb::object result = out_tensor(self, out, num_tokens, hidden, args, inputs);
  inputs.topk_weights = args.view(topk_weights, "topk_weights");
  inputs.timeout = to_timeout(timeout_s);
  {
    const nogil released;
    self.core.combine_recv(inputs, handle);
  }
  return result;
}

/// A field of the configuration. @throws InvalidArgument  naming it
template <class Field>
Field to_field(const nb::object& value, const char* name) {
  try {
    return nb::cast<Field>(value);
  } catch (const std::exception&) {
    PyErr_Clear();
    constexpr const char* kExpected = std::is_same_v<Field, std::string> ? "a string"
                                      : std::is_same_v<Field, bool>      ? "a bool"
                                      : std::is_floating_point_v<Field>  ? "a number"
                                      : std::is_same_v<Field, std::vector<std::int32_t>>
                                          ? "linear, round_robin or a list of ranks"
                                          : "an integer that its type holds";
    throw InvalidArgument(std::string(name) + ": expected " + kExpected + ", got " +
                          nb::cast<std::string>(nb::repr(value)));
  }
}

AllToAllConfig make_config(const nb::dict& fields) {
  AllToAllConfig config;
  const auto set = [&](const char* name, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    if (fields.contains(name)) field = to_field<Field>(fields[name], name);
  };
  const auto text = [&](const char* name) { return to_field<std::string>(fields[name], name); };
  set("num_experts", config.num_experts);
  set("top_k", config.top_k);
  set("max_tokens_per_rank", config.max_tokens_per_rank);
  set("hidden", config.hidden);
  set("extra_bytes_per_token", config.extra_bytes_per_token);
  set("dispatch_row_bytes", config.dispatch_row_bytes);
  set("combine_row_bytes", config.combine_row_bytes);
  set("max_in_flight", config.max_in_flight);
  set("deterministic", config.deterministic);
  set("name", config.name);
  set("debug_poison", config.debug_poison);
  config.dtype = to_dtype(fields["dtype"]);
  config.strategy = strategy_from_name(text("strategy"));
  config.layout = layout_from_name(text("layout"));
  config.weighting = weighting_from_name(text("weighting"));
  config.check_ids = check_ids_from_name(text("check_ids"));
  config.timeout = *to_timeout(to_field<double>(fields["timeout_s"], "timeout_s"));
  if (fields.contains("combine_dtype")) config.combine_dtype = to_dtype(fields["combine_dtype"]);
  const nb::object placement = fields["placement"];
  if (nb::isinstance<nb::str>(placement)) {
    config.placement = placement_from_name(nb::cast<std::string>(placement));
  } else {
    config.placement =
        Placement::from_table(to_field<std::vector<std::int32_t>>(placement, "placement"));
  }
  TestKnobs& knobs = config.test_knobs;
  set("row_guard_bytes", knobs.row_guard_bytes);
  set("first_epoch", knobs.first_epoch);
  set("delay_seed", knobs.delay_seed);
  set("kill_at_step", knobs.kill_at_step);
  set("stop_at_step", knobs.stop_at_step);
  set("isa", knobs.isa);
  set("streaming_stores", knobs.streaming_stores);
  return config;
}

nb::object sanitize(BoundAllToAll& self, nb::handle ids, nb::handle counts,
                    std::int64_t invalid_expert_id, const std::string& policy, nb::handle out) {
  Arguments args(self.types);
  const TensorView in = args.view(ids, "ids");
  const TensorView rows = args.view(counts, "counts");
  TensorView target;
  nb::object result = nb::borrow(out);
  if (out.is_none()) {
    result = new_tensor(in.dtype, shape_of(in), args.framework_of(ids), target);
  } else {
    target = args.output(out, "out");
  }
  self.core.sanitize(in, rows, invalid_expert_id, sanitize_policy_from_name(policy), target);
  return result;
}

using Class = nb::class_<BoundAllToAll>;

void bind_dispatch(Class& c) {
  c.def("dispatch", &dispatch, "topk_ids"_a.none(), "payloads"_a.none(), nb::kw_only(),
        "topk_weights"_a = nb::none(), "round_max_tokens"_a = nb::none(), "routing"_a = nb::none(),
        "num_tokens_per_rank"_a = nb::none(), "num_tokens"_a = nb::none(),
        "invalid_expert_id"_a = nb::none(), "timeout_s"_a = nb::none(), "stream"_a = nb::none(),
        nb::sig("def dispatch(self, topk_ids: object, payloads: typing.Sequence[typing.Any], *, "
                "topk_weights: object = None, round_max_tokens: int | None = None, routing: "
                "Routing | None = None, num_tokens_per_rank: typing.Sequence[int] | None = None, "
                "num_tokens: object = None, invalid_expert_id: int | None = None, timeout_s: float "
                "| None = None, stream: object = None) -> Received"),
        R"doc(Send each token once to each rank that hosts one of its experts, and receive.

Rows keep the order (source rank, source token). Inputs are only read, and only until this returns.

Args:
    topk_ids: ``[T, K]`` int16, int32, int64 or uint32 global expert ids, any row stride; a negative
        id selects no expert. None with ``routing``, or for layout gathered.
    payloads: 1 to 16 tensors ``[T, ...]`` of any dtype; together at most dispatch_row_bytes a token.
    topk_weights: ``[T, K]`` float32.
    round_max_tokens: m with T <= m <= max_tokens_per_rank, equal on all ranks; default the latter.
    routing: send along the rows of an earlier dispatch.
    num_tokens_per_rank: every rank's T where known; verified.
    num_tokens: one int32; only the first n rows are tokens.
    invalid_expert_id: written to the ids of rows without a token; default -1.
    timeout_s: deadline of this call in seconds.
    stream: not used for CPU tensors.

Returns:
    A Received with views of memory that this object owns.

Raises:
    InvalidArgument: an argument does not fit (nothing was sent; a corrected call continues the
        round), or the ranks' calls differ (call reset()).
    InvalidState: every slot holds an open round.
    PeerTimeout, PeerAborted, PeerLost: see the class.

Stream:
    Runs and waits on the calling thread; the GIL is released.)doc")
      .def(
          "dispatch_send", &dispatch_send, "topk_ids"_a.none(), "payloads"_a.none(), nb::kw_only(),
          "topk_weights"_a = nb::none(), "round_max_tokens"_a = nb::none(),
          "routing"_a = nb::none(), "num_tokens_per_rank"_a = nb::none(),
          "num_tokens"_a = nb::none(), "invalid_expert_id"_a = nb::none(),
          "timeout_s"_a = nb::none(), "stream"_a = nb::none(),
          nb::sig("def dispatch_send(self, topk_ids: object, payloads: "
                  "typing.Sequence[typing.Any], *, topk_weights: object = None, round_max_tokens: "
                  "int | None = None, routing: Routing | None = None, num_tokens_per_rank: "
                  "typing.Sequence[int] | None = None, num_tokens: object = None, "
                  "invalid_expert_id: int | None = None, timeout_s: float | None = None, stream: "
                  "object = None) -> Round"),
          "First half of dispatch; never waits for a peer, except for a slot whose previous round\n"
          "ended by release() while a peer still holds it. Arguments as dispatch.\n\n"
          "Raises:\n    Unsupported: the strategy has no two phases.")
      .def("dispatch_recv", &dispatch_recv, "handle"_a, "timeout_s"_a = nb::none(),
           nb::sig("def dispatch_recv(self, handle: Round, timeout_s: float | None = None) -> "
                   "Received"),
           "Second half of dispatch; waits for every active rank.");
}

void bind_combine(Class& c) {
  c.def(
       "combine_buffer", &combine_buffer, "handle"_a, "hidden"_a = nb::none(),
       "dtype"_a = nb::none(),
       nb::sig("def combine_buffer(self, handle: Round, hidden: int | None = None, dtype: object "
               "= None) -> typing.Any"),
       "Where the experts of a round may write their results so that combine copies nothing:\n"
       "[R, m, H], [sum of T, H] or [L, R*m, H]. Valid until the combine of that handle is called.")
      .def(
          "combine",
          [](BoundAllToAll& self, nb::handle y, const Round& handle, nb::handle out,
             nb::handle topk_weights, bool release, Seconds timeout_s, nb::handle stream) {
            check_stream(stream);
            return combine(self, handle, y, out, topk_weights, release, timeout_s);
          },
          "y"_a.none(), "handle"_a, "out"_a = nb::none(), nb::kw_only(),
          "topk_weights"_a = nb::none(), "release"_a = true, "timeout_s"_a = nb::none(),
          "stream"_a = nb::none(),
          nb::sig("def combine(self, y: object, handle: Round, out: typing.Any = None, *, "
                  "topk_weights: object = None, release: bool = True, timeout_s: float | None = "
                  "None, stream: object = None) -> typing.Any"),
          R"doc(Add each token's rows; a token without an expert becomes zeros.

Sums are taken in the stated order: k ascending within a rank, then ranks ascending, in float32.

Args:
    y: the experts' rows in the layout of the dispatch, float32, float16 or bfloat16. At this round's
        combine_buffer it is used in place; outside this object's memory it is staged.
    handle: of the dispatch.
    out: ``[T, H]`` float32, float16 or bfloat16, overwritten; None makes one of combine_dtype.
    topk_weights: weighting origin: ``[T, K]`` float32 in place of those of dispatch.
    release: False keeps the round open for another combine; equal on all ranks.
    timeout_s: deadline of this call in seconds.

Returns:
    ``out``.

Raises:
    InvalidArgument: y, out or topk_weights does not fit; the round is still open.
    InvalidState: the round is not received, or has ended.
    PeerTimeout, PeerAborted, PeerLost: see the class.

Stream:
    Runs and waits on the calling thread; the GIL is released.)doc")
      .def(
          "combine_send", &combine_send, "y"_a.none(), "handle"_a, "release"_a = true,
          nb::sig("def combine_send(self, y: object, handle: Round, release: bool = True) -> None"),
          "First half of combine; never waits.")
      .def("combine_recv", &combine_recv, "handle"_a, "out"_a = nb::none(), nb::kw_only(),
           "topk_weights"_a = nb::none(), "timeout_s"_a = nb::none(),
           nb::sig("def combine_recv(self, handle: Round, out: typing.Any = None, *, topk_weights: "
                   "object = None, timeout_s: float | None = None) -> typing.Any"),
           "Second half of combine; waits for every active rank.")
      .def(
          "release",
          [](BoundAllToAll& self, const Round& handle) {
            const nogil released;
            self.core.release(handle);
          },
          "handle"_a, "Ends a round without a combine; every rank must. Does not wait.")
      .def("sanitize", &sanitize, "ids"_a.none(), "counts"_a.none(), "invalid_expert_id"_a = -1,
           "policy"_a = "padding", "out"_a = nb::none(),
           nb::sig("def sanitize(self, ids: object, counts: object, invalid_expert_id: int = -1, "
                   "policy: str = 'padding', out: typing.Any = None) -> typing.Any"),
           R"doc(Overwrite ids that no kernel should see.

Args:
    ids: ``[R, m, K]`` (or ``[rows, K]``) int16, int32, int64 or uint32.
    counts: ``[R]`` (or ``[1]``) int32: rows with a token.
    invalid_expert_id: what is written.
    policy: "padding": rows without a token; "padding_and_non_local": also experts of other ranks;
        "to_local": global id -> local id, all others invalid.
    out: shape and dtype of ids, may be ids; None makes a new tensor.

Returns:
    ``out``.)doc");
}

void bind_state(Class& c) {
  c.def(
       "set_active_mask",
       [](BoundAllToAll& self, const std::vector<bool>& mask) { self.core.set_active_mask(mask); },
       "mask"_a,
       "Leaves ranks out from the next dispatch on: one bool per rank, equal on all active ranks.")
      .def(
          "abort", [](BoundAllToAll& self, const std::string& reason) { self.core.abort(reason); },
          "reason"_a, "Makes the waits of all ranks raise PeerAborted(rank, reason); any thread.")
      .def(
          "reset",
          [](BoundAllToAll& self, Seconds timeout_s) {
            const nogil released;
            self.core.reset(to_timeout(timeout_s));
          },
          nb::kw_only(), "timeout_s"_a = nb::none(),
          "Brings a failed AllToAll back and ends its open rounds; collective, waits.")
      .def(
          "close",
          [](BoundAllToAll& self, Seconds timeout_s) {
            self.cache.clear();
            self.memory.reset();
            const nogil released;
            self.core.close(to_timeout(timeout_s));
          },
          nb::kw_only(), "timeout_s"_a = nb::none(),
          "Waits until every rank has closed or left, then gives the workspace back. Idempotent.")
      .def(
          "check", [](const BoundAllToAll& self) { self.core.check(); },
          "Raises what the last failed call raised, or that a peer aborted or left. Never waits.")
      .def(
          "feasible",
          [](const BoundAllToAll& self, std::int64_t round_max_tokens, std::int64_t row_bytes,
             const std::string& layout) {
            const Feasibility answer =
                self.core.feasible(round_max_tokens, row_bytes, layout_from_name(layout));
            return std::make_pair(answer.feasible, answer.reason);
          },
          "round_max_tokens"_a, "row_bytes"_a, "layout"_a,
          "(True, reason) or (False, reason): whether a dispatch would fit.")
      .def(
          "choice", [](const BoundAllToAll& self) { return self.core.choice(); },
          "Which strategy serves, and why.");
  c.def_prop_ro("rank", [](const BoundAllToAll& self) { return self.core.rank(); })
      .def_prop_ro("num_ranks", [](const BoundAllToAll& self) { return self.core.num_ranks(); })
      .def_prop_ro(
          "local_experts", [](const BoundAllToAll& self) { return self.core.local_experts(); },
          "Global ids of this rank's experts; position = local id.")
      .def_prop_ro("active_mask", [](const BoundAllToAll& self) { return self.core.active_mask(); })
      .def_prop_ro("is_closed", [](const BoundAllToAll& self) { return self.core.is_closed(); })
      .def_prop_ro("is_failed", [](const BoundAllToAll& self) { return self.core.is_failed(); })
      .def_prop_ro(
          "num_dropped_ids", [](const BoundAllToAll& self) { return self.core.num_dropped_ids(); },
          "Ids >= num_experts that were dropped since creation.")
      .def_prop_ro(
          "workspace_bytes", [](const BoundAllToAll& self) { return self.core.workspace_bytes(); },
          "Bytes held by this rank: symmetric and private.")
      .def_prop_ro(
          "metainfo", [](const BoundAllToAll& self) { return self.core.metainfo(); },
          "The table of byte offsets into the workspace.")
      .def_prop_ro(
          "capabilities", [](const BoundAllToAll& self) { return self.core.capabilities(); },
          "What the strategy can do.");
}

void bind_records(nb::module_& m) {
  nb::class_<Metainfo>(m, "Metainfo", "Names and values of an AllToAll's offset table.")
      .def("__getitem__",
           [](const Metainfo& self, const std::string& name) { return self.at(name); })
      .def("__len__", [](const Metainfo& self) { return self.entries().size(); })
      .def("__contains__",
           [](const Metainfo& self, const std::string& name) {
             for (const Metainfo::Entry& entry : self.entries()) {
               if (entry.first == name) return true;
             }
             return false;
           })
      .def("items", [](const Metainfo& self) { return self.entries(); })
      .def("keys", [](const Metainfo& self) {
        std::vector<std::string> names;
        for (const Metainfo::Entry& entry : self.entries()) names.push_back(entry.first);
        return names;
      });

  const auto layouts = [](const Capabilities& self) {
    std::vector<std::string> names;
    for (const Layout layout : self.layouts) names.emplace_back(name_of(layout));
    return names;
  };
  const auto id_dtypes = [](const Capabilities& self) {
    std::vector<std::string> names;
    for (const DType dtype : self.id_dtypes) names.emplace_back(name_of(dtype));
    return names;
  };
  nb::class_<Capabilities>(m, "Capabilities", "What a strategy can do.")
      .def_prop_ro("strategy", [](const Capabilities& self) { return name_of(self.strategy); })
      .def_prop_ro("layouts", layouts)
      .def_prop_ro("id_dtypes", id_dtypes)
      .def_ro("two_phase", &Capabilities::two_phase)
      .def_ro("graph_safe", &Capabilities::graph_safe)
      .def_ro("needs_uniform_tokens", &Capabilities::needs_uniform_tokens)
      .def_ro("deterministic", &Capabilities::deterministic)
      .def_ro("rank_mask", &Capabilities::rank_mask)
      .def_ro("max_payloads", &Capabilities::max_payloads)
      .def_ro("max_top_k", &Capabilities::max_top_k)
      .def_ro("max_ranks", &Capabilities::max_ranks);
}

}  // namespace

nb::object combine(BoundAllToAll& self, const Round& round, nb::handle y, nb::handle out,
                   nb::handle topk_weights, bool release, std::optional<double> timeout_s) {
  Arguments args(self.types);
  CombineInputs inputs;
  inputs.y = args.view(y, "y");
  const std::int64_t hidden =
      inputs.y.ndim > 0 ? inputs.y.shape[static_cast<std::size_t>(inputs.y.ndim - 1)] : 0;
  const std::int64_t num_tokens = out.is_none() ? self.core.out_shape(round).first : 0;
  const nb::object result = out_tensor(self, out, num_tokens, hidden, args, inputs);
  inputs.topk_weights = args.view(topk_weights, "topk_weights");
  inputs.release = release;
  inputs.timeout = to_timeout(timeout_s);
  {
    const nogil released;
    self.core.combine(inputs, round);
  }
  return result;
}

void check_stream(nb::handle stream) {
  if (!stream.is_none()) {
    throw InvalidArgument("stream: expected None for CPU tensors, got a stream");
  }
}

void bind_all_to_all(nb::module_& m) {
  bind_records(m);
  Class c(m, "AllToAll", nb::is_weak_referenceable());
  c.def(
      "__init__",
      [](BoundAllToAll* self, Communicator& communicator, const nb::dict& config,
         Allocator* allocator) {
        const AllToAllConfig made = make_config(config);
        const nogil released;
        new (self) BoundAllToAll(communicator, made, allocator);
      },
      "communicator"_a, "config"_a, "allocator"_a = nb::none(),
      nb::sig("def __init__(self, communicator: Communicator, config: dict[str, typing.Any], "
              "allocator: Allocator | None = None) -> None"));
  c.def_static(
      "required_bytes_of",
      [](int num_ranks, const nb::dict& config) {
        return AllToAll::required_bytes(num_ranks, make_config(config));
      },
      "num_ranks"_a, "config"_a,
      nb::sig("def required_bytes_of(num_ranks: int, config: dict[str, typing.Any]) -> int"));
  bind_dispatch(c);
  bind_combine(c);
  bind_state(c);
}

}  // namespace fanfold::python
