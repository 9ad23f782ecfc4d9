// SPDX-License-Identifier: Apache-2.0

// AllToAll.dispatch and its two halves.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "exchange.h"

namespace fanfold::python {
namespace {

using namespace nanobind::literals;
using Seconds = std::optional<double>;
using nogil = nb::gil_scoped_release;
using Counts = std::optional<std::vector<std::int64_t>>;

/// The arguments of dispatch and dispatch_send as Python gives them.
struct Given {
  nb::handle topk_ids, payloads, topk_weights;
  std::optional<std::int64_t> round_max_tokens;
  const Routing* routing;
  const Counts& num_tokens_per_rank;
  nb::handle num_tokens;
  std::optional<std::int64_t> invalid_expert_id;
  Seconds timeout_s;
  nb::handle stream;
};

DispatchInputs to_inputs(BoundAllToAll& bound, Arguments& args, const Given& given) {
  DispatchInputs inputs;
  inputs.topk_ids = args.view(given.topk_ids, "topk_ids");
  inputs.payloads = args.views(given.payloads, "payloads", bound.source);
  inputs.topk_weights = args.view(given.topk_weights, "topk_weights");
  inputs.round_max_tokens = given.round_max_tokens;
  if (given.routing != nullptr) inputs.routing = *given.routing;
  inputs.num_tokens_per_rank = given.num_tokens_per_rank;
  inputs.num_tokens = args.view(given.num_tokens, "num_tokens");
  inputs.invalid_expert_id = given.invalid_expert_id;
  inputs.timeout = to_timeout(given.timeout_s);
  inputs.stream = bound.first_stream_of(given.stream, bound.source);
  return inputs;
}

nb::object wrap(nb::handle self, Received received) {
  const Framework framework = nb::inst_ptr<BoundAllToAll>(self)->source.framework;
  return nb::cast(BoundReceived{std::move(received), nb::borrow(self), framework, {}});
}

nb::object dispatch(nb::handle self, nb::handle topk_ids, nb::handle payloads,
                    nb::handle topk_weights, std::optional<std::int64_t> round_max_tokens,
                    const Routing* routing, const Counts& num_tokens_per_rank,
                    nb::handle num_tokens, std::optional<std::int64_t> invalid_expert_id,
                    Seconds timeout_s, nb::handle stream) {
  auto& bound = *nb::inst_ptr<BoundAllToAll>(self);
  Arguments args = bound.arguments();
  const DispatchInputs inputs =
      to_inputs(bound, args,
                {topk_ids, payloads, topk_weights, round_max_tokens, routing, num_tokens_per_rank,
                 num_tokens, invalid_expert_id, timeout_s, stream});
  Received received;
  {
    const nogil released;
    received = bound.core.dispatch(inputs);
  }
  return wrap(self, std::move(received));
}

Round dispatch_send(BoundAllToAll& bound, nb::handle topk_ids, nb::handle payloads,
                    nb::handle topk_weights, std::optional<std::int64_t> round_max_tokens,
                    const Routing* routing, const Counts& num_tokens_per_rank,
                    nb::handle num_tokens, std::optional<std::int64_t> invalid_expert_id,
                    Seconds timeout_s, nb::handle stream) {
  Arguments args = bound.arguments();
  const DispatchInputs inputs =
      to_inputs(bound, args,
                {topk_ids, payloads, topk_weights, round_max_tokens, routing, num_tokens_per_rank,
                 num_tokens, invalid_expert_id, timeout_s, stream});
  const nogil released;
  return bound.core.dispatch_send(inputs);
}

nb::object dispatch_recv(nb::handle self, const Round& handle, Seconds timeout_s,
                         nb::handle stream) {
  auto& bound = *nb::inst_ptr<BoundAllToAll>(self);
  const std::optional<void*> on = bound.stream_of(stream);
  Received received;
  {
    const nogil released;
    received = bound.core.dispatch_recv(handle, to_timeout(timeout_s), on);
  }
  return wrap(self, std::move(received));
}

}  // namespace

void bind_dispatch(nb::class_<BoundAllToAll>& c) {
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

Rows keep the order (source rank, source token). Inputs are only read, and only until this returns;
on a GPU, until the stream has passed the call.

Args:
    topk_ids: ``[T, K]`` int16, int32, int64 or uint32 global expert ids, any row stride; a negative
        id selects no expert. None with ``routing``, or for layout gathered.
    payloads: 1 to 16 tensors ``[T, ...]`` of any dtype; together at most dispatch_row_bytes a token.
        With a dispatch_wire the first is ``[T, H]`` float32, float16 or bfloat16.
    topk_weights: ``[T, K]`` float32.
    round_max_tokens: m with T <= m <= max_tokens_per_rank, equal on all ranks; default the latter.
    routing: send along the rows of an earlier dispatch.
    num_tokens_per_rank: every rank's T where known; verified. Not on a GPU.
    num_tokens: one int32; only the first n rows are tokens. On a GPU it is read when the work runs:
        a graph replays with another number.
    invalid_expert_id: written to the ids of rows without a token; default -1.
    timeout_s: deadline of this call in seconds; on a GPU, of each wait of its kernels.
    stream: on a GPU, where the work goes: an int (the address of a cudaStream_t, 0 for the legacy
        default stream), or an object with ``cuda_stream`` or ``__cuda_stream__``. None: the current
        stream of the payloads' framework, for torch tensors; others must give it. Not on the CPU.

Returns:
    A Received with views of memory that this object owns.

Raises:
    InvalidArgument: an argument does not fit (nothing was sent; a corrected call continues the
        round), or the ranks' calls differ (call reset()).
    InvalidState: every slot holds an open round.
    CapacityExceeded: high_throughput: a rank has no memory for as many rows; on every rank, before
        a row moves; the round has not begun.
    PeerTimeout, PeerAborted, PeerLost: see the class.

Stream:
    CPU: runs and waits on the calling thread; the GIL is released. GPU: enqueues on ``stream``, never
    synchronizes; what kernels report is raised by the next call that looks. Tensors must be ready on
    ``stream``: nothing else orders them. Graph capture: allowed; the round must end in it.)doc")
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
          "First half of dispatch; never waits for a peer, except (CPU) for a slot whose previous\n"
          "round ended by release() while a peer still holds it. Arguments as dispatch.\n\n"
          "Raises:\n    Unsupported: the strategy has no two phases.")
      .def("dispatch_recv", &dispatch_recv, "handle"_a, "timeout_s"_a = nb::none(), nb::kw_only(),
           "stream"_a = nb::none(),
           nb::sig("def dispatch_recv(self, handle: Round, timeout_s: float | None = None, *, "
                   "stream: object = None) -> Received"),
           "Second half of dispatch; waits for every active rank. GPU: the wait is enqueued on\n"
           "``stream``; None: as of dispatch, but other frameworks' is that of dispatch_send. "
           "Never\n"
           "synchronizes. Graph capture: of the round's dispatch_send only.");
}

}  // namespace fanfold::python
