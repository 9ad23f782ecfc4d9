// SPDX-License-Identifier: Apache-2.0

// AllToAll.combine, its two halves, and what is done to rows before it.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "bind.h"
#include "exchange.h"
#include "fanfold/error.h"

namespace fanfold::python {
namespace {

using namespace nanobind::literals;
using Seconds = std::optional<double>;
using nogil = nb::gil_scoped_release;

nb::object combine_buffer(BoundAllToAll& self, const Round& handle,
                          std::optional<std::int64_t> hidden, nb::handle dtype) {
  std::optional<DType> type;
  if (!dtype.is_none()) type = to_dtype(dtype);
  const TensorView view =
      without_gil([&] { return self.core.combine_buffer(handle, hidden, type); });
  return self.tensor(view, self.source.framework);
}

void combine_send(BoundAllToAll& self, nb::handle y, const Round& handle, bool release,
                  nb::handle stream) {
  Arguments args = self.arguments();
  CombineInputs inputs;
  inputs.y = args.view(y, "y");
  inputs.release = release;
  inputs.stream = self.stream_of(stream);
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
  const AllToAllConfig& config = self.core.config();
  return self.new_tensor(config.combine_dtype.value_or(config.dtype), {num_tokens, hidden},
                         self.source.framework, args, inputs.out);
}

nb::object combine_recv(BoundAllToAll& self, const Round& handle, nb::handle out,
                        nb::handle topk_weights, Seconds timeout_s, nb::handle stream) {
  Arguments args = self.arguments();
  CombineInputs inputs;
  const auto [num_tokens, hidden] = without_gil([&] { return self.core.out_shape(handle); });
  const nb::object result = out_tensor(self, out, num_tokens, hidden, args, inputs);
  inputs.topk_weights = args.view(topk_weights, "topk_weights");
  inputs.timeout = to_timeout(timeout_s);
  inputs.stream = self.stream_of(stream);
  {
    const nogil released;
    self.core.combine_recv(inputs, handle);
  }
  return result;
}

nb::object sanitize(BoundAllToAll& self, nb::handle ids, nb::handle counts,
                    std::int64_t invalid_expert_id, const std::string& policy, nb::handle out,
                    nb::handle stream) {
  Arguments args = self.arguments();
  TensorType type;
  const TensorView in = args.views(nb::make_tuple(ids), "ids", type)[0];
  const TensorView rows = args.view(counts, "counts");
  TensorView target;
  nb::object result = nb::borrow(out);
  if (out.is_none()) {
    result = self.new_tensor(in.dtype, shape_of(in), type.framework, args, target);
  } else {
    target = args.output(out, "out");
  }
  const SanitizePolicy how = sanitize_policy_from_name(policy);
  const std::optional<void*> on = self.first_stream_of(stream, type);
  const nogil released;
  self.core.sanitize(in, rows, invalid_expert_id, how, target, on);
  return result;
}

}  // namespace

nb::object combine(BoundAllToAll& self, const Round& round, nb::handle y, nb::handle out,
                   nb::handle topk_weights, bool release, std::optional<double> timeout_s,
                   nb::handle stream) {
  Arguments args = self.arguments();
  CombineInputs inputs;
  inputs.y = args.view(y, "y");
  const std::int64_t hidden =
      inputs.y.ndim > 0 ? inputs.y.shape[static_cast<std::size_t>(inputs.y.ndim - 1)] : 0;
  std::int64_t num_tokens = 0;
  if (out.is_none()) num_tokens = without_gil([&] { return self.core.out_shape(round).first; });
  const nb::object result = out_tensor(self, out, num_tokens, hidden, args, inputs);
  inputs.topk_weights = args.view(topk_weights, "topk_weights");
  inputs.release = release;
  inputs.timeout = to_timeout(timeout_s);
  inputs.stream = self.stream_of(stream);
  {
    const nogil released;
    self.core.combine(inputs, round);
  }
  return result;
}

void bind_combine(nb::class_<BoundAllToAll>& c) {
  c.def(
       "combine_buffer", &combine_buffer, "handle"_a, "hidden"_a = nb::none(),
       "dtype"_a = nb::none(),
       nb::sig("def combine_buffer(self, handle: Round, hidden: int | None = None, dtype: object "
               "= None) -> typing.Any"),
       "Where the experts of a round may write their results so that combine copies nothing:\n"
       "the layout's leading dimensions ([R, m], [sum of T], [L, R*m], [N] or [N']), then H.\n"
       "Defaults: the configured hidden and combine_dtype. Valid until the combine of that handle\n"
       "is called.")
      .def(
          "combine",
          [](BoundAllToAll& self, nb::handle y, const Round& handle, nb::handle out,
             nb::handle topk_weights, bool release, Seconds timeout_s, nb::handle stream) {
            return combine(self, handle, y, out, topk_weights, release, timeout_s, stream);
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
    out: ``[T, H]`` float32, float16 or bfloat16, overwritten; None makes one of combine_dtype (on a
        GPU for torch tensors only). On a GPU T is the number of rows that dispatch was given.
    topk_weights: weighting origin: ``[T, K]`` float32 in place of those of dispatch.
    release: False keeps the round open for another combine; equal on all ranks.
    timeout_s: deadline of this call in seconds; on a GPU, of each wait of its kernels.
    stream: as of dispatch; None and not torch's: that of the round's dispatch.

Returns:
    ``out``.

Raises:
    InvalidArgument: y, out or topk_weights does not fit; the round is still open.
    InvalidState: the round is not received, or has ended.
    PeerTimeout, PeerAborted, PeerLost: see the class.

Stream:
    CPU: runs and waits on the calling thread; the GIL is released. GPU: enqueues on ``stream``, never
    synchronizes; ``y`` and ``out`` must stay until the stream has passed it. Graph capture: of the
    round's dispatch only.)doc")
      .def("combine_send", &combine_send, "y"_a.none(), "handle"_a, "release"_a = true,
           nb::kw_only(), "stream"_a = nb::none(),
           nb::sig("def combine_send(self, y: object, handle: Round, release: bool = True, *, "
                   "stream: object = None) -> None"),
           "First half of combine; never waits. Stream as combine.")
      .def("combine_recv", &combine_recv, "handle"_a, "out"_a = nb::none(), nb::kw_only(),
           "topk_weights"_a = nb::none(), "timeout_s"_a = nb::none(), "stream"_a = nb::none(),
           nb::sig("def combine_recv(self, handle: Round, out: typing.Any = None, *, topk_weights: "
                   "object = None, timeout_s: float | None = None, stream: object = None) -> "
                   "typing.Any"),
           "Second half of combine; waits for every active rank. Stream as combine.")
      .def(
          "release",
          [](BoundAllToAll& self, const Round& handle, nb::handle stream) {
            const std::optional<void*> on = self.stream_of(stream);
            const nogil released;
            self.core.release(handle, on);
          },
          "handle"_a, nb::kw_only(), "stream"_a = nb::none(),
          nb::sig("def release(self, handle: Round, *, stream: object = None) -> None"),
          "Ends a round without a combine; every rank must. Does not wait. GPU: enqueues on\n"
          "``stream`` (as combine), which then waits until every active rank has left the round.")
      .def("sanitize", &sanitize, "ids"_a.none(), "counts"_a.none(), "invalid_expert_id"_a = -1,
           "policy"_a = "padding", "out"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none(),
           nb::sig("def sanitize(self, ids: object, counts: object, invalid_expert_id: int = -1, "
                   "policy: str = 'padding', out: typing.Any = None, *, stream: object = None) -> "
                   "typing.Any"),
           R"doc(Overwrite ids that no kernel should see.

Args:
    ids: ``[R, m, K]`` (or ``[rows, K]``) int16, int32, int64 or uint32.
    counts: ``[R]`` (or ``[1]``) int32: rows with a token.
    invalid_expert_id: what is written.
    policy: "padding": rows without a token; "padding_and_non_local": also experts of other ranks;
        "to_local": global id -> local id, all others invalid.
    out: shape and dtype of ids, may be ids; None makes a new tensor (on a GPU for torch's only).
    stream: on a GPU, as of dispatch.

Returns:
    ``out``.

Stream:
    CPU: runs on the calling thread. GPU: enqueues on ``stream``, never synchronizes; counts outside
    of [0, m] are taken for the nearest number inside. Graph capture: allowed.)doc");
}

}  // namespace fanfold::python
