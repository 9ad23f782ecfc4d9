// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_store.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "capture.h"
#include "convert.h"

namespace fanfold::python {
namespace {

using namespace nanobind::literals;
using nogil = nb::gil_scoped_release;
using Range = std::pair<std::int64_t, std::int64_t>;

std::string to_key(const nb::bytes& key) { return {key.c_str(), key.size()}; }

void make_store(RoutingStore* self, int num_layers, int num_experts, int top_k, nb::handle dtype,
                const char* id_space, std::int64_t block_tokens, std::int64_t max_bytes) {
  const RoutingSpec spec = make_routing_spec(num_layers, num_experts, top_k, to_stored_dtype(dtype),
                                             to_id_space(id_space));
  new (self) RoutingStore(RoutingStoreConfig{spec, block_tokens, max_bytes});
}

void bind_records_of_store(nb::module_& m) {
  nb::class_<RoutingStoreStats>(m, "RoutingStoreStats", "What a store holds and did.")
      .def_ro("num_requests", &RoutingStoreStats::num_requests)
      .def_ro("num_keys", &RoutingStoreStats::num_keys,
              "That have a block; several may have the same.")
      .def_ro("num_bytes", &RoutingStoreStats::num_bytes, "Of all rows; a block counts whole.")
      .def_ro("max_bytes", &RoutingStoreStats::max_bytes)
      .def_ro("num_hits", &RoutingStoreStats::num_hits, "Keys that assemble_keys found.")
      .def_ro("num_misses", &RoutingStoreStats::num_misses, "Keys that it did not.")
      .def_ro("num_evictions", &RoutingStoreStats::num_evictions, "Blocks that made room.")
      .def_ro("generation", &RoutingStoreStats::generation);
  nb::class_<AssembledRouting>(m, "AssembledRouting",
                               "Rows that were put together, and what they lack.")
      .def_ro("rows", &AssembledRouting::rows, "Missing tokens hold the sentinel.")
      .def_prop_ro(
          "missing",
          [](const AssembledRouting& self) {
            std::vector<Range> ranges;
            ranges.reserve(self.missing.size());
            for (const TokenRange& range : self.missing) {
              ranges.emplace_back(range.first, range.last);
            }
            return ranges;
          },
          "Positions [first, last) without rows, ascending.")
      .def_ro("missing_keys", &AssembledRouting::missing_keys,
              "Which of the keys given were not found.")
      .def_prop_ro("is_complete", &AssembledRouting::is_complete);
}

void bind_requests(nb::class_<RoutingStore>& c) {
  c.def("begin", &RoutingStore::begin, "request"_a, "first_position"_a = 0,
        "Add a request whose first row will be at first_position.")
      .def(
          "append",
          [](RoutingStore& self, const std::string& request, std::int64_t position, nb::handle rows,
             bool allow_unrouted) {
            if (nb::isinstance<RoutingRows>(rows)) {
              const auto& recorded = nb::cast<const RoutingRows&>(rows);
              const nogil released;
              self.append(request, position, recorded);
              return;
            }
            Arguments args;
            const TensorView view = args.view(rows, "rows");
            const nogil released;
            self.append(request, position, view, allow_unrouted);
          },
          "request"_a, "position"_a, "rows"_a, nb::kw_only(), "allow_unrouted"_a = false,
          nb::sig("def append(self, request: str, position: int, rows: RoutingRows | typing.Any, "
                  "*, allow_unrouted: bool = False) -> None"),
          R"doc(Add rows at the position where the request's rows end.

RoutingSnapshot.rows gives rows all of which were recorded; a sentinel then says "no expert". An
array cannot say so: its rows count as recorded. So do those of an AssembledRouting: look at its
is_complete first.

Args:
    request: one that has begun.
    position: where its rows end; after truncate, where that left them.
    rows: RoutingRows, whose own first_position does not matter here, or an array
        ``[tokens, layers, top_k]`` of the store's dtype on the CPU; copied.
    allow_unrouted: take an array that has tokens without any expert in some layer, as padding.

Raises:
    InvalidArgument: no such request, another position, shape or dtype, or an id that is neither an
        expert nor the sentinel: names token, layer and column.
    InvalidState: an array has a token without any expert in a layer: names position and layer.
    CapacityExceeded: max_bytes are in use by requests.)doc")
      .def("truncate", &RoutingStore::truncate, "request"_a, "position"_a,
           "Drop the rows from a position on, as of rejected draft tokens.")
      .def("fork", &RoutingStore::fork, "request"_a, "new_request"_a,
           "Add a request that shares the rows of another and goes its own way from here on.")
      .def("finish", &RoutingStore::finish, "request"_a,
           "Forget a request and its rows; published blocks stay.")
      .def(
          "range",
          [](const RoutingStore& self, const std::string& request) {
            const TokenRange range = self.range(request);
            return Range(range.first, range.last);
          },
          "request"_a, "Where the request's rows begin and end.")
      .def("__contains__", &RoutingStore::contains, "request"_a, "Whether there is such a request.")
      .def(
          "assemble",
          [](RoutingStore& self, const std::string& request, std::int64_t first,
             std::int64_t last) {
            const nogil released;
            return self.assemble(request, first, last);
          },
          "request"_a, "first"_a, "last"_a, "The tokens [first, last) of a request.");
}

void bind_keys(nb::class_<RoutingStore>& c) {
  c.def(
       "publish",
       [](RoutingStore& self, const std::string& request, std::int64_t position,
          const nb::bytes& key, std::optional<std::uint64_t> generation) {
         return self.publish(request, position, to_key(key), generation);
       },
       "request"_a, "position"_a, "key"_a, nb::kw_only(), "generation"_a = nb::none(),
       R"doc(Make the full block at a position known under a key; a key that has a block keeps it.

Args:
    request: one that has begun.
    position: a multiple of block_tokens.
    key: 16 to 32 bytes.
    generation: that the key belongs to; None: the present one.

Returns:
    Whether the block is new.

Raises:
    InvalidArgument: no such request, a key of another length, or no full block there.
    InvalidState: the key belongs to another generation.)doc")
      .def(
          "has_key",
          [](const RoutingStore& self, const nb::bytes& key) { return self.has_key(to_key(key)); },
          "key"_a)
      .def(
          "assemble_keys",
          [](RoutingStore& self, const std::vector<nb::bytes>& keys, const std::string& tail) {
            std::vector<std::string> texts;
            texts.reserve(keys.size());
            for (const nb::bytes& key : keys) texts.push_back(to_key(key));
            const nogil released;
            return self.assemble_keys(texts, tail);
          },
          "keys"_a, nb::kw_only(), "tail"_a = "",
          "Block i at position i * block_tokens for each key, then the rows of request `tail`\n"
          "behind them. Where a key is missing, rows that `tail` has take its place.")
      .def("reset", &RoutingStore::reset,
           "Forget all keys; requests keep their rows. Returns the new generation.");
}

}  // namespace

void bind_routing_store(nb::module_& m) {
  bind_records_of_store(m);
  nb::class_<RoutingStore> c(m, "RoutingStore",
                             R"doc(Rows per request, and blocks of rows under opaque keys.

Blocks under keys outlive their requests; those that no request uses make room for new rows, the
least recently used first. A request's own rows are never dropped. After an error the store is
unchanged. Any thread may call it.)doc");
  c.def("__init__", &make_store, nb::kw_only(), "num_layers"_a, "num_experts"_a, "top_k"_a,
        "dtype"_a = "auto", "id_space"_a = "logical", "block_tokens"_a = 16,
        "max_bytes"_a = std::int64_t{1} << 30,
        nb::sig("def __init__(self, *, num_layers: int, num_experts: int, top_k: int, "
                "dtype: typing.Any = 'auto', id_space: str = 'logical', block_tokens: int = 16, "
                "max_bytes: int = 1073741824) -> None"),
        "num_layers, num_experts, top_k, dtype: as of the RoutingCapture. block_tokens: tokens of\n"
        "a block that can be published. max_bytes: of all rows.");
  bind_requests(c);
  bind_keys(c);
  c.def_prop_ro("stats", &RoutingStore::stats);
  c.def_prop_ro("block_tokens",
                [](const RoutingStore& self) { return self.config().block_tokens; });
  bind_spec(c, [](const RoutingStore& self) -> const RoutingSpec& { return self.config().spec; });
}

}  // namespace fanfold::python
