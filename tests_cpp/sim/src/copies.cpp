// SPDX-License-Identifier: Apache-2.0
#include "copies.h"

#include <algorithm>
#include <cstring>

#include "checks.h"
#include "state.h"

namespace cudasim {
namespace {

const char* name_of(const Task& task) {
  return task.operation.kind == Operation::Kind::kSet ? "memset" : "copy";
}

/// Checks one run of bytes, mapping by mapping; false if it must not be touched.
bool check_run(const Task& task, const Accessor& accessor, const void* begin, std::size_t bytes,
               bool is_write) {
  auto address = reinterpret_cast<std::uintptr_t>(begin);
  if (!is_in_arena(address)) return true;  // pageable host memory
  while (bytes > 0) {
    const Mapping* const mapping = find_mapping(address);
    const bool is_allowed = mapping != nullptr && ((mapping->devices >> task.device->id) & 1) != 0;
    std::size_t here = 0;
    if (is_allowed) {
      const std::size_t offset = address - mapping->address;
      const std::size_t end = std::min(mapping->bytes, mapping->physical->bytes - mapping->offset);
      here = offset < end ? std::min(bytes, end - offset) : 0;
    }
    if (here == 0) {
      report("oob",
             std::string(name_of(task)) + " on rank " + std::to_string(task.device->id) +
                 (mapping == nullptr || is_allowed ? " touches device addresses without memory"
                                                   : " touches memory it has no access to"));
      fail_device(*task.device, cudaErrorIllegalAddress);
      return false;
    }
    check_copy(accessor, *mapping, {address, here, is_write, Strength::kWeak, kNoPosition});
    address += here;
    bytes -= here;
  }
  return true;
}

}  // namespace

void run_copy(Task& task) {
  const Operation& operation = task.operation;
  const bool is_copy = operation.kind == Operation::Kind::kCopy;
  SlotRange* const slots =
      engine.slots.take(1, task.start, {"", task.device->id, 1, name_of(task)});
  const Accessor accessor{task.start, slots->first(), slots->start(), task.device->id};
  for (std::size_t row = 0; row < operation.num_rows; ++row) {
    auto* const dst = static_cast<char*>(operation.dst) + row * operation.dst_pitch;
    const auto* const src = static_cast<const char*>(operation.src) + row * operation.src_pitch;
    if (is_copy && !check_run(task, accessor, src, operation.bytes, false)) break;
    if (!check_run(task, accessor, dst, operation.bytes, true)) break;
    if (is_copy) {
      std::memmove(dst, src, operation.bytes);
    } else {
      std::memset(dst, operation.value, operation.bytes);
    }
  }
  engine.slots.give_back(slots, slots->start());
  task.end =
      engine.config.race ? raised(task.start, slots->first(), Slots::end_of(slots)) : task.start;
}

}  // namespace cudasim
