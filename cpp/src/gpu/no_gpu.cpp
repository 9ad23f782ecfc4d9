// SPDX-License-Identifier: Apache-2.0
#include "fanfold/error.h"
#include "gpu/memory_source.h"

namespace fanfold::gpu {

std::unique_ptr<memory::WindowSource> make_memory_source(comm::Group& /*group*/,
                                                         const GpuMemoryConfig& /*config*/,
                                                         base::Deadline /*deadline*/) {
  throw Unsupported(
      "GPU: expected a build with the GPU backend (FANFOLD_CUDA=ON), got one without");
}

}  // namespace fanfold::gpu
