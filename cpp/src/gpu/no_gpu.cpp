// SPDX-License-Identifier: Apache-2.0
#include "fanfold/error.h"
#include "gpu/backend.h"
#include "gpu/memory_source.h"
#include "gpu/nccl.h"

namespace fanfold::gpu {
namespace {

[[noreturn]] void refuse() {
  throw Unsupported(
      "GPU: expected a build with the GPU backend (FANFOLD_CUDA=ON), got one without");
}

}  // namespace

std::unique_ptr<memory::WindowSource> make_memory_source(
    comm::Group& /*group*/, std::shared_ptr<comm::DeviceCollectives> /*device*/,
    const GpuMemoryConfig& /*config*/, base::Deadline /*deadline*/) {
  refuse();
}

std::unique_ptr<comm::DeviceCollectives> make_nccl_collectives(
    comm::Group& /*group*/, const NcclOptions& /*options*/,
    std::chrono::nanoseconds /*call_timeout*/, base::Deadline /*deadline*/) {
  refuse();
}

std::unique_ptr<comm::DeviceCollectives> shrink_nccl_collectives(
    comm::DeviceCollectives& /*old*/, const std::vector<int>& /*lost*/, comm::Group& /*group*/,
    std::chrono::nanoseconds /*call_timeout*/, base::Deadline /*deadline*/) {
  refuse();
}

std::unique_ptr<exec::DeviceBackend> make_backend(int /*device*/) { refuse(); }

}  // namespace fanfold::gpu
