// SPDX-License-Identifier: Apache-2.0
#include "convert.h"

#include <nanobind/stl/string.h>
#include <cmath>
#include <cstring>

#include <new>

#include "fanfold/error.h"
#include "simulator.h"

namespace fanfold::python {

using namespace nanobind::literals;

// DLPack's C exchange API (dlpack.h 1.3, DLPackExchangeAPI): a producer's type carries a capsule
// with functions that fill a DLTensor without allocating. It saves two microseconds per tensor.
struct ExchangeApi {
  std::uint32_t major;
  std::uint32_t minor;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);
  int (*current_work_stream)(int device_type, std::int32_t device, void** out);
};

namespace {

// DLPack's numbers of devices.
constexpr int kDlCpu = 1;
constexpr int kDlCuda = 2;
constexpr int kDlCudaHost = 3;

/// Null when the type has none that we can use.
const ExchangeApi* exchange_api_of(nb::handle type) {
  PyObject* capsule = PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* api =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);  // the type keeps it
  if (api == nullptr) PyErr_Clear();
  return api != nullptr && api->major == 1 && api->tensor_from_object != nullptr ? api : nullptr;
}

std::optional<DType> dtype_of(nb::dlpack::dtype type) noexcept {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(type.code);
  if (code == Code::Float4_E2M1FN && type.bits * type.lanes == 8) return DType::kFloat4E2M1x2;
  if (type.lanes != 1) return std::nullopt;
  struct Known {
    Code code;
    int bits;
    DType dtype;
  };
  constexpr Known kKnown[] = {
      {Code::Bool, 8, DType::kBool},
      {Code::UInt, 8, DType::kUInt8},
      {Code::Int, 8, DType::kInt8},
      {Code::UInt, 16, DType::kUInt16},
      {Code::Int, 16, DType::kInt16},
      {Code::UInt, 32, DType::kUInt32},
      {Code::Int, 32, DType::kInt32},
      {Code::UInt, 64, DType::kUInt64},
      {Code::Int, 64, DType::kInt64},
      {Code::Float8_E4M3FN, 8, DType::kFloat8E4M3},
      {Code::Float8_E5M2, 8, DType::kFloat8E5M2},
      {Code::Float8_E8M0FNU, 8, DType::kFloat8E8M0},
      {Code::Float, 16, DType::kFloat16},
      {Code::Bfloat, 16, DType::kBFloat16},
      {Code::Float, 32, DType::kFloat32},
      {Code::Float, 64, DType::kFloat64},
      {Code::Complex, 64, DType::kComplex64},
      {Code::Complex, 128, DType::kComplex128},
  };
  for (const Known& known : kKnown) {
    if (known.code == code && known.bits == type.bits) return known.dtype;
  }
  return std::nullopt;
}

nb::dlpack::dtype dlpack_of(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto make = [](Code code, int bits, int lanes = 1) {
    return nb::dlpack::dtype{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits),
                             static_cast<std::uint16_t>(lanes)};
  };
  switch (dtype) {
    case DType::kBool:
      return make(Code::Bool, 8);
    case DType::kUInt8:
      return make(Code::UInt, 8);
    case DType::kInt8:
      return make(Code::Int, 8);
    case DType::kUInt16:
      return make(Code::UInt, 16);
    case DType::kInt16:
      return make(Code::Int, 16);
    case DType::kUInt32:
      return make(Code::UInt, 32);
    case DType::kInt32:
      return make(Code::Int, 32);
    case DType::kUInt64:
      return make(Code::UInt, 64);
    case DType::kInt64:
      return make(Code::Int, 64);
    case DType::kFloat8E4M3:
      return make(Code::Float8_E4M3FN, 8);
    case DType::kFloat8E5M2:
      return make(Code::Float8_E5M2, 8);
    case DType::kFloat8E8M0:
      return make(Code::Float8_E8M0FNU, 8);
    case DType::kFloat4E2M1x2:
      return make(Code::Float4_E2M1FN, 4, 2);
    case DType::kFloat16:
      return make(Code::Float, 16);
    case DType::kBFloat16:
      return make(Code::Bfloat, 16);
    case DType::kFloat32:
      return make(Code::Float, 32);
    case DType::kFloat64:
      return make(Code::Float, 64);
    case DType::kComplex64:
      return make(Code::Complex, 64);
    case DType::kComplex128:
      return make(Code::Complex, 128);
  }
  return make(Code::UInt, 8);
}

TensorView to_view(const nb::dlpack::dltensor& tensor, const char* name) {
  const std::optional<DType> dtype = dtype_of(tensor.dtype);
  if (!dtype) {
    throw InvalidArgument(std::string(name) + ": expected a known dtype, got DLPack type code " +
                          std::to_string(tensor.dtype.code) + " with " +
                          std::to_string(tensor.dtype.bits) + " bits");
  }
  if (tensor.ndim > TensorView::kMaxDims) {
    throw InvalidArgument(std::string(name) + ": expected at most 8 dimensions, got " +
                          std::to_string(tensor.ndim));
  }
  TensorView view;
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  view.dtype = *dtype;
  view.ndim = tensor.ndim;
  const int device = tensor.device.device_type;
  view.device = device == kDlCpu || device == kDlCudaHost ? DeviceType::kCpu : DeviceType::kGpu;
  if (view.device == DeviceType::kGpu) view.device_index = tensor.device.device_id;
  std::int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    const auto dim = static_cast<std::size_t>(i);
    view.shape[dim] = tensor.shape[i];
    view.strides[dim] = tensor.strides != nullptr ? tensor.strides[i] : stride;
    stride *= tensor.shape[i];
  }
  return view;
}

template <class Tag>
nb::object cast_tensor(const TensorView& view, nb::handle owner) {
  std::size_t shape[TensorView::kMaxDims];
  for (int i = 0; i < view.ndim; ++i) {
    shape[i] = static_cast<std::size_t>(view.shape[static_cast<std::size_t>(i)]);
  }
  const bool is_cpu = view.device == DeviceType::kCpu;
  nb::ndarray<Tag> array(view.data, static_cast<std::size_t>(view.ndim), shape, owner,
                         view.strides.data(), dlpack_of(view.dtype),
                         is_cpu ? nb::device::cpu::value : nb::device::cuda::value,
                         is_cpu ? 0 : view.device_index);
  return nb::cast(array, nb::rv_policy::reference);
}

const char* bits_name(DType dtype) { return size_of(dtype) == 1 ? "uint8" : "uint16"; }

/// NumPy knows these types only through the package ml_dtypes, and DLPack not from NumPy at all.
bool is_extension(DType dtype) noexcept {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2 ||
         dtype == DType::kFloat8E8M0;
}

/// The extension type of a NumPy array, if it has one.
std::optional<DType> extension_dtype(nb::handle array) {
  const std::string name = nb::cast<std::string>(
      nb::str(nb::getattr(nb::getattr(array, "dtype", nb::none()), "name", nb::str(""))));
  for (const DType dtype :
       {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat8E8M0}) {
    if (name == name_of(dtype)) return dtype;
  }
  return std::nullopt;
}

nb::object as_bits(nb::handle array, DType dtype) { return array.attr("view")(bits_name(dtype)); }

/// A NumPy array of an extension type over `view`.
nb::object extension_array(TensorView view, nb::handle owner) {
  const char* name = name_of(view.dtype);
  nb::object type;
  try {
    type = nb::module_::import_("ml_dtypes").attr(name);
  } catch (nb::python_error& error) {
    throw Unsupported(std::string("dtype: NumPy has ") + name +
                      " only with the package ml_dtypes, which cannot be imported; install it or "
                      "use torch tensors");
  }
  view.dtype = size_of(view.dtype) == 1 ? DType::kUInt8 : DType::kUInt16;
  return cast_tensor<nb::numpy>(view, owner).attr("view")(type);
}

nb::object cast_as(const TensorView& view, Framework framework, nb::handle owner) {
  switch (framework) {
    case Framework::kTorch:
      return cast_tensor<nb::pytorch>(view, owner);
    case Framework::kNumpy:
      return is_extension(view.dtype) ? extension_array(view, owner)
                                      : cast_tensor<nb::numpy>(view, owner);
    case Framework::kDlpack:
      break;
  }
  return cast_tensor<nb::array_api>(view, owner);
}

/// "torch.Tensor"
std::string name_of_type(nb::handle value) {
  const nb::handle type = value.type();
  const nb::str name = nb::str("{}.{}").format(type.attr("__module__"), type.attr("__qualname__"));
  return nb::cast<std::string>(name);
}

bool same(const TensorView& a, const TensorView& b) noexcept {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.ndim); ++i) {
    if (a.shape[i] != b.shape[i] || a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

}  // namespace

std::optional<void*> current_stream(const ExchangeApi& api, int device) {
  void* stream = nullptr;
  if (api.current_work_stream == nullptr) return std::nullopt;
  if (api.current_work_stream(kDlCuda, device, &stream) != 0) throw nb::python_error();
  return stream;
}

const TensorType& TensorTypeCache::of(nb::handle tensor) {
  const nb::handle type = tensor.type();
  if (last_.type.is(type)) return last_;
  last_.type = nb::borrow(type);
  last_.api = exchange_api_of(type);
  const std::string name = name_of_type(tensor);
  last_.framework = Framework::kDlpack;
  if (name.rfind("torch.", 0) == 0) last_.framework = Framework::kTorch;
  if (name == "numpy.ndarray") last_.framework = Framework::kNumpy;
  return last_;
}

// Producers on a GPU make the consumer's stream wait for theirs unless they are told not to: the
// caller orders the streams.
nb::object Arguments::producer_of(nb::handle value) const {
  if (!gpu_ || !nb::hasattr(value, "__dlpack_device__")) return nb::borrow(value);
  const nb::object device = value.attr("__dlpack_device__")();
  if (nb::cast<int>(device[0]) != kDlCuda) return nb::borrow(value);
  const nb::object produce = value.attr("__dlpack__");
  constexpr int kNoStream = -1;
  try {
    return produce("stream"_a = kNoStream, "max_version"_a = nb::make_tuple(1, 0));
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return produce("stream"_a = kNoStream);  // from before there were versions
}

TensorView Arguments::placed(TensorView view) {
  label_ = view.device;
  if (!gpu_ || !is_simulated() || view.device != DeviceType::kCpu) return view;
  const bool is_empty = view.num_elements() == 0;
  const std::optional<int> device = is_empty ? gpu_ : simulated_device_of(view.data);
  if (!device) return view;
  view.device = DeviceType::kGpu;
  view.device_index = *device;
  return view;
}

TensorView Arguments::view(nb::handle value, const char* name) {
  if (value.is_none()) return {};
  nb::dlpack::dltensor tensor{};
  if (const ExchangeApi* api = types_.of(value).api) {
    if (api->tensor_from_object(value.ptr(), &tensor) != 0) throw nb::python_error();
    return placed(to_view(tensor, name));
  }
  nb::ndarray<nb::ro> array;
  std::optional<DType> extension;
  if (!nb::try_cast<nb::ndarray<nb::ro>>(producer_of(value), array, false)) {
    extension = extension_dtype(value);
    if (!extension ||
        !nb::try_cast<nb::ndarray<nb::ro>>(as_bits(value, *extension), array, false)) {
      throw InvalidArgument(std::string(name) + ": expected a DLPack tensor, got " +
                            name_of_type(value));
    }
  }
  tensor.data = const_cast<void*>(array.data());
  tensor.device = {array.device_type(), array.device_id()};
  tensor.ndim = static_cast<std::int32_t>(array.ndim());
  tensor.dtype = array.dtype();
  tensor.shape = const_cast<std::int64_t*>(array.shape_ptr());
  tensor.strides = const_cast<std::int64_t*>(array.stride_ptr());
  TensorView view = to_view(tensor, name);
  if (extension) view.dtype = *extension;
  kept_.push_back(std::move(array));
  return placed(view);
}

TensorView Arguments::output(nb::handle value, const char* name) {
  const TensorView view = this->view(value, name);
  // Producers with the exchange API have no read-only tensors.
  if (value.is_none() || types_.of(value).api != nullptr) return view;
  const bool as_numbers = !is_extension(view.dtype) || !extension_dtype(value);
  const nb::object array = as_numbers ? producer_of(value) : as_bits(value, view.dtype);
  nb::ndarray<> writable;
  if (!nb::try_cast<nb::ndarray<>>(array, writable, false)) {
    throw InvalidArgument(std::string(name) +
                          ": expected a tensor that may be written, got a read-only one");
  }
  return view;
}

TensorType Arguments::source_of(nb::handle tensor) {
  TensorType type = type_of(tensor);
  if (label_ == DeviceType::kCpu) type.api = nullptr;
  return type;
}

std::vector<TensorView> Arguments::views(nb::handle values, const char* name, TensorType& first) {
  if (!nb::isinstance<nb::list>(values) && !nb::isinstance<nb::tuple>(values)) {
    throw InvalidArgument(std::string(name) + ": expected a list of tensors, got " +
                          name_of_type(values));
  }
  const nb::sequence sequence = nb::borrow<nb::sequence>(values);
  const std::size_t length = nb::len(sequence);
  std::vector<TensorView> all(length);
  for (std::size_t i = 0; i < length; ++i) {
    const nb::object value = sequence[i];
    if (value.is_none()) {
      throw InvalidArgument(std::string(name) + ": expected tensors, got None at " +
                            std::to_string(i));
    }
    all[i] = view(value, name);
    if (i == 0) first = source_of(value);
    kept_objects_.push_back(value);  // the list may change while the call runs
  }
  return all;
}

nb::object make_tensor(const TensorView& view, Framework framework,
                       std::shared_ptr<const void> owner) {
  if (!view.has_value()) return nb::none();
  using Owner = std::shared_ptr<const void>;
  const nb::capsule capsule(new Owner(std::move(owner)),
                            [](void* kept) noexcept { delete static_cast<Owner*>(kept); });
  return cast_as(view, framework, capsule);
}

nb::object new_host_tensor(DType dtype, const std::vector<std::int64_t>& shape, Framework framework,
                           TensorView& view) {
  view = TensorView();
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = shape[i];
    view.strides[i] = stride;
    stride *= shape[i];
  }
  constexpr std::align_val_t kAlignment{64};
  const auto bytes = static_cast<std::size_t>(stride * size_of(dtype));
  void* memory = ::operator new(bytes > 0 ? bytes : 1, kAlignment);
  view.data = memory;
  const nb::capsule owner(memory, [](void* kept) noexcept { ::operator delete(kept, kAlignment); });
  return cast_as(view, framework, owner);
}

nb::object TensorCache::find(const TensorView& view, Framework framework) const {
  const auto range = entries_.equal_range(view.data);
  for (auto it = range.first; it != range.second; ++it) {
    if (it->second.framework == framework && same(it->second.view, view)) {
      return it->second.tensor;
    }
  }
  return {};
}

nb::object TensorCache::make(const TensorView& view, Framework framework,
                             const std::shared_ptr<const void>& owner) {
  if (entries_.size() >= kMaxEntries) entries_.clear();
  nb::object tensor = make_tensor(view, framework, owner);
  entries_.emplace(view.data, Entry{view, framework, tensor});
  return tensor;
}

DType to_dtype(nb::handle dtype) {
  // torch.bfloat16 prints as "torch.bfloat16"; numpy.float32 is a class, numpy.dtype has a name.
  nb::object name = nb::borrow(dtype);
  if (nb::hasattr(dtype, "__name__")) {
    name = dtype.attr("__name__");
  } else if (nb::hasattr(dtype, "name")) {
    name = dtype.attr("name");
  }
  const std::string text = nb::cast<std::string>(nb::str(name));
  return dtype_from_name(text.substr(text.rfind('.') + 1));
}

Framework framework_of_dtype(nb::handle dtype) {
  if (nb::isinstance<nb::str>(dtype)) return Framework::kDlpack;
  return name_of_type(dtype) == "torch.dtype" ? Framework::kTorch : Framework::kNumpy;
}

std::optional<std::chrono::nanoseconds> to_timeout(std::optional<double> seconds) {
  if (!seconds) return std::nullopt;
  constexpr double kMaxSeconds = 9e9;
  if (std::isnan(*seconds) || *seconds < 0) {
    throw InvalidArgument("timeout_s: expected seconds >= 0, got " + std::to_string(*seconds));
  }
  const double clamped = *seconds < kMaxSeconds ? *seconds : kMaxSeconds;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(clamped * 1e9));
}

std::vector<std::int64_t> shape_of(const TensorView& view) {
  return {view.shape.begin(), view.shape.begin() + view.ndim};
}

}  // namespace fanfold::python
