// SPDX-License-Identifier: Apache-2.0
#include <signal.h>

#include <algorithm>
#include <utility>

#include "copies.h"
#include "state.h"

namespace cudasim {
namespace {

/// Set while this host thread is in a host function, which must not call the API.
thread_local bool is_in_host_function = false;

bool is_kernel(const TaskPointer& task) {
  return task != nullptr && task->operation.kind == Operation::Kind::kKernel;
}

TaskPointer create_task(Device& device, Operation operation, ClockPointer host_clock) {
  auto task = std::make_shared<Task>();
  task->id = ++engine.num_tasks;
  task->device = &device;
  task->operation = std::move(operation);
  task->host_clock = std::move(host_clock);
  engine.unfinished[task->id] = task;
  ++device.num_unfinished;
  return task;
}

void depend_on(const TaskPointer& task, const TaskPointer& other) {
  if (other == nullptr) return;
  task->dependencies.push_back(other);
  if (other->is_done()) return;
  ++task->num_awaited;
  other->successors.push_back(task);
}

/// The task may start when `primary` lets its dependents start.
void overlap_with(const TaskPointer& task, const TaskPointer& primary) {
  task->primary = primary;
  if (primary->is_done()) return;
  if (primary->run != nullptr && primary->run->lets_dependents_start()) return;
  ++task->num_awaited;
  primary->dependents.push_back(task);
}

void depend_on_stream_order(const TaskPointer& task, const TaskPointer& tail) {
  if (task->operation.programmatic_dependent && is_kernel(tail)) {
    overlap_with(task, tail);
  } else {
    depend_on(task, tail);
  }
}

/// The legacy stream waits for the blocking streams of its device, and they for it.
void depend_on_legacy_order(const TaskPointer& task, const Stream& stream) {
  Device& device = *stream.device;
  if (!stream.is_legacy) {
    if (stream.is_blocking) depend_on(task, device.legacy.tail);
    return;
  }
  for (const auto& other : device.streams) {
    if (other->is_blocking) depend_on(task, other->tail);
  }
  for (const auto& [thread, other] : device.per_thread) depend_on(task, other->tail);
}

void all_dependencies_named(const TaskPointer& task) {
  if (task->num_awaited == 0) engine.startable.push_back(task);
}

void one_less(const TaskPointer& task) {
  if (--task->num_awaited == 0 && !task->is_done()) engine.startable.push_back(task);
}

void forget(Task& task) {
  task.state = Task::State::kDone;
  task.end_ns = engine.now_ns;
  task.operation.body = nullptr;
  task.dependencies.clear();
  task.primary.reset();
  task.run.reset();
  --task.device->num_unfinished;
}

void finish(Task& task) {
  const TaskPointer keep = engine.unfinished.at(task.id);
  forget(task);
  engine.unfinished.erase(task.id);
  release_dependents(task);
  for (const TaskPointer& successor : std::exchange(task.successors, {})) one_less(successor);
  for (Fiber* const fiber : std::exchange(task.dependency_waiters, {})) {
    fiber->state = FiberState::kReady;
    engine.ready.push_back(fiber);
  }
  engine.has_progress = true;
}

void end_kernel(Task& task) {
  KernelRun& run = *task.run;
  engine.slots.give_back(run.slots, run.last_clock);
  if (!engine.config.race) return;
  run.end.raise(run.slots->first(), Slots::end_of(run.slots));
  if (task.start != nullptr) run.end.join(*task.start);
  // The kernel's end is also that of the one it overlapped with.
  if (task.primary != nullptr && task.primary->end != nullptr) run.end.join(*task.primary->end);
  task.end = std::make_shared<VectorClock>(std::move(run.end));
}

void finish_kernel(Task& task) {
  end_kernel(task);
  auto& kernels = engine.kernels;
  kernels.erase(std::find(kernels.begin(), kernels.end(), &task));
  finish(task);
}

void start(const TaskPointer& task) {
  task->state = Task::State::kRunning;
  task->start = task->host_clock;
  for (const TaskPointer& other : task->dependencies) task->start = joined(task->start, other->end);
  if (task->primary != nullptr) task->start = joined(task->start, task->primary->start);
  task->end = task->start;
  task->dependencies.clear();
  switch (task->operation.kind) {
    case Operation::Kind::kKernel:
      task->run = start_kernel(*task);
      engine.kernels.push_back(task.get());
      return;
    case Operation::Kind::kHost:
      engine.host_functions.push_back(task);
      return;
    case Operation::Kind::kCopy:
    case Operation::Kind::kSet:
      run_copy(*task);
      break;
    case Operation::Kind::kNothing:
      break;
  }
  finish(*task);
}

/// Issues blocks, and ends kernels that are over.
bool advance_kernels() {
  bool has_changed = false;
  for (std::size_t i = 0; i < engine.kernels.size(); ++i) {
    Task& task = *engine.kernels[i];
    KernelRun& run = *task.run;
    while (run.num_issued < run.order.size() &&
           task.device->num_resident < engine.config.resident_blocks) {
      issue_block(run);
      has_changed = true;
    }
    if (run.is_over() && (task.primary == nullptr || task.primary->is_done())) {
      finish_kernel(task);
      --i;
      has_changed = true;
    }
  }
  return has_changed;
}

}  // namespace

TaskPointer append(Stream& stream, Operation operation, const std::vector<TaskPointer>& others) {
  const TaskPointer task = create_task(*stream.device, std::move(operation), host_snapshot());
  depend_on_stream_order(task, stream.tail);
  depend_on_legacy_order(task, stream);
  for (const TaskPointer& other : others) depend_on(task, other);
  all_dependencies_named(task);
  stream.tail = task;
  return task;
}

void append_graph(Stream& stream, Graph& graph) {
  const ClockPointer host_clock = host_snapshot();
  const TaskPointer first = append(stream, {}, {graph.last_launch});
  std::vector<TaskPointer> tasks;
  std::vector<bool> is_leaf(graph.nodes.size(), true);
  for (const Node& node : graph.nodes) {
    const TaskPointer task = create_task(*node.device, node.operation, host_clock);
    if (node.dependencies.empty()) depend_on(task, first);
    for (const int index : node.dependencies) {
      const TaskPointer& other = tasks[static_cast<std::size_t>(index)];
      is_leaf[static_cast<std::size_t>(index)] = false;
      // Only a sole edge between kernels is a programmatic one.
      if (node.dependencies.size() == 1) {
        depend_on_stream_order(task, other);
      } else {
        depend_on(task, other);
      }
    }
    all_dependencies_named(task);
    tasks.push_back(task);
  }
  std::vector<TaskPointer> leaves;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    if (is_leaf[i]) leaves.push_back(tasks[i]);
  }
  graph.last_launch = append(stream, {}, leaves);
}

void release_dependents(Task& task) {
  for (const TaskPointer& dependent : std::exchange(task.dependents, {})) one_less(dependent);
}

bool advance_tasks() {
  bool has_advanced = false;
  for (;;) {
    bool has_changed = false;
    while (!engine.startable.empty()) {
      const TaskPointer task = engine.startable.front();
      engine.startable.pop_front();
      if (!task->is_done()) start(task);
      has_changed = true;
    }
    has_changed |= advance_kernels();
    if (!has_changed) break;
    has_advanced = true;
  }
  if (has_advanced) engine.has_progress = true;
  return has_advanced;
}

bool run_host_function() {
  if (engine.host_functions.empty()) return false;
  const TaskPointer task = engine.host_functions.front();
  engine.host_functions.pop_front();
  ++engine.num_host_functions_running;
  host_joins(task);
  const std::function<void()> body = task->operation.body;
  engine.mutex.unlock();
  is_in_host_function = true;
  body();
  is_in_host_function = false;
  engine.mutex.lock();
  --engine.num_host_functions_running;
  if (task->is_done()) return true;  // its device has failed meanwhile
  task->end = joined(task->start, host_snapshot());
  finish(*task);
  return true;
}

void drop_tasks(Device& device) {
  std::vector<TaskPointer> dropped;
  for (const auto& [id, task] : engine.unfinished) {
    if (task->device == &device) dropped.push_back(task);
  }
  auto& kernels = engine.kernels;
  kernels.erase(std::remove_if(kernels.begin(), kernels.end(),
                               [&](const Task* task) { return task->device == &device; }),
                kernels.end());
  auto& functions = engine.host_functions;
  functions.erase(std::remove_if(functions.begin(), functions.end(),
                                 [&](const TaskPointer& task) { return task->device == &device; }),
                  functions.end());
  for (const TaskPointer& task : dropped) {
    if (task->run != nullptr) end_kernel(*task);
    task->dependency_waiters.clear();
    if (task->end == nullptr) task->end = task->host_clock;
    forget(*task);
    engine.unfinished.erase(task->id);
  }
  for (const TaskPointer& task : dropped) {
    release_dependents(*task);
    for (const TaskPointer& successor : std::exchange(task->successors, {})) one_less(successor);
  }
}

void host_joins(const TaskPointer& task) {
  if (task != nullptr && task->end != nullptr) engine.host_clock.join(*task->end);
}

void host_joins(Device& device) {
  host_joins(device.legacy.tail);
  for (const auto& [thread, stream] : device.per_thread) host_joins(stream->tail);
  for (const auto& stream : device.streams) host_joins(stream->tail);
  for (const TaskPointer& task : device.orphans) host_joins(task);
  device.orphans.clear();
}

ClockPointer host_snapshot() {
  if (!engine.config.race) return nullptr;
  engine.host_clock.raise(kHostSlot, engine.host_time++);
  return std::make_shared<VectorClock>(engine.host_clock);
}

int injected_fault(const char* call) {
  ++engine.calls[call];
  if (engine.calls_to_live > 0) {
    --engine.calls_to_live;
    if (engine.calls_to_live == 0) ::raise(SIGKILL);
  }
  if (is_in_host_function) return cudaErrorNotPermitted;
  const auto it = engine.faults.find(call);
  if (it == engine.faults.end()) return 0;
  const Engine::Fault fault = it->second;
  if (fault.every) return fault.error;
  --it->second.nth;
  if (it->second.nth > 0) return 0;
  engine.faults.erase(it);
  return fault.error;
}

}  // namespace cudasim
