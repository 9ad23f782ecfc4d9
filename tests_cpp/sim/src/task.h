// SPDX-License-Identifier: Apache-2.0
#pragma once

// Work of the devices. Everything that is enqueued becomes a task, with the tasks it depends on:
// the one before it in its stream, those of events it waits for, the edges of a graph. A task
// starts when all of them are done, and knows then what they knew at their ends.

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "clocks.h"

namespace cudasim {

struct Device;
struct Fiber;
struct KernelRun;
struct Task;
using TaskPointer = std::shared_ptr<Task>;

/// What a task does; also what a node of a graph keeps.
struct Operation {
  enum class Kind : std::uint8_t { kNothing, kKernel, kCopy, kSet, kHost };
  Kind kind = Kind::kNothing;
  std::function<void()> body;  // of a kernel's thread, or the host function

  std::string name;
  dim3 grid{1, 1, 1};
  dim3 block{1, 1, 1};
  std::size_t dynamic_shared_bytes = 0;
  bool programmatic_dependent = false;

  // Copies and memsets: `num_rows` rows of `bytes`.
  void* dst = nullptr;
  const void* src = nullptr;
  std::size_t bytes = 0;
  std::size_t num_rows = 1;
  std::size_t dst_pitch = 0;
  std::size_t src_pitch = 0;
  int value = 0;
};

struct Task {
  enum class State : std::uint8_t { kWaiting, kRunning, kDone };

  std::uint64_t id = 0;
  Operation operation;
  Device* device = nullptr;
  State state = State::kWaiting;
  /// What it waits for before it starts, and the number of those.
  std::vector<TaskPointer> dependencies;
  int num_awaited = 0;
  /// A kernel that it may overlap with once that lets its dependents start (programmatic launch).
  TaskPointer primary;
  /// Those that count on this one's end, and those that count on its launching of dependents.
  std::vector<TaskPointer> successors;
  std::vector<TaskPointer> dependents;
  std::vector<Fiber*> dependency_waiters;

  ClockPointer host_clock;  // what the host knew when it enqueued the task
  ClockPointer start;
  ClockPointer end;
  std::uint64_t end_ns = 0;
  std::unique_ptr<KernelRun> run;

  bool is_done() const { return state == State::kDone; }
};

/// A node of a graph; `dependencies` are indices of earlier nodes.
struct Node {
  Operation operation;
  Device* device = nullptr;
  std::vector<int> dependencies;
};

struct Graph {
  std::vector<Node> nodes;
  TaskPointer last_launch;  // launches of one instance do not overlap
};

struct Stream;

/// A capture that goes on, in all streams it has spread to.
struct Capture {
  Stream* origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  unsigned long long id = 0;
  std::vector<Node> nodes;
  std::set<Stream*> streams;
  bool is_invalid = false;
  bool has_ended = false;
};

struct Stream {
  Device* device = nullptr;
  bool is_legacy = false;
  bool is_blocking = true;  // takes part in the ordering of the legacy stream
  int priority = 0;
  unsigned flags = 0;
  TaskPointer tail;  // the last task, done or not
  std::shared_ptr<Capture> capture;
  std::vector<int> capture_tail;  // nodes that the next one depends on

  bool is_idle() const { return tail == nullptr || tail->is_done(); }
};

struct Event {
  Device* device = nullptr;
  bool has_timing = true;
  TaskPointer task;                  // null: never recorded
  std::shared_ptr<Capture> capture;  // last recorded in a capture
  std::vector<int> capture_tail;

  bool is_done() const { return task == nullptr || task->is_done(); }
};

/// Enqueues on the stream after its tail and `others`; becomes its tail. Not for capturing streams.
TaskPointer append(Stream& stream, Operation operation,
                   const std::vector<TaskPointer>& others = {});
/// As append(), but into the capture if the stream captures.
cudaError_t enqueue(Stream& stream, Operation operation);
/// Enqueues all nodes of the graph, with its edges.
void append_graph(Stream& stream, Graph& graph);

/// Starts what can start, and ends what has ended; true if anything did.
bool advance_tasks();
/// Runs one host function that is due, without the engine's lock; false if there is none.
bool run_host_function();
/// Ends all tasks of a device that has failed.
void drop_tasks(Device& device);
/// Tells those that wait for it that the kernel lets its dependents start.
void release_dependents(Task& task);

/// Orders the host after a task that is done.
void host_joins(const TaskPointer& task);
/// The same for all that the streams of a device have done.
void host_joins(Device& device);
/// What the host knows now; later actions of the host are not in it.
ClockPointer host_snapshot();

}  // namespace cudasim
