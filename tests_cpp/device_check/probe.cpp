// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include "device_check/commands.h"
#include "device_check/device.h"
#include "device_check/device_kernels.h"
#include "device_check/rank_case.h"
#include "fanfold/fabric_memory.h"
#include "support/spawn_ranks.h"

namespace fanfold::device_check {
namespace {

void print_device(int device) {
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::printf("probe: device %d: %s, %d multiprocessors, compute %d.%d\n", device, properties.name,
              properties.multiProcessorCount, properties.major, properties.minor);
}

const char* name_of(HandleKind kind) {
  switch (kind) {
    case HandleKind::kFabric:
      return "fabric handles";
    case HandleKind::kFileDescriptor:
      return "file descriptors";
    case HandleKind::kSameProcess:
      return "no handles (one process)";
    case HandleKind::kNccl:
      return "memory of NCCL";
  }
  return "unknown";
}

/// Each kind of handle by itself, with all ranks.
void print_kinds(int num_ranks) {
  for (const HandleKind kind :
       {HandleKind::kFabric, HandleKind::kFileDescriptor, HandleKind::kSameProcess}) {
    std::mutex mutex;
    std::string verdict = "works";
    testing::spawn_ranks(num_ranks, [&](Communicator& communicator) {
      GpuMemoryConfig gpu;
      gpu.device = take_device(communicator.rank());
      gpu.kinds = {kind};
      try {
        FabricMemory memory(communicator, 1 << 20, gpu);
        memory.close();
      } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> lock(mutex);
        verdict = error.what();
      }
    });
    std::printf("probe: memory shared by %s: %s\n", name_of(kind), verdict.c_str());
  }
}

/// Whether as many streams of one device run at the same time as there are ranks.
bool streams_meet(int num_streams) {
  take_device(0);
  Buffer num_arrived(4);
  Buffer has_met(std::int64_t{4} * num_streams);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < num_streams; ++i) streams.push_back(std::make_unique<Stream>());
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (int i = 0; i < num_streams; ++i) {
    const MeetParams params{static_cast<std::uint32_t*>(num_arrived.get()),
                            static_cast<std::uint32_t*>(has_met.get()),
                            static_cast<std::uint32_t>(num_streams), static_cast<std::uint32_t>(i)};
    require(meet(params, streams[static_cast<std::size_t>(i)]->get()), "meet");
  }
  for (const auto& stream : streams) stream->wait();
  for (const std::uint32_t met :
       has_met.read<std::uint32_t>(static_cast<std::size_t>(num_streams))) {
    if (met == 0) return false;
  }
  return true;
}

}  // namespace

bool probe(const Options& options) {
  int num_devices = 0;
  require(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  for (int device = 0; device < num_devices; ++device) print_device(device);
  print_kinds(options.ranks);
  const bool meets = streams_meet(options.ranks);
  std::printf("probe: %d streams of one device %s\n", options.ranks,
              meets ? "run at the same time" : "do NOT run at the same time");
  return meets;
}

}  // namespace fanfold::device_check
