// SPDX-License-Identifier: Apache-2.0
#include "capture.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>

#include "bind.h"
#include "convert.h"
#include "device.h"
#include "fanfold/communicator.h"
#include "fanfold/routing_capture.h"
#include "simulator.h"

namespace fanfold::python {
namespace {

using namespace nanobind::literals;
using nogil = nb::gil_scoped_release;

/// A capture, and what calls need that its class need not know.
struct BoundCapture {
  explicit BoundCapture(const RoutingCaptureConfig& config)
      : core(config),
        gpu(config.device == DeviceType::kGpu ? std::optional<int>(config.device_index)
                                              : std::nullopt) {}
  RoutingCapture core;
  std::optional<int> gpu;  // its CUDA device
  TensorTypeCache types;
};

void make_capture(BoundCapture* self, int num_layers, int num_experts, int top_k,
                  std::int64_t max_tokens, nb::handle dtype, std::vector<int> layers,
                  std::vector<std::int32_t> logical_of_expert, int num_shared_experts,
                  int max_in_flight, std::int64_t max_sink_rows, std::string source,
                  Communicator* comm, nb::handle device) {
  const std::optional<int> gpu = to_gpu(device);
  RoutingCaptureConfig config;
  config.num_layers = num_layers;
  config.num_experts = num_experts;
  config.top_k = top_k;
  config.max_tokens = max_tokens;
  config.dtype = to_stored_dtype(dtype);
  config.layers = std::move(layers);
  config.logical_of_expert = std::move(logical_of_expert);
  config.num_shared_experts = num_shared_experts;
  config.max_in_flight = max_in_flight;
  config.max_sink_rows = max_sink_rows;
  config.source = std::move(source);
  config.device = gpu ? DeviceType::kGpu : DeviceType::kCpu;
  config.device_index = gpu.value_or(0);
  if (comm != nullptr) config.gather = gather_rows(*comm, config);
  const nogil released;
  new (self) BoundCapture(config);
}

/// The stream of a call without tensors.
std::optional<void*> stream_of(const BoundCapture& self, nb::handle stream) {
  return resolve_stream(stream, self.gpu, {});
}

/// What `get` gives of a snapshot, once it is there; others may release `self` meanwhile.
template <class Get>
auto when_there(const RoutingSnapshot& self, Get get) {
  const RoutingSnapshot kept = self;
  {
    const nogil released;
    kept.wait();
  }
  return get(kept);
}

void bind_layout(nb::module_& m) {
  nb::class_<CaptureLayout>(m, "CaptureLayout",
                            "Which rows of topk_ids are this rank's tokens, and where they go.\n\n"
                            "token_offset is the token that the first row goes to.")
      .def_static("local", &CaptureLayout::local, nb::kw_only(), "token_offset"_a = 0,
                  "Every row is a token of this rank.")
      .def_static("concatenated", &CaptureLayout::concatenated, "counts"_a, "rank"_a, nb::kw_only(),
                  "token_offset"_a = 0,
                  "The tokens of all ranks one after the other: counts[r] rows of rank r.")
      .def_static("padded", &CaptureLayout::padded, "counts"_a, "rank"_a, "stride"_a, nb::kw_only(),
                  "token_offset"_a = 0,
                  "stride rows of each rank, the first counts[r] of which are tokens.")
      .def_static("sharded", &CaptureLayout::sharded, "counts"_a, "rank"_a, "num_tokens"_a,
                  nb::kw_only(), "token_offset"_a = 0,
                  "A shard of this rank's tokens: counts[r] rows are with rank r of the capture's\n"
                  "communicator; what is behind num_tokens in all of them is padding, fewer rows "
                  "than shards.")
      .def_static("row_map", &CaptureLayout::row_map, "row_map"_a, nb::kw_only(),
                  "token_offset"_a = 0,
                  "Row i goes to token row_map[i]; a negative one is skipped.");
}

void bind_snapshot(nb::module_& m) {
  nb::class_<RoutingSnapshot> c(
      m, "RoutingSnapshot",
      "The routing of the first tokens of one step, in memory of its own.\n\n"
      "Later records do not change it. It holds one of the capture's max_in_flight places until\n"
      "it is released or gone, and so is every array that it gave. Any thread may use it, and "
      "release it while others read.\n\n"
      "Of a capture on a GPU the copy is only enqueued: whatever is read of it, but num_tokens "
      "and\n"
      "how ids are stored, waits until it is there, and raises each time what was wrong with the\n"
      "step's records before it.");
  c.def_prop_ro(
       "array",
       [](const RoutingSnapshot& self) {
         return when_there(self, [](const RoutingSnapshot& kept) {
           return read_only_array(kept.array(), kept.state());
         });
       },
       nb::sig("def array(self) -> typing.Any"),
       "[tokens, layers, top_k], a NumPy array without a copy, read-only; cells that this step did "
       "not\n"
       "record hold the sentinel. It holds the snapshot's place while it lives.")
      .def(
          "wait",
          [](const RoutingSnapshot& self) { when_there(self, [](const RoutingSnapshot&) {}); },
          "Wait until the copy is there; on the CPU it is.\n\n"
          "Raises:\n    InvalidArgument, InvalidState: as RoutingCapture.check, of this step.")
      .def_prop_ro("is_ready", &RoutingSnapshot::is_ready, "Whether nothing would wait.")
      .def_prop_ro("step_id",
                   [](const RoutingSnapshot& self) {
                     return when_there(self,
                                       [](const RoutingSnapshot& kept) { return kept.step_id(); });
                   })
      .def_prop_ro("num_tokens", &RoutingSnapshot::num_tokens)
      .def_prop_ro(
          "missing_layers",
          [](const RoutingSnapshot& self) {
            return when_there(self,
                              [](const RoutingSnapshot& kept) { return kept.missing_layers(); });
          },
          "The model's numbers of the layers that lack a row of these tokens.")
      .def_prop_ro(
          "missing_rows",
          [](const RoutingSnapshot& self) {
            return when_there(self,
                              [](const RoutingSnapshot& kept) { return kept.missing_rows(); });
          },
          "Rows that each layer lacks.")
      .def(
          "rows",
          [](const RoutingSnapshot& self, std::int64_t first, std::int64_t num_tokens,
             std::int64_t first_position) {
            const RoutingSnapshot kept = self;  // others may release `self` meanwhile
            const nogil released;
            return kept.rows(first, num_tokens, first_position);
          },
          "first"_a, "num_tokens"_a, nb::kw_only(), "first_position"_a = 0,
          "A copy of the tokens [first, first + num_tokens), those of one request.\n\n"
          "Raises:\n    InvalidArgument: it has no such tokens.\n"
          "    InvalidState: a layer lacks one of them; names the layers.")
      .def(
          "expert_histogram",
          [](const RoutingSnapshot& self) {
            const RoutingSnapshot kept = self;  // as above
            const auto counts = [&] {
              const nogil released;
              return kept.expert_histogram();
            }();
            return to_histogram(counts, kept.spec());
          },
          nb::sig("def expert_histogram(self) -> typing.Any"),
          "[layers, experts] int64: tokens that chose each expert.")
      .def("release", &RoutingSnapshot::release, "Lets go of it; afterwards it holds nothing.")
      .def(
          "__enter__", [](nb::object self) { return self; },
          nb::sig("def __enter__(self) -> RoutingSnapshot"))
      .def(
          "__exit__", [](RoutingSnapshot& self, const nb::args&) { self.release(); },
          nb::sig("def __exit__(self, *args: object) -> None"));
  bind_spec(c, [](const RoutingSnapshot& self) -> const RoutingSpec& { return self.spec(); });
}

nb::object sink_of(const std::shared_ptr<BoundCapture>& self, int layer, nb::handle dtype) {
  const DType kind = to_dtype(dtype);
  TensorView view;
  {
    const nogil released;
    view = self->core.sink(layer, kind);
  }
  // The simulated device's tensors are the host's to everybody else.
  if (is_simulated()) view.device = DeviceType::kCpu;
  return make_tensor(view, framework_of_dtype(dtype), self);
}

void bind_recording(nb::class_<BoundCapture>& c) {
  c.def(
       "begin_step",
       [](BoundCapture& self, std::int64_t step_id, nb::handle stream) {
         const std::optional<void*> on = stream_of(self, stream);
         const nogil released;
         self.core.begin_step(step_id, on);
       },
       "step_id"_a, nb::kw_only(), "stream"_a = nb::none(),
       nb::sig("def begin_step(self, step_id: int, *, stream: object = None) -> None"),
       "Begin a step: nothing is recorded in it yet.\n\n"
       "Stream:\n    GPU: enqueues on ``stream``, never synchronizes. Graph capture: allowed; "
       "each\n"
       "    replay begins another step of that id.")
      .def(
          "record",
          [](BoundCapture& self, int layer, nb::handle topk_ids,
             const std::optional<CaptureLayout>& layout, std::optional<std::int64_t> rows,
             std::optional<std::string> source, bool overwrite, nb::handle stream) {
            Arguments args(self.types, self.gpu);
            const TensorView view = args.view(topk_ids, "topk_ids");
            const RecordOptions options{rows, std::move(source).value_or(""), overwrite,
                                        resolve_stream(stream, self.gpu, args.source_of(topk_ids))};
            const nogil released;
            self.core.record(layer, view, layout.value_or(CaptureLayout()), options);
          },
          "layer"_a, "topk_ids"_a, "layout"_a = nb::none(), nb::kw_only(), "rows"_a = nb::none(),
          "source"_a = nb::none(), "overwrite"_a = false, "stream"_a = nb::none(),
          nb::sig("def record(self, layer: int, topk_ids: typing.Any, "
                  "layout: CaptureLayout | None = None, *, rows: int | None = None, "
                  "source: str | None = None, overwrite: bool = False, stream: object = None) "
                  "-> None"),
          R"doc(Take the ids of one layer; after an error nothing of them is recorded.

Args:
    layer: the model's number of the layer.
    topk_ids: ``[rows, top_k]`` or ``[rows, top_k + num_shared_experts]`` int8, int16, int32, int64,
        uint8, uint16 or uint32 on the capture's device, any row stride; used during the call, on a
        GPU until the stream has passed it. Negative: no expert; so is the maximum of an unsigned
        type where no expert has that id.
    layout: which rows are this rank's tokens; None: all. With ``sharded`` the call is collective:
        an id that is no expert is then an error on all ranks, any other wrong argument on the rank
        that gave it only, and the others wait until the communicator's deadline. On a GPU the first
        such call makes the memory: it waits for the others, and no graph capture may hold it.
    rows: rows that the layout is about; those behind are padding. None: all.
    source: the model that routes; must be the capture's own.
    overwrite: replace rows that this step recorded already. Otherwise they must be equal.
    stream: of a GPU; None: the current one of the tensor's framework, where that tells.

Raises:
    InvalidArgument: an unknown layer or source, counts that do not fit the rows, a token at or past
        max_tokens, ids that lie in a sink (see import_sink), or an id at or past the experts: names row, column, id and layer.
    InvalidState: no step has begun, or a row was recorded in this step with other ids.
    PeerTimeout, PeerLost: layout ``sharded``: a shard is late or gone; on a GPU the next such call
        says so.

Stream:
    GPU: enqueues on ``stream``, never synchronizes. Ids are looked at there: what is wrong with them
    is raised by ``check``, ``snapshot`` and the step's snapshots, and the step is lost. Graph
    capture: allowed; a replay records in the step that runs then.)doc")
      .def("sink", &sink_of, "layer"_a, "dtype"_a = "int32",
           nb::sig("def sink(self, layer: int, dtype: typing.Any = 'int32') -> typing.Any"),
           "Where a fused kernel writes the ids of a layer itself: int16 or int32\n"
           "[max_sink_rows, top_k + num_shared_experts], the same memory each time, filled with "
           "the\n"
           "type's minimum, which says \"not written\". A torch dtype gives a torch tensor, a "
           "NumPy\n"
           "dtype an array, a name an object with ``__dlpack__``. On a GPU the first call for a "
           "layer waits\n"
           "for the device and is not allowed in a graph capture.")
      .def(
          "import_sink",
          [](BoundCapture& self, int layer, std::int64_t num_rows,
             const std::optional<CaptureLayout>& layout, std::optional<std::string> source,
             bool overwrite, nb::handle stream) {
            const RecordOptions options{
                {}, std::move(source).value_or(""), overwrite, stream_of(self, stream)};
            const nogil released;
            self.core.import_sink(layer, num_rows, layout.value_or(CaptureLayout()), options);
          },
          "layer"_a, "num_rows"_a, "layout"_a = nb::none(), nb::kw_only(), "source"_a = nb::none(),
          "overwrite"_a = false, "stream"_a = nb::none(),
          nb::sig("def import_sink(self, layer: int, num_rows: int, "
                  "layout: CaptureLayout | None = None, *, source: str | None = None, "
                  "overwrite: bool = False, stream: object = None) -> None"),
          "Record the first num_rows rows of the layer's sink and clear it. Rows that were not\n"
          "written stay unrecorded, and so are reported as missing. Raises as record; Stream as\n"
          "there.")
      .def(
          "snapshot",
          [](BoundCapture& self, std::int64_t num_tokens, nb::handle stream) {
            const std::optional<void*> on = stream_of(self, stream);
            const nogil released;
            return self.core.snapshot(num_tokens, on);
          },
          "num_tokens"_a, nb::kw_only(), "stream"_a = nb::none(),
          nb::sig("def snapshot(self, num_tokens: int, *, stream: object = None) "
                  "-> RoutingSnapshot"),
          "Copy what this step recorded of the first num_tokens tokens.\n\n"
          "Raises:\n    CapacityExceeded: max_in_flight snapshots, or arrays of them, are held:\n"
          "        back-pressure, nothing is overwritten.\n"
          "    InvalidArgument: more tokens than max_tokens.\n"
          "    InvalidState: no step has begun; a graph is being captured. Both also as check.\n\n"
          "Stream:\n    GPU: enqueues on ``stream``, never synchronizes. Graph capture: not "
          "allowed.")
      .def(
          "check", [](BoundCapture& self) { self.core.check(); },
          "Raise the first error that kernels have found and nobody was told of; waits for "
          "nothing.\n"
          "\n"
          "Raises:\n"
          "    InvalidArgument: an id at or past the experts, or a row of a sink written in part.\n"
          "    InvalidState: a row that was recorded in its step with other ids.")
      .def(
          "set_logical_of_expert",
          [](BoundCapture& self, std::vector<std::int32_t> logical_of_expert) {
            self.core.set_logical_of_expert(std::move(logical_of_expert));
          },
          "logical_of_expert"_a, nb::call_guard<nogil>(),
          "Replace the map from physical ids, between steps; empty: ids are logical. On a GPU it\n"
          "waits for the device; graphs that were captured use the new map.");
}

}  // namespace

void bind_capture(nb::module_& m) {
  bind_routing_rows(m);
  bind_routing_store(m);
  bind_layout(m);
  bind_snapshot(m);
  nb::class_<BoundCapture> c(m, "RoutingCapture",
                             R"doc(Records which experts each token of a step took, per layer.

A step begins with nothing recorded; what it did not record shows as the sentinel and is reported as
missing. One call at a time per object; captures are independent of each other.

On a GPU calls only enqueue work on their stream, and may be captured in a graph; the caller orders the
streams of one capture. Errors of ids come later: see record.)doc");
  c.def("__init__", &make_capture, nb::kw_only(), "num_layers"_a, "num_experts"_a, "top_k"_a,
        "max_tokens"_a, "dtype"_a = "auto", "layers"_a = std::vector<int>(),
        "logical_of_expert"_a = std::vector<std::int32_t>(), "num_shared_experts"_a = 0,
        "max_in_flight"_a = 2, "max_sink_rows"_a = 0, "source"_a = "target", "comm"_a = nb::none(),
        "device"_a = "cpu", nb::keep_alive<1, 13>(),
        nb::sig("def __init__(self, *, num_layers: int, num_experts: int, top_k: int, "
                "max_tokens: int, dtype: typing.Any = 'auto', "
                "layers: collections.abc.Sequence[int] = (), "
                "logical_of_expert: collections.abc.Sequence[int] = (), "
                "num_shared_experts: int = 0, max_in_flight: int = 2, max_sink_rows: int = 0, "
                "source: str = 'target', comm: Communicator | None = None, "
                "device: object = 'cpu') -> None"),
        R"doc(Allocates num_layers * max_tokens rows, and as many per snapshot in flight.

Args:
    num_layers: layers that are recorded.
    num_experts: logical experts.
    top_k: ids per token that are kept.
    max_tokens: of one step.
    dtype: type of a stored id: "auto", the narrowest signed one that holds every id and -1; or int8,
        int16, int32, uint8 or uint16, which must hold every id and its sentinel.
    layers: the model's number of each recorded layer; empty: 0 to num_layers - 1.
    logical_of_expert: the logical expert of each physical one, whose ids record then takes; empty:
        ids are logical.
    num_shared_experts: ids of fused shared experts that rows may carry behind their top_k; not kept.
    max_in_flight: snapshots at a time.
    max_sink_rows: rows of a sink; 0: max_tokens.
    source: the model whose layers these are; a draft model has a capture of its own.
    comm: the ranks that hold shards of a sequence; needed for layout ``sharded`` only.
    device: "cpu", "cuda" or "cuda:N", or a torch.device: where tensors and sinks lie. Snapshots of a
        GPU's capture lie in page-locked memory.

Raises:
    InvalidArgument: values that contradict each other; nothing was allocated.
    Unsupported: no such GPU, or a build without GPUs.)doc");
  bind_recording(c);
  c.def_prop_ro(
       "num_in_flight", [](const BoundCapture& self) { return self.core.num_in_flight(); },
       "Snapshots held.")
      .def_prop_ro(
          "layers", [](const BoundCapture& self) { return self.core.config().layers; },
          "The model's number of each recorded layer.")
      .def_prop_ro("source", [](const BoundCapture& self) { return self.core.config().source; })
      .def_prop_ro(
          "device",
          [](const BoundCapture& self) {
            return name_of_device(self.core.config().device, self.core.config().device_index);
          },
          "\"cpu\" or \"cuda:N\".");
  bind_spec(c, [](const BoundCapture& self) -> const RoutingSpec& { return self.core.spec(); });
}

}  // namespace fanfold::python
