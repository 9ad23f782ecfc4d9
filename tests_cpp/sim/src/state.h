// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state of the engine, guarded by its one lock.

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "engine.h"
#include "slots.h"
#include "task.h"

namespace cudasim {

struct Device {
  int id = 0;
  int num_resident = 0;            // blocks
  std::size_t num_unfinished = 0;  // tasks
  cudaError_t sticky = cudaSuccess;
  bool has_failed = false;  // its work is to be dropped
  std::uint64_t peers = 0;  // bits: cudaDeviceEnablePeerAccess
  Stream legacy;
  std::map<std::thread::id, std::unique_ptr<Stream>> per_thread;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<TaskPointer> orphans;  // last tasks of destroyed streams
};

struct Engine {
  Engine();

  std::mutex mutex;
  std::atomic<int> num_waiting_for_lock{0};
  Config config;
  std::mt19937_64 random;
  Stats stats;
  std::vector<std::unique_ptr<Device>> devices;
  Slots slots;

  // Host threads
  std::vector<const std::function<bool()>*> host_waits;  // of those inside a blocking call
  VectorClock host_clock;
  ClockValue host_time = 1;

  // Tasks
  std::deque<TaskPointer> startable;
  std::map<std::uint64_t, TaskPointer> unfinished;  // by id
  std::uint64_t num_tasks = 0;                      // ever
  std::vector<Task*> kernels;                       // that run
  std::deque<TaskPointer> host_functions;
  int num_host_functions_running = 0;

  // Handles
  std::map<cudaEvent_t, std::shared_ptr<Event>> events;
  std::map<cudaGraph_t, std::unique_ptr<Graph>> graphs;
  std::map<cudaGraphExec_t, std::unique_ptr<Graph>> graph_instances;
  std::vector<std::shared_ptr<Capture>> captures;    // that go on
  unsigned long long num_captures = 0;               // ever
  std::map<const void*, std::size_t> shared_limits;  // of functions: cudaFuncSetAttribute
  std::map<std::uintptr_t, std::size_t> registered;  // host memory: cudaHostRegister

  // Scheduler
  std::vector<Fiber*> ready;
  std::vector<Fiber*> polling;
  std::vector<Fiber*> free_fibers;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Block>> free_blocks;
  std::uint64_t num_blocks = 0;  // ever
  bool any_device_failed = false;

  // Time
  std::uint64_t now_ns = 1'000'000'000;
  std::uint64_t idle_ns = 0;  // virtual time without progress
  int idle_rounds = 0;
  bool has_progress = false;
  bool has_met = false;     // threads met in barriers or warp operations, and nothing else happened
  double idle_since_s = 0;  // real time; 0: not idle
  double idle_last_s = 0;

  // Reports, faults, calls
  std::vector<Report> reports;
  std::map<std::pair<std::string, std::uint64_t>, std::size_t> report_index;
  struct Fault {
    int error = 0;
    int nth = 1;
    bool every = false;
  };
  std::map<std::string, Fault> faults;
  int calls_to_live = 0;  // 0: any number
  std::map<std::string, int> calls;
};

extern Engine& engine;

/// Reports once for each kind and key, and counts the rest.
void report_once(const char* kind, std::uint64_t key, const std::function<std::string()>& text);

/// The device has failed: its work stops, later calls return the error.
void fail_device(Device& device, cudaError_t error);

/// Something was done that others may wait for.
void made_progress();
/// With a random schedule: sometimes lets others run.
void maybe_yield();
double random_fraction();

/// One step of the devices; false if there is nothing to do.
bool step();

}  // namespace cudasim
