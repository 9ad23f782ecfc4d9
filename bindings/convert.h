// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensors and time-outs between Python and the library.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "fanfold/tensor_view.h"

namespace fanfold::python {

namespace nb = nanobind;

/// Which library's tensors to hand out.
enum class Framework : std::uint8_t { kDlpack, kNumpy, kTorch };

struct ExchangeApi;  // of DLPack; see convert.cpp

/// The stream on which the framework of that interface works now, on this thread and that CUDA
/// device; nothing where it does not tell.
std::optional<void*> current_stream(const ExchangeApi& api, int device);

/// What is known of a type of tensors. Looking it up costs as much as a small copy.
struct TensorType {
  nb::object type;  // keeps the pointers valid
  Framework framework = Framework::kDlpack;
  const ExchangeApi* api = nullptr;  // null: the type has none
};

/// The last type that was met; a program rarely uses two.
class TensorTypeCache {
 public:
  const TensorType& of(nb::handle tensor);
  void clear() { last_ = {}; }

 private:
  TensorType last_;
};

/// Views of the tensors of one call. Keeps what the slow path borrowed alive while it lives; made
/// and destroyed with the GIL held.
class Arguments {
 public:
  Arguments() : types_(own_types_) {}
  /// `gpu`: the CUDA device of the object that was called, nothing on the CPU.
  Arguments(TensorTypeCache& types, std::optional<int> gpu) : types_(types), gpu_(gpu) {}

  /// The tensor `value`, any DLPack producer; an empty view for None.
  /// @throws InvalidArgument  not a tensor, or a dtype that the library does not know.
  TensorView view(nb::handle value, const char* name);
  /// The same for a tensor that will be written. @throws InvalidArgument  it is read-only.
  TensorView output(nb::handle value, const char* name);
  /// A list or tuple of tensors; `first` becomes what `source_of` says of the first one.
  std::vector<TensorView> views(nb::handle values, const char* name, TensorType& first);
  const TensorType& type_of(nb::handle tensor) { return types_.of(tensor); }
  /// The type of the tensor that was viewed last; without its interface if that tensor does not say
  /// that it lies on a GPU.
  TensorType source_of(nb::handle tensor);

 private:
  /// What to import in place of `value`.
  nb::object producer_of(nb::handle value) const;
  /// The view of a tensor of the simulated device, which says that it is the CPU's, as of a GPU's.
  TensorView placed(TensorView view);

  TensorTypeCache own_types_;
  TensorTypeCache& types_;
  std::optional<int> gpu_;
  DeviceType label_ = DeviceType::kCpu;  // what the last tensor says of itself
  std::vector<nb::ndarray<nb::ro>> kept_;
  std::vector<nb::object> kept_objects_;
};

/// A tensor of `framework` over `view`; `owner` keeps its memory alive. None for an empty view.
nb::object make_tensor(const TensorView& view, Framework framework,
                       std::shared_ptr<const void> owner);

/// A new contiguous tensor on the CPU; `view` becomes its view.
nb::object new_host_tensor(DType dtype, const std::vector<std::int64_t>& shape, Framework framework,
                           TensorView& view);

/// Tensor objects over memory of one AllToAll, made once: making one costs microseconds.
class TensorCache {
 public:
  /// The tensor that was made over `view`, or an invalid object.
  nb::object find(const TensorView& view, Framework framework) const;
  /// Makes one; `owner` keeps its memory alive.
  nb::object make(const TensorView& view, Framework framework,
                  const std::shared_ptr<const void>& owner);
  void clear() { entries_.clear(); }

 private:
  static constexpr std::size_t kMaxEntries = 512;
  struct Entry {
    TensorView view;
    Framework framework;
    nb::object tensor;
  };
  std::unordered_multimap<const void*, Entry> entries_;
};

/// A dtype as torch, NumPy or a name gives it: torch.bfloat16, numpy.float32, "float16".
DType to_dtype(nb::handle dtype);

/// Whose tensors go with it: torch.bfloat16 is torch's, numpy.float32 NumPy's, a name is nobody's.
Framework framework_of_dtype(nb::handle dtype);

/// Seconds as Python gives them.
std::optional<std::chrono::nanoseconds> to_timeout(std::optional<double> seconds);

/// A shape or count list for messages and results.
std::vector<std::int64_t> shape_of(const TensorView& view);

}  // namespace fanfold::python
