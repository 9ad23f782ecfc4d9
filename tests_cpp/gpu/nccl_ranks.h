// SPDX-License-Identifier: Apache-2.0
#pragma once

// Communicators over the double of NCCL, for tests.

#include <dlfcn.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "fanfold/communicator.h"
#include "fanfold/nccl.h"
#include "nccl.h"
#include "support/spawn_ranks.h"

namespace fanfold::testing {

/// The double's file: beside the simulated device's.
inline const char* nccl_double() { return FANFOLD_NCCL_DOUBLE; }

/// A function of the double, which tests steer it by or use as another library would.
template <class Function>
Function* nccl_function(const char* name) {
  static void* const library = ::dlopen(nccl_double(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw std::runtime_error(std::string("no double of NCCL: ") + ::dlerror());
  return reinterpret_cast<Function*>(::dlsym(library, name));
}
#define FANFOLD_NCCL_DOUBLE_CALL(name) ::fanfold::testing::nccl_function<decltype(::name)>(#name)

inline NcclOptions nccl_options(int device) {
  NcclOptions options;
  options.device_index = device;
  options.library = nccl_double();
  return options;
}

/// Calls `body(communicator)` for each of `num_ranks` thread ranks, on communicators over NCCL;
/// rank r has device r mod `num_devices`.
inline void spawn_nccl_ranks(int num_ranks, int num_devices,
                             const std::function<void(Communicator&)>& body) {
  spawn_ranks(num_ranks, [&](Communicator& bootstrap) {
    Communicator communicator =
        Communicator::from_nccl(bootstrap, nccl_options(bootstrap.rank() % num_devices));
    body(communicator);
  });
}

}  // namespace fanfold::testing
