// SPDX-License-Identifier: Apache-2.0
#include "gpu/driver.h"

#include <dlfcn.h>

#include "base/env.h"
#include "base/format.h"
#include "fanfold/error.h"
#include "gpu/platform.h"

namespace fanfold::gpu {
namespace {

// Functions are asked for as of this version; all of them are older. cuGetProcAddress itself came
// in this form with CUDA 12.0.
constexpr int kDriverVersion = 12000;

using GetProcAddress = decltype(&::cuGetProcAddress);

void* open_library(const std::string& name) {
  void* const library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = ::dlerror();  // NOLINT(concurrency-mt-unsafe): per thread in glibc
    throw Unsupported(base::str("GPU: expected the CUDA driver, which is not here: ",
                                reason == nullptr ? name : std::string(reason)));
  }
  return library;
}

template <class Function>
void find(GetProcAddress get, const char* name, Function& function) {
  void* address = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  const CUresult result = get(name, &address, kDriverVersion, CU_GET_PROC_ADDRESS_DEFAULT, &status);
  if (result != CUDA_SUCCESS || address == nullptr) {
    throw Unsupported(
        base::str("GPU: expected a CUDA driver of version 12.0 or later, got one "
                  "without ",
                  name));
  }
  function = reinterpret_cast<Function>(address);
}

Driver load() {
  // The library stays loaded: its functions are kept.
  void* const library =
      open_library(base::env_variable("FANFOLD_LIBCUDA").value_or(kDriverLibrary));
  const auto get = reinterpret_cast<GetProcAddress>(::dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    throw Unsupported("GPU: expected a CUDA driver of version 12.0 or later, got an older one");
  }
  Driver driver;
  driver.guard = std::make_shared<const base::ForkGuard>();
#define FANFOLD_DRIVER_FIND(name) find(get, #name, driver.name);
  FANFOLD_DRIVER_FUNCTIONS(FANFOLD_DRIVER_FIND)
#undef FANFOLD_DRIVER_FIND
  find(get, "cuStreamGetCaptureInfo", driver.cuStreamGetCaptureInfo);
  const CUresult result = driver.cuInit(0);
  if (result != CUDA_SUCCESS) {
    throw Unsupported(base::str("GPU: expected a device, got cuInit: ", driver.describe(result)));
  }
  return driver;
}

}  // namespace

const Driver& Driver::get() {
  static const Driver kDriver = load();
  return kDriver;
}

std::string Driver::describe(CUresult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) {
    return base::str("CUDA error ", static_cast<int>(result));
  }
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) return name;
  return base::str(name, " (", text, ")");
}

void Driver::check(CUresult result, const std::string& step) const {
  if (result == CUDA_SUCCESS) return;
  const std::string message = base::str(step, ": ", describe(result));
  if (result == CUDA_ERROR_OUT_OF_MEMORY) throw OutOfMemory(message);
  if (result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
      result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) {
    throw InvalidState(message + "; expected no stream capture under way");
  }
  throw CudaFailure(message, static_cast<int>(result));
}

}  // namespace fanfold::gpu
