// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_rows.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "capture.h"
#include "convert.h"
#include "fanfold/error.h"
#include "fanfold/routing_format.h"

namespace fanfold::python {

std::optional<DType> to_stored_dtype(nb::handle dtype) {
  std::string_view name;
  if (nb::try_cast(dtype, name) && name == "auto") return std::nullopt;
  return to_dtype(dtype);
}

IdSpace to_id_space(const char* name) {
  for (const IdSpace id_space : {IdSpace::kLogical, IdSpace::kPhysical}) {
    if (std::strcmp(name, name_of(id_space)) == 0) return id_space;
  }
  throw InvalidArgument(std::string("id_space: expected logical or physical, got \"") + name + '"');
}

nb::object read_only_array(const TensorView& view, std::shared_ptr<const void> owner) {
  nb::object array = make_tensor(view, Framework::kNumpy, std::move(owner));
  array.attr("setflags")(nb::arg("write") = false);
  return array;
}

nb::object to_histogram(const std::vector<std::int64_t>& counts, const RoutingSpec& spec) {
  TensorView view;
  nb::object array =
      new_host_tensor(DType::kInt64, {spec.num_layers, spec.num_experts}, Framework::kNumpy, view);
  std::memcpy(view.data, counts.data(), counts.size() * sizeof(std::int64_t));
  return array;
}

namespace {

using namespace nanobind::literals;

nb::bytes to_python(const std::vector<std::byte>& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

void make_rows(RoutingRows* self, nb::handle array, int num_experts, std::int64_t first_position,
               const char* id_space) {
  Arguments args;
  const TensorView view = args.view(array, "array");
  const auto extent = [&](std::size_t dim) {
    return view.ndim == 3 ? static_cast<int>(view.shape[dim]) : 1;  // else copy_rows refuses it
  };
  const RoutingSpec spec =
      make_routing_spec(extent(1), num_experts, extent(2), view.dtype, to_id_space(id_space));
  RoutingRows rows = copy_rows(spec, view, first_position);
  check_rows(rows);
  new (self) RoutingRows(std::move(rows));
}

/// The rows of a shard, as the library slices its own tensors.
nb::object slice_of_shard(nb::handle rows, int num_shards, int shard) {
  Arguments args;
  const TensorView view = args.view(rows, "rows");
  const std::int64_t num_rows = shard_of(view, num_shards, shard).shape[0];
  const std::vector<std::int64_t> counts = shard_counts(view.shape[0], num_shards);
  const std::int64_t first =
      std::accumulate(counts.begin(), counts.begin() + shard, std::int64_t{0});
  return nb::borrow(rows)[nb::slice(nb::int_(first), nb::int_(first + num_rows), nb::none())];
}

void bind_shards(nb::module_& m) {
  m.def("shard_counts", &shard_counts, "num_tokens"_a, "num_shards"_a,
        "Rows of each shard when tokens are cut into shards of ceil(num_tokens / num_shards): the\n"
        "last ones have fewer, or none. Padded shards have as many as the first.");
  m.def("shard_of", &slice_of_shard, "rows"_a, "num_shards"_a, "shard"_a,
        nb::sig("def shard_of(rows: typing.Any, num_shards: int, shard: int) -> typing.Any"),
        "The rows of one shard, a slice of the tensor.");
  m.def(
      "join_shards",
      [](nb::handle shards, nb::handle out) {
        Arguments args;
        TensorType type;
        join_shards(args.views(shards, "shards", type), args.output(out, "out"));
      },
      "shards"_a, "out"_a,
      nb::sig("def join_shards(shards: collections.abc.Sequence[typing.Any], out: typing.Any) "
              "-> None"),
      "Write the shards one after the other to out until it is full; what is left is padding, of\n"
      "which there are fewer rows than shards.");
}

void bind_formats(nb::class_<RoutingRows>& c) {
  c.def(
       "to_bytes", [](const RoutingRows& self) { return to_python(encode_rows(self)); },
       "A header of 64 bytes with all that is needed to read them, then the ids.")
      .def_static(
          "from_bytes", [](const nb::bytes& data) { return decode_rows(data.data(), data.size()); },
          "data"_a, "What to_bytes gave. Raises InvalidArgument for anything else.")
      .def(
          "to_npy", [](const RoutingRows& self) { return to_python(encode_npy(self)); },
          "A .npy file of the array, equal to what numpy.save writes.")
      .def_static(
          "from_npy",
          [](const nb::bytes& data, int num_experts, std::int64_t first_position) {
            return decode_npy(data.data(), data.size(), num_experts, first_position);
          },
          "data"_a, nb::kw_only(), "num_experts"_a, "first_position"_a = 0,
          "The rows of a .npy file. uint8 of 256 experts, which has no room for a sentinel, "
          "becomes\n"
          "int16; likewise uint16 of 65536.")
      .def(
          "to_vllm",
          [](const RoutingRows& self, nb::handle dtype) {
            return encode_vllm(self, to_dtype(dtype));
          },
          "dtype"_a = "int16", nb::sig("def to_vllm(self, dtype: typing.Any = 'int16') -> str"),
          "What vLLM's API returns: a .npy file in base64, int16, uint16 or uint8.")
      .def_static("from_vllm", &decode_vllm, "text"_a, nb::kw_only(), "num_experts"_a,
                  "first_position"_a = 0, "The rows that to_vllm, or vLLM, gave.")
      .def(
          "to_sglang",
          [](const RoutingRows& self, nb::handle dtype) {
            return encode_sglang(self, to_dtype(dtype));
          },
          "dtype"_a = "int32", nb::sig("def to_sglang(self, dtype: typing.Any = 'int32') -> str"),
          "What SGLang's API returns: the ids alone in base64, int32, uint16 or uint8.")
      .def_static(
          "from_sglang",
          [](std::string_view text, nb::handle dtype, int num_layers, int num_experts, int top_k,
             std::int64_t first_position) {
            return decode_sglang(text, to_dtype(dtype), num_layers, num_experts, top_k,
                                 first_position);
          },
          "text"_a, "dtype"_a = "int32", nb::kw_only(), "num_layers"_a, "num_experts"_a, "top_k"_a,
          "first_position"_a = 0,
          nb::sig("def from_sglang(text: str, dtype: typing.Any = 'int32', *, num_layers: int, "
                  "num_experts: int, top_k: int, first_position: int = 0) -> RoutingRows"),
          "The rows that to_sglang, or SGLang, gave.");
}

void bind_slices(nb::class_<RoutingRows>& c) {
  c.def(
       "astype",
       [](const RoutingRows& self, nb::handle dtype) { return astype(self, to_dtype(dtype)); },
       "dtype"_a, nb::sig("def astype(self, dtype: typing.Any) -> RoutingRows"),
       "The same ids in another type; sentinels stay sentinels.")
      .def("slice_tokens", &slice_tokens, "first"_a, "last"_a,
           "The tokens at positions [first, last): a context shard, or what is left when a known\n"
           "prefix is omitted.")
      .def("slice_layers", &slice_layers, "first"_a, "last"_a,
           "The layers [first, last), counted within these rows: a pipeline stage.")
      .def_static("concat_tokens", &concat_tokens, "parts"_a,
                  "Joins parts that follow each other: a known prefix and the rest, prefill and\n"
                  "decode.")
      .def_static("concat_layers", &concat_layers, "parts"_a,
                  "Joins the layers of pipeline stages, in their order.")
      .def(
          "expert_histogram",
          [](const RoutingRows& self) { return to_histogram(expert_histogram(self), self.spec); },
          nb::sig("def expert_histogram(self) -> typing.Any"),
          "[layers, experts] int64: tokens that chose each expert.")
      .def("check_num_tokens", &check_num_tokens, "num_prompt"_a, "num_generated"_a,
           "Raises InvalidArgument unless these are the rows of a whole request: one per token "
           "that\n"
           "was fed, so none for the last generated one.");
}

}  // namespace

void bind_routing_rows(nb::module_& m) {
  nb::class_<RoutingRows> c(m, "RoutingRows",
                            "Recorded routing of consecutive tokens, with all that is needed to "
                            "read it.");
  c.def("__init__", &make_rows, "array"_a, nb::kw_only(), "num_experts"_a, "first_position"_a = 0,
        "id_space"_a = "logical",
        nb::sig(
            "def __init__(self, array: typing.Any, *, num_experts: int, first_position: int = 0, "
            "id_space: str = 'logical') -> None"),
        R"doc(Copies an array.

Args:
    array: ``[tokens, layers, top_k]`` int8, int16, int32, uint8 or uint16 on the CPU. -1, or the
        maximum of an unsigned type, says "no expert".
    num_experts: every other id is below.
    first_position: of the first token in its request.
    id_space: "logical" or "physical".

Raises:
    InvalidArgument: another shape or type, or an id out of range: names token, layer, column.)doc")
      .def_prop_ro(
          "array",
          [](const std::shared_ptr<RoutingRows>& self) {
            return read_only_array(self->array(), self);
          },
          nb::sig("def array(self) -> typing.Any"),
          "[tokens, layers, top_k], a NumPy array without a copy, read-only.")
      .def_ro("num_tokens", &RoutingRows::num_tokens)
      .def_ro("first_position", &RoutingRows::first_position);
  bind_spec(c, [](const RoutingRows& self) -> const RoutingSpec& { return self.spec; });
  bind_slices(c);
  bind_formats(c);
  bind_shards(m);
  m.def("num_tokens_fed", &num_tokens_fed, "num_prompt"_a, "num_generated"_a,
        "Tokens that went through the model: the last generated one did not.");
}

}  // namespace fanfold::python
