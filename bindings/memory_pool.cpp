// SPDX-License-Identifier: Apache-2.0
#include "fanfold/memory_pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "bind.h"
#include "convert.h"
#include "fanfold/error.h"

namespace fanfold::python {
namespace {

// torch.cuda.memory.CUDAPluggableAllocator calls plain C functions that carry nothing of ours: each
// pool that torch uses has a pair of its own, and so many can be in use at a time.
constexpr int kNumSlots = 8;

struct Slot {
  std::mutex mutex;  // guards `pool`: torch frees on any thread
  std::shared_ptr<MemoryPool> pool;
  int device = 0;
};

std::array<Slot, kNumSlots>& slots() {
  static std::array<Slot, kNumSlots> all;
  return all;
}

void* allocate_from(std::size_t slot, ssize_t bytes, int device) noexcept {
  Slot& used = slots()[slot];
  const std::lock_guard<std::mutex> lock(used.mutex);
  // torch asks for its current device; the window is mapped for one.
  if (used.pool == nullptr || used.device != device) return nullptr;
  return used.pool->allocate(bytes);
}

void free_to(std::size_t slot, void* data) noexcept {
  Slot& used = slots()[slot];
  const std::lock_guard<std::mutex> lock(used.mutex);
  if (used.pool == nullptr) return;
  try {
    used.pool->free(static_cast<std::byte*>(data));
  } catch (const InvalidArgument&) {
    // What the pool did not give is not its to take.
  }
}

std::pair<std::string, std::string> names_of(std::size_t slot) {
  const std::string number = std::to_string(slot);
  return {"fanfold_pool_allocate_" + number, "fanfold_pool_free_" + number};
}

std::pair<std::string, std::string> attach(std::shared_ptr<MemoryPool> pool) {
  for (std::size_t i = 0; i < kNumSlots; ++i) {
    Slot& slot = slots()[i];
    const std::lock_guard<std::mutex> lock(slot.mutex);
    if (slot.pool != nullptr) continue;
    slot.device = pool->memory().memory().device_index;
    slot.pool = std::move(pool);
    return names_of(i);
  }
  throw InvalidState("memory pool: expected at most " + std::to_string(kNumSlots) +
                     " pools in use by torch, got one more; close one");
}

void detach(const std::shared_ptr<MemoryPool>& pool) {
  for (Slot& slot : slots()) {
    const std::lock_guard<std::mutex> lock(slot.mutex);
    if (slot.pool != pool) continue;
    if (pool->num_in_use() > 0) {
      throw InvalidState("memory pool: expected all of it to be back, got " +
                         std::to_string(pool->bytes_in_use()) +
                         " bytes in use; delete the tensors and torch's pool first");
    }
    slot.pool.reset();
  }
}

}  // namespace

void bind_memory_pool(nb::module_& m) {
  using namespace nanobind::literals;
  nb::class_<MemoryPool>(m, "MemoryPool",
                         "Divides one rank's window of a block: equal calls in equal order give "
                         "equal offsets on every rank. Any thread may call it.")
      .def(nb::new_([](const SymmetricMemory& memory, int rank) {
             return std::make_shared<MemoryPool>(memory, rank);
           }),
           "memory"_a, "rank"_a,
           "Local. The whole window of `rank` belongs to the pool from now on.")
      .def_prop_ro("num_bytes", &MemoryPool::bytes, "Of the window.")
      .def_prop_ro("bytes_in_use", &MemoryPool::bytes_in_use)
      .def_prop_ro("num_in_use", &MemoryPool::num_in_use, "Parts given out.")
      .def(
          "offset_of",
          [](const MemoryPool& self, nb::handle tensor) {
            Arguments args;
            const TensorView view = args.view(tensor, "tensor");
            return self.offset_of(static_cast<const std::byte*>(view.data));
          },
          "tensor"_a, nb::sig("def offset_of(self, tensor: typing.Any) -> int"),
          "Where a tensor of the pool begins in the window, in bytes: its peers lie there in the\n"
          "windows of the other ranks.\n\nRaises:\n    InvalidArgument: the tensor is not of this "
          "pool.")
      .def("give_to_torch", &attach,
           "Gives the pool to torch; returns the names of its C functions in this module.")
      .def("take_from_torch", &detach,
           "Takes it back. Raises InvalidState while a part is in use.");
}

}  // namespace fanfold::python

#define FANFOLD_POOL_FUNCTIONS(slot)                                                    \
  extern "C" __attribute__((visibility("default"))) void* fanfold_pool_allocate_##slot( \
      ssize_t bytes, int device, void* /*stream*/) {                                    \
    return fanfold::python::allocate_from(slot, bytes, device);                         \
  }                                                                                     \
  extern "C" __attribute__((visibility("default"))) void fanfold_pool_free_##slot(      \
      void* data, ssize_t /*bytes*/, int /*device*/, void* /*stream*/) {                \
    fanfold::python::free_to(slot, data);                                               \
  }

FANFOLD_POOL_FUNCTIONS(0)
FANFOLD_POOL_FUNCTIONS(1)
FANFOLD_POOL_FUNCTIONS(2)
FANFOLD_POOL_FUNCTIONS(3)
FANFOLD_POOL_FUNCTIONS(4)
FANFOLD_POOL_FUNCTIONS(5)
FANFOLD_POOL_FUNCTIONS(6)
FANFOLD_POOL_FUNCTIONS(7)
