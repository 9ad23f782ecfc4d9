// SPDX-License-Identifier: Apache-2.0
#include "fanfold/received.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "exchange.h"
#include "fanfold/error.h"

namespace fanfold::python {
namespace {

using namespace nanobind::literals;

nb::object payloads_of(BoundReceived& self) {
  const std::vector<TensorView>& views = without_gil(
      [&]() -> const std::vector<TensorView>& { return self.core.payloads(); });  // if it is open
  if (self.payloads.is_valid()) return self.payloads;
  nb::list list;
  for (const TensorView& view : views) list.append(self.tensor(view));
  self.payloads = list;
  return self.payloads;
}

void release_round(BoundReceived& self, nb::handle stream) {
  const std::optional<void*> on = self.owner().stream_of(stream);
  const nb::gil_scoped_release released;
  self.owner().core.release(self.core.handle(), on);
}

void leave(BoundReceived& self, nb::handle error) {
  if (!without_gil([&] { return self.core.is_open(); })) return;
  if (error.is_none()) {
    release_round(self, nb::none());
  } else {
    without_gil([&] { self.owner().core.abort("an exception left the round's with block"); });
  }
}

template <class Member>
auto tensor_of(Member member) {
  return [member](BoundReceived& self) {
    return self.tensor(without_gil([&] { return (self.core.*member)(); }));
  };
}

void bind_views(nb::class_<BoundReceived>& c) {
  c.def_prop_ro(
       "payloads", &payloads_of, nb::sig("def payloads(self) -> list[typing.Any]"),
       "Received rows per payload: rank_major [R, m, ...], gathered [sum of T, ...],\n"
       "expert_major [L, R*m, ...], flat [N, ...], flat_by_expert [N', ...]; views, valid\n"
       "until the combine is called. With a dispatch_wire the first is float8_e4m3fn.")
      .def_prop_ro(
          "scales", tensor_of(&Received::scales), nb::sig("def scales(self) -> typing.Any"),
          "With a dispatch_wire: what each 128 elements of the first payload's rows are to be\n"
          "multiplied by: its leading dimensions, then ceil(H / 128), float32; wire_scale ue8m0:\n"
          "uint8 e, meaning 2**(e - 127). Else None.")
      .def_prop_ro(
          "rank_counts", tensor_of(&Received::rank_counts),
          nb::sig("def rank_counts(self) -> typing.Any"),
          "[R] int32: rows from each rank. With max_recv_rows also those that were dropped.")
      .def_prop_ro(
          "expert_counts", tensor_of(&Received::expert_counts),
          nb::sig("def expert_counts(self) -> typing.Any"),
          "[L] int32: (token, local expert) pairs; with max_recv_rows of kept rows only. -1 each\n"
          "when no ids were given.")
      .def_prop_ro(
          "offsets", tensor_of(&Received::offsets), nb::sig("def offsets(self) -> typing.Any"),
          "[L+1] int32: exclusive sums of expert_counts; flat_by_expert: where each expert's\n"
          "group begins, at most max_recv_rows. Unspecified when no ids were given.")
      .def_prop_ro(
          "num_rows", tensor_of(&Received::num_rows), nb::sig("def num_rows(self) -> typing.Any"),
          "[1] int32: rows received, one per (token, rank); gathered: all tokens; flat_by_expert:\n"
          "rows of the layout, zero rows within the groups included. With max_recv_rows also\n"
          "those that were dropped.")
      .def_prop_ro(
          "topk_ids", tensor_of(&Received::topk_ids), nb::sig("def topk_ids(self) -> typing.Any"),
          "[R, m, K], [sum of T, K] or [N, K] int32 global ids as sent (with replicas: physical),\n"
          "invalid_expert_id in rows without a token; None for layouts per expert or when no ids\n"
          "were given.")
      .def_prop_ro(
          "topk_weights", tensor_of(&Received::topk_weights),
          nb::sig("def topk_weights(self) -> typing.Any"),
          "[R, m, K], [sum of T, K], [N, K] or (per expert) [L, R*m], [N'] float32; None when no\n"
          "weights were given.")
      .def_prop_ro("source_rank", tensor_of(&Received::source_rank),
                   nb::sig("def source_rank(self) -> typing.Any"), "Per row int32, -1 in padding.")
      .def_prop_ro("source_token", tensor_of(&Received::source_token),
                   nb::sig("def source_token(self) -> typing.Any"),
                   "Per row int32, -1 in padding.");
}

void bind_values(nb::module_& m) {
  nb::class_<Round>(m, "Round", "One dispatch that waits for its combine.")
      .def_ro("number", &Round::number, "Counts the rounds of one AllToAll from 0.")
      .def_ro("generation", &Round::generation)
      .def("__repr__", [](const Round& self) { return self.describe("AllToAll"); });

  nb::class_<Routing>(m, "Routing",
                      "Counts and indices of one dispatch in memory of their own; give it to\n"
                      "dispatch(routing=...) to send new payloads along the same rows.")
      .def_prop_ro("num_tokens", &Routing::num_tokens,
                   "T of this rank; of a GPU's, the rows that dispatch was given.")
      .def_prop_ro("round_max_tokens", &Routing::round_max_tokens)
      .def_prop_ro(
          "rank_counts",
          [](const Routing& self) {
            const nb::gil_scoped_release released;
            return self.rank_counts();
          },
          "Rows that each rank sent here. Of a GPU's: waits for the stream that it was made on.");

  nb::class_<HostCounts>(m, "HostCounts", "Host copies of the counts.")
      .def_ro("rank_counts", &HostCounts::rank_counts, "As Received.rank_counts.")
      .def_ro("expert_counts", &HostCounts::expert_counts, "As Received.expert_counts.")
      .def_ro("num_rows", &HostCounts::num_rows, "As Received.num_rows.");
}

}  // namespace

void bind_received(nb::module_& m) {
  bind_values(m);
  nb::class_<BoundReceived> c(
      m, "Received",
      "What one dispatch received. Valid until its combine or release is called; afterwards every\n"
      "attribute raises InvalidState. On a GPU the tensors are the device's, to be used on the\n"
      "stream of the round's dispatch_recv or behind it; attributes enqueue there what they make "
      "on\n"
      "first use, and never synchronize.");
  bind_views(c);
  c.def_prop_ro("handle", get<BoundReceived>(&Received::handle))
      .def_prop_ro(
          "routing",
          [](const BoundReceived& self) {
            const nb::gil_scoped_release released;
            return self.core.routing();
          },
          "Copies the counts and indices. On a GPU to new memory, on the stream of the round; not\n"
          "in a graph capture.")
      .def_prop_ro("is_open", get<BoundReceived>(&Received::is_open))
      .def_prop_ro("round_max_tokens", get<BoundReceived>(&Received::round_max_tokens))
      .def_prop_ro("num_tokens", get<BoundReceived>(&Received::num_tokens),
                   "T of this rank; on a GPU the rows that dispatch was given.")
      .def(
          "host_counts",
          [](const BoundReceived& self) {
            const nb::gil_scoped_release released;
            return self.core.host_counts();
          },
          "Counts as Python lists. On the CPU it does not wait; on a GPU it waits for the stream "
          "of\n"
          "the round and raises what kernels reported. Not in a graph capture.")
      .def(
          "combine_buffer",
          [](BoundReceived& self, std::optional<std::int64_t> hidden, nb::object dtype) {
            return self.all_to_all.attr("combine_buffer")(self.core.handle(), hidden, dtype);
          },
          "hidden"_a = nb::none(), "dtype"_a = nb::none(),
          nb::sig("def combine_buffer(self, hidden: int | None = None, dtype: object = None) -> "
                  "typing.Any"),
          "Where the experts may write so that combine copies nothing; see AllToAll.")
      .def(
          "combine",
          [](BoundReceived& self, nb::handle y, nb::handle out, nb::handle topk_weights,
             bool release, std::optional<double> timeout_s, nb::handle stream) {
            return combine(self.owner(), self.core.handle(), y, out, topk_weights, release,
                           timeout_s, stream);
          },
          "y"_a.none(), "out"_a = nb::none(), nb::kw_only(), "topk_weights"_a = nb::none(),
          "release"_a = true, "timeout_s"_a = nb::none(), "stream"_a = nb::none(),
          nb::sig("def combine(self, y: object, out: typing.Any = None, *, topk_weights: object = "
                  "None, release: bool = True, timeout_s: float | None = None, stream: object "
                  "= None) -> typing.Any"),
          "Adds each token's rows; see AllToAll.combine.")
      .def("release", &release_round, nb::kw_only(), "stream"_a = nb::none(),
           nb::sig("def release(self, *, stream: object = None) -> None"),
           "Ends the round without a combine; see AllToAll.release.")
      .def(
          "__enter__", [](nb::object self) { return self; },
          nb::sig("def __enter__(self) -> Received"))
      .def(
          "__exit__", [](BoundReceived& self, nb::args args) { leave(self, args[0]); },
          nb::sig("def __exit__(self, *args: object) -> None"));
}

}  // namespace fanfold::python
