// SPDX-License-Identifier: Apache-2.0
#pragma once

// One state of the protocol model: plain bytes, so that states can be hashed and compared.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "exchange/protocol_model.h"

namespace fanfold::testing {

inline constexpr int kModelRanks = 3;
inline constexpr int kModelSlots = 2;
inline constexpr int kModelScript = 16;

using Byte = std::uint8_t;
template <class Value>
using PerRank = std::array<Value, kModelRanks>;
template <class Value>
using PerSlot = std::array<Value, kModelSlots>;

/// What a rank is doing: nothing, a call of the script, or a reset.
enum class Doing : Byte { kNothing, kCall, kReset };

/// A call of the common sequence.
struct ModelCall {
  RoundCall call;
  Byte round;
};

struct ModelRank {
  Byte generation;
  Byte epoch_base;     // epoch of the generation's round 0
  Byte highest_epoch;  // used so far; while resetting, of the group as far as known
  Byte next_round;
  PerSlot<Byte> stage;         // RoundStage
  PerSlot<Byte> round;         // the slot's latest
  PerSlot<Byte> num_combines;  // of that round so far
  Byte is_failed;
  Doing doing;
  ModelCall call;   // that it is doing
  Byte step;        // of the call or the reset
  Byte script_at;   // next call of the script
  Byte abort_word;  // in this rank's window: 1 + generation, 0 = none
};

struct ModelState {
  PerRank<ModelRank> ranks;
  std::array<ModelCall, kModelScript> script;
  Byte script_size;
  Byte script_generation;
  Byte aborter;   // 1 + the rank whose abort is under way, 0 = none
  Byte abort_at;  // windows that it has reached
  Byte aborts_left;

  // Memory. First index: whose window; second: who wrote it. A combine flag is epoch and number of
  // the combine; a stamp is that and the generation.
  PerRank<PerRank<PerSlot<Byte>>> dispatch_flag;
  PerRank<PerRank<PerSlot<Byte>>> combine_flag;
  PerRank<PerRank<PerSlot<Byte>>> ack_flag;
  PerRank<PerRank<PerSlot<Byte>>> rows_stamp;
  PerRank<PerSlot<Byte>> partials_stamp;
  PerRank<PerRank<Byte>> reset_generation;
  PerRank<PerRank<std::array<Byte, 2>>> reset_epoch;

  // What only an onlooker knows.
  PerRank<PerRank<PerSlot<Byte>>> rows_in_use;      // arrived, not given up by the window's owner
  PerRank<PerRank<PerSlot<Byte>>> dispatch_unread;  // flag published, not read
  PerRank<PerRank<PerSlot<Byte>>> combine_unread;
  PerRank<PerRank<PerSlot<Byte>>> ack_unread;
  PerRank<PerRank<PerSlot<Byte>>> partials_in_use;  // [owner][peer] the peer has yet to pull
};

inline ModelRank& at(ModelState& state, int rank) {
  return state.ranks[static_cast<std::size_t>(rank)];
}
inline const ModelRank& at(const ModelState& state, int rank) {
  return state.ranks[static_cast<std::size_t>(rank)];
}
template <class Table>
auto& at(Table& table, int i, int j, int slot) {
  return table[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)]
              [static_cast<std::size_t>(slot)];
}
template <class Table>
auto& at(Table& table, int i, int j) {
  return table[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
}

inline Byte byte(int value) { return static_cast<Byte>(value); }
inline int epoch_of(const ModelRank& rank, int round) { return rank.epoch_base + round; }
inline RoundStage stage_of(const ModelRank& rank, int slot) {
  return static_cast<RoundStage>(rank.stage[static_cast<std::size_t>(slot)]);
}
/// Of the present combine of a round.
inline int combine_epoch_of(const ModelRank& rank, int round, int slot) {
  return epoch_of(rank, round) + 16 * rank.num_combines[static_cast<std::size_t>(slot)];
}

/// A step that can be taken: which rank moves, and how.
struct ModelMove {
  enum class Kind : Byte {
    kStep,        // of what it is doing
    kStartCall,   // the next call of the script
    kAppendCall,  // a new call: `call`, `round`
    kStartReset,
    kFail,   // its wait gives up
    kAbort,  // another thread of the rank calls abort, or goes on with it
  };
  Byte rank;
  Kind kind;
  ModelCall call;
};

/// The rules: which moves a state has, and what they do.
class ProtocolRules {
 public:
  explicit ProtocolRules(const ProtocolOptions& options) : options_(options) {}

  ModelState initial() const;
  /// Appends the moves that `state` allows.
  void moves(const ModelState& state, std::vector<ModelMove>& out) const;
  /// Takes a move; returns what it breaks, or an empty string.
  std::string take(const ModelMove& move, ModelState& state) const;
  /// Whether nothing is left to do and everything came to rest.
  bool is_finished(const ModelState& state) const;
  std::string describe(const ModelMove& move, const ModelState& state) const;

 private:
  int num_peers() const { return options_.num_ranks - 1; }
  int peer(int rank, int index) const { return (rank + 1 + index) % options_.num_ranks; }
  int slot_of(int round) const { return round % options_.max_in_flight; }
  bool has_fault(ProtocolFault fault) const { return options_.fault == fault; }
  bool pulls(int rank) const { return rank != 0 || options_.rank_zero_pulls; }
  /// Steps of a combine_recv up to the last pull; the acknowledgements of a kept round follow.
  int num_pull_steps(int rank) const { return (pulls(rank) ? 2 : 1) * num_peers(); }
  bool allows(const ModelRank& rank, const ModelCall& call) const;
  /// Whether the rank's next step must wait, and for what.
  bool is_waiting(const ModelState& state, int rank, bool* is_ready) const;
  void list_calls(const ModelRank& rank, Byte index, std::vector<ModelMove>& out) const;

  void start_call(ModelState& state, int rank, const ModelCall& call) const;
  void go_on_with_abort(ModelState& state, int rank) const;
  std::string step_call(ModelState& state, int rank) const;
  std::string step_dispatch_send(ModelState& state, int rank, const ModelCall& call) const;
  std::string step_dispatch_recv(ModelState& state, int rank, const ModelCall& call) const;
  std::string step_combine_send(ModelState& state, int rank, const ModelCall& call) const;
  std::string step_combine_recv(ModelState& state, int rank, const ModelCall& call) const;
  std::string step_acknowledge(ModelState& state, int rank, const ModelCall& call) const;
  std::string step_release(ModelState& state, int rank, const ModelCall& call) const;
  std::string write_rows(ModelState& state, int rank, int to, const ModelCall& call) const;
  std::string read_rows(const ModelState& state, int rank, const ModelCall& call) const;
  std::string write_partials(ModelState& state, int rank, const ModelCall& call) const;
  std::string publish_dispatch(ModelState& state, int rank, int to, const ModelCall& call) const;
  std::string publish_combine(ModelState& state, int rank, int to, const ModelCall& call) const;
  void step_reset(ModelState& state, int rank) const;
  void finish_reset(ModelState& state, int rank) const;
  void give_up_generation(ModelState& state, int rank) const;
  void finish_call(ModelState& state, int rank) const;
  void trim_script(ModelState& state) const;

  ProtocolOptions options_;
};

}  // namespace fanfold::testing
