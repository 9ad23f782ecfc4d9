// SPDX-License-Identifier: Apache-2.0
//
// The floor of one machine for an exchange through shared memory: what its cores can move at all.
//
// One round copies the same number of bytes as a real one, but contiguously: one block per
// destination, then all ranks meet, then every rank sums contiguous partials from its peers. No
// routing, no scattered rows. Also here: flag latency between two cores, copy rates, mapping.
//
// Loaded by Python through ctypes; every function is plain C and returns a negative number when a
// wait ran out of time. All sizes are bytes unless the name says otherwise.

#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "moves.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace {

using fanfold_bench::copy;
using fanfold_bench::store_fence;
using std::int32_t;
using std::int64_t;

constexpr int64_t kMaxRanks = 64;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kDeadlineNs = 60'000'000'000;
constexpr int64_t kTurnBytes = 1024;
constexpr int64_t kHugePage = int64_t{2} << 20;

// How dispatch copies. The last kind goes from destination to destination in small pieces, so that
// stores past the caches drain while own rows are copied.
enum Store : int32_t { kOrdinary = 0, kNonTemporal = 1, kInterleaved = 2 };

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

struct alignas(kLineBytes) Word {
  std::atomic<int64_t> value;
};

// Zero-filled shared memory. Each word has one writer.
struct Control {
  Word arrival[2][kMaxRanks];          // start line, as in clock.py
  Word flag[2][kMaxRanks][kMaxRanks];  // [phase][destination][source]
  Word ping;
  Word pong;
};

// Waits until `word` reaches `want`. Ranks that share a core must give it away while they wait.
bool await(const Word& word, int64_t want, bool crowded) {
  int64_t give_up = 0;
  for (int64_t tries = 1; word.value.load(std::memory_order_acquire) < want; ++tries) {
    relax();
    if (tries % 64 != 0) continue;
    if (crowded) sched_yield();
    if (tries % 65536 != 0) continue;
    sched_yield();
    const int64_t now = now_ns();
    if (give_up == 0) give_up = now + kDeadlineNs;
    if (now > give_up) return false;
  }
  return true;
}

}  // namespace

// ---- what Python sees ------------------------------------------------------------------------

extern "C" {

// One rank's part of the floor; floor.py fills it in.
struct FloorPlan {
  int32_t rank;
  int32_t num_ranks;
  int32_t crowded;  // more ranks than cores
  int32_t is_float32;
  int64_t tokens;
  int64_t hidden;
  int64_t row_bytes;      // of a dispatched row; the payload comes first
  const int64_t* rows;    // [source][destination]
  char* const* inbox;     // [destination][source]
  char* const* partials;  // [owner][source]
  const char* source;     // rows to send, contiguous
  char* out;              // [tokens][hidden]
  Control* control;
  int64_t last_start;  // the rest is state, zero at first
  int64_t epoch;
  int64_t meetings;
};

}  // extern "C"

namespace {

int64_t payload_bytes(const FloorPlan& p) { return p.hidden * (p.is_float32 != 0 ? 4 : 2); }

int64_t rows_between(const FloorPlan& p, int64_t source, int64_t destination) {
  return p.rows[source * p.num_ranks + destination];
}

// Agreed start of a phase: the latest arrival plus `lead_ns`; -1 when a rank does not come.
int64_t line_up(FloorPlan& p, int64_t lead_ns) {
  Word* words = p.control->arrival[++p.meetings & 1];
  int64_t start = std::max(now_ns(), p.last_start + 1);
  words[p.rank].value.store(start, std::memory_order_release);
  for (int32_t r = 0; r < p.num_ranks; ++r) {
    if (!await(words[r], p.last_start + 1, p.crowded != 0)) return -1;
    start = std::max(start, words[r].value.load(std::memory_order_acquire));
  }
  start += lead_ns;
  p.last_start = start;
  while (now_ns() < start) {
    if (p.crowded != 0) sched_yield();
  }
  return start;
}

void post(FloorPlan& p, int phase, int64_t destination) {
  p.control->flag[phase][destination][p.rank].value.store(p.epoch, std::memory_order_release);
}

bool meet(FloorPlan& p, int phase) {
  for (int64_t r = 0; r < p.num_ranks; ++r) {
    if (r != p.rank && !await(p.control->flag[phase][p.rank][r], p.epoch, p.crowded != 0)) {
      return false;
    }
  }
  return true;
}

// Copies bytes [begin, end) of every destination's block, own rows last.
void push(FloorPlan& p, int64_t begin, int64_t end, bool non_temporal) {
  for (int64_t step = 1; step <= p.num_ranks; ++step) {
    const int64_t to = (p.rank + step) % p.num_ranks;
    const int64_t stop = std::min(end, rows_between(p, p.rank, to) * p.row_bytes);
    if (begin >= stop) continue;
    copy(p.inbox[to * p.num_ranks + p.rank] + begin, p.source + begin, stop - begin,
         non_temporal && to != p.rank);
  }
}

bool dispatch(FloorPlan& p, Store store) {
  const int64_t bytes = p.tokens * p.row_bytes;
  const int64_t piece = store == kInterleaved ? kTurnBytes : bytes;
  for (int64_t at = 0; at < bytes; at += piece) push(p, at, at + piece, store != kOrdinary);
  store_fence();
  for (int64_t r = 0; r < p.num_ranks; ++r) {
    if (r != p.rank) post(p, 0, r);
  }
  return meet(p, 0);
}

// Identity in place of an expert: partial sums come to lie in this core's cache. Not timed.
void expert(FloorPlan& p) {
  const int64_t payload = payload_bytes(p);
  for (int64_t from = 0; from < p.num_ranks; ++from) {
    const int64_t at = p.rank * p.num_ranks + from;
    for (int64_t i = 0; i < rows_between(p, from, p.rank); ++i) {
      std::memcpy(p.partials[at] + i * payload, p.inbox[at] + i * p.row_bytes,
                  static_cast<std::size_t>(payload));
    }
  }
}

bool combine(FloorPlan& p) {
  for (int64_t r = 0; r < p.num_ranks; ++r) {
    if (r != p.rank) post(p, 1, r);
  }
  if (!meet(p, 1)) return false;
  const int64_t payload = payload_bytes(p);
  for (int64_t i = 0; i < p.tokens; ++i) {
    const char* rows[kMaxRanks];
    int64_t count = 0;
    for (int64_t owner = 0; owner < p.num_ranks; ++owner) {
      if (i >= rows_between(p, p.rank, owner)) continue;
      rows[count++] = p.partials[owner * p.num_ranks + p.rank] + i * payload;
    }
    char* out = p.out + i * payload;
    if (count == 0) {
      std::memset(out, 0, static_cast<std::size_t>(payload));
    } else if (p.is_float32 != 0) {
      fanfold_bench::sum_rows<fanfold_bench::Float32>(out, rows, count, p.hidden);
    } else {
      fanfold_bench::sum_rows<fanfold_bench::BFloat16>(out, rows, count, p.hidden);
    }
  }
  return true;
}

void stay_on_core(std::size_t index, cpu_set_t* before) {
  sched_getaffinity(0, sizeof *before, before);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (std::size_t core = 0, seen = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, before) && seen++ == index) CPU_SET(core, &one);
  }
  sched_setaffinity(0, sizeof one, &one);
}

}  // namespace

extern "C" {

int64_t floor_control_bytes() { return static_cast<int64_t>(sizeof(Control)); }

// Maps `bytes` of `fd` shared, on a 2 MiB boundary so that huge pages are possible.
// Returns null when the kernel refuses.
char* floor_map(int fd, int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  void* room = mmap(nullptr, size + static_cast<std::size_t>(kHugePage), PROT_NONE,
                    MAP_ANONYMOUS | MAP_PRIVATE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  char* at = static_cast<char*>(room);
  at += (kHugePage - reinterpret_cast<std::intptr_t>(at) % kHugePage) % kHugePage;
  void* got = mmap(at, size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED, fd, 0);
  return got == MAP_FAILED ? nullptr : static_cast<char*>(got);
}

// Asks for huge pages for [at, at + bytes). Returns 1 when the kernel built them.
int32_t floor_huge_pages(char* at, int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  madvise(at, size, MADV_HUGEPAGE);
  return madvise(at, size, MADV_COLLAPSE) == 0 ? 1 : 0;
}

// Runs `rounds` rounds and stores this rank's time of each phase in ns. Every rank calls this
// with equal arguments.
int32_t floor_run(FloorPlan* plan, int64_t rounds, int32_t store, int64_t lead_ns,
                  int64_t* dispatch_ns, int64_t* combine_ns) {
  FloorPlan& p = *plan;
  for (int64_t i = 0; i < rounds; ++i) {
    ++p.epoch;
    int64_t start = line_up(p, lead_ns);
    if (start < 0 || !dispatch(p, static_cast<Store>(store))) return -1;
    dispatch_ns[i] = now_ns() - start;
    expert(p);
    start = line_up(p, lead_ns);
    if (start < 0 || !combine(p)) return -1;
    combine_ns[i] = now_ns() - start;
  }
  return line_up(p, 0) < 0 ? -1 : 0;
}

// One-way latency in ns of a flag between two cores, in the quickest of `batches` batches, so that
// a preempted one does not count. Ranks 0 and 1 call it as `side` 0 and 1; `base` is the number of
// exchanges made on this control area so far.
double floor_flag_latency(Control* control, int32_t side, int64_t base, int64_t batches,
                          int64_t exchanges) {
  cpu_set_t before;
  stay_on_core(static_cast<std::size_t>(side), &before);
  Word& mine = side == 0 ? control->ping : control->pong;
  const Word& theirs = side == 0 ? control->pong : control->ping;
  int64_t quickest = kDeadlineNs;
  bool met = true;
  int64_t value = base;
  for (int64_t batch = 0; met && batch < batches; ++batch) {
    const int64_t begin = now_ns();
    for (int64_t i = 0; met && i < exchanges; ++i) {
      ++value;
      if (side == 0) mine.value.store(value, std::memory_order_release);
      met = await(theirs, value, false);
      if (side == 1) mine.value.store(value, std::memory_order_release);
    }
    quickest = std::min(quickest, now_ns() - begin);
  }
  sched_setaffinity(0, sizeof before, &before);
  return met ? static_cast<double>(quickest) / static_cast<double>(exchanges) / 2 : -1;
}

// Seconds that `repeats` copies of `bytes` take.
double floor_copy_seconds(char* to, const char* from, int64_t bytes, int64_t repeats,
                          int32_t non_temporal) {
  copy(to, from, bytes, non_temporal != 0);
  const int64_t begin = now_ns();
  for (int64_t i = 0; i < repeats; ++i) copy(to, from, bytes, non_temporal != 0);
  store_fence();
  return static_cast<double>(now_ns() - begin) * 1e-9;
}

}  // extern "C"
