// SPDX-License-Identifier: Apache-2.0
// The library against the model's transition table: every sequence of calls up to a length, each
// call made on both ranks by one thread. What the table allows must succeed, anything else must be
// InvalidState and change nothing.

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exchange/round_rules.h"
#include "fanfold/all_to_all.h"
#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "support/sanitizer.h"

namespace fanfold::testing {
namespace {

constexpr int kNumRanks = 2;
constexpr int kMaxRounds = 3;
constexpr RoundCall kCallsOfARound[] = {RoundCall::kDispatchRecv, RoundCall::kCombineSend,
                                        RoundCall::kCombineSendKeep, RoundCall::kCombineRecv,
                                        RoundCall::kRelease};

struct Call {
  RoundCall call;
  int round;
};

/// What the table says of a sequence of calls.
struct TableState {
  int max_in_flight;
  std::vector<RoundStage> stages = {};  // of the rounds that were begun
  std::vector<int> num_kept = {};       // combines of each that left it open

  bool allows(const Call& call) const {
    const auto size = static_cast<int>(stages.size());
    if (call.call != RoundCall::kDispatchSend) {
      // A round whose slot went on to a later round is at no stage.
      return call.round >= size - max_in_flight &&
             is_allowed(stages[static_cast<std::size_t>(call.round)], call.call);
    }
    const int previous = size - max_in_flight;
    return previous < 0 || is_allowed(stages[static_cast<std::size_t>(previous)], call.call);
  }
  void take(const Call& call) {
    if (call.call == RoundCall::kDispatchSend) {
      stages.push_back(RoundStage::kFree);
      num_kept.push_back(0);
    }
    const auto at = static_cast<std::size_t>(call.round);
    if (call.call == RoundCall::kCombineSendKeep) ++num_kept[at];
    stages[at] = stage_after(stages[at], call.call);
  }
};

/// Two ranks of the real library, driven by one thread.
class Pair {
 public:
  explicit Pair(const AllToAllConfig& config)
      : communicators_(Communicator::threads(kNumRanks)), config_(config) {
    on_threads([this](std::size_t r) {
      ranks_[r] = std::make_unique<AllToAll>(communicators_[r], config_);
    });
  }
  ~Pair() {
    on_threads([this](std::size_t r) { ranks_[r]->close(); });
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  /// Ends all rounds; the handles of earlier ones are forgotten.
  void start_again() {
    on_threads([this](std::size_t r) { ranks_[r]->reset(); });
    for (auto& rounds : rounds_) rounds.clear();
  }

  /// Where the experts write: only while the rows are there, or a peer may still pull the last
  /// ones.
  void expect_combine_buffer(int round, bool is_there) {
    for (std::size_t r = 0; r < kNumRanks; ++r) {
      const Round& handle = rounds_[r][static_cast<std::size_t>(round)];
      if (is_there) {
        EXPECT_NO_THROW((void)ranks_[r]->combine_buffer(handle));
      } else {
        EXPECT_THROW((void)ranks_[r]->combine_buffer(handle), InvalidState);
      }
    }
  }

  /// `stage` of the round before the call. The acknowledgements of a kept round are sent and
  /// awaited by combine_recv alone, which therefore needs both ranks at a time.
  void make(const Call& call, RoundStage stage) {
    if (call.call == RoundCall::kCombineRecv && stage == RoundStage::kKeepSent) {
      return on_threads([&](std::size_t r) { make(r, call); });
    }
    for (std::size_t r = 0; r < kNumRanks; ++r) make(r, call);
  }
  void make(std::size_t r, const Call& call) {
    AllToAll& rank = *ranks_[r];
    const auto at = static_cast<std::size_t>(call.round);
    switch (call.call) {
      case RoundCall::kDispatchSend: {
        DispatchInputs inputs;
        inputs.topk_ids = TensorView(ids_, DType::kInt32, {2, 1});
        inputs.payloads = {TensorView(rows_, DType::kFloat32, {2, 1})};
        rounds_[r].push_back(rank.dispatch_send(inputs));
        return;
      }
      case RoundCall::kDispatchRecv:
        (void)rank.dispatch_recv(rounds_[r][at]);
        return;
      case RoundCall::kCombineSend:
      case RoundCall::kCombineSendKeep: {
        CombineInputs inputs;
        inputs.release = call.call == RoundCall::kCombineSend;
        inputs.y = TensorView(results_, DType::kFloat32, {kNumRanks, 2, 1});
        return rank.combine_send(inputs, rounds_[r][at]);
      }
      case RoundCall::kCombineRecv: {
        CombineInputs inputs;
        inputs.out = TensorView(out_[r], DType::kFloat32, {2, 1});
        rank.combine_recv(inputs, rounds_[r][at]);
        EXPECT_EQ(out_[r][0], 3.0F);  // one expert each
        EXPECT_EQ(out_[r][1], 3.0F);
        return;
      }
      case RoundCall::kRelease:
        return rank.release(rounds_[r][at]);
    }
  }

 private:
  template <class Body>
  void on_threads(const Body& body) {
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  }

  std::vector<Communicator> communicators_;
  AllToAllConfig config_;
  std::unique_ptr<AllToAll> ranks_[kNumRanks];
  std::vector<Round> rounds_[kNumRanks];
  const std::int32_t ids_[2] = {0, 1};
  const float rows_[2] = {1.0F, 2.0F};
  const float results_[4] = {3.0F, 3.0F, 3.0F, 3.0F};
  float out_[kNumRanks][2] = {};
};

std::string text_of(const std::vector<Call>& calls) {
  std::string text;
  for (const Call& call : calls) {
    text += std::string(text.empty() ? "" : ", ") + name_of(call.call) + "(" +
            std::to_string(call.round) + ")";
  }
  return text;
}

/// Walks all sequences, depth first. A sequence is replayed from a reset, so that reset is tried in
/// every state as well; what the table refuses is tried on the way, since it must change nothing.
class Walk {
 public:
  Walk(Pair& pair, int max_in_flight, int max_length)
      : pair_(pair), max_in_flight_(max_in_flight), max_length_(max_length) {}

  void visit() {
    const std::vector<Call> here = calls_;
    TableState table{max_in_flight_};
    for (const Call& call : here) table.take(call);
    replay(here);
    for (int round = 0; round < static_cast<int>(table.stages.size()); ++round) {
      pair_.expect_combine_buffer(round, table.allows({RoundCall::kCombineSend, round}));
    }
    std::vector<Call> allowed;
    for (const Call& call : candidates(table)) {
      if (!table.allows(call)) {
        expect_refused(call);
      } else if (call.call != RoundCall::kCombineSendKeep ||
                 table.num_kept[static_cast<std::size_t>(call.round)] == 0) {
        allowed.push_back(call);  // kept open once is enough
      }
    }
    if (static_cast<int>(here.size()) == max_length_) return;
    for (const Call& call : allowed) {
      calls_.push_back(call);
      visit();
      calls_.pop_back();
      if (::testing::Test::HasFailure()) return;  // one message is enough
    }
  }
  std::int64_t num_refused() const { return num_refused_; }

 private:
  static std::vector<Call> candidates(const TableState& table) {
    const auto size = static_cast<int>(table.stages.size());
    std::vector<Call> calls;
    if (size < kMaxRounds) calls.push_back({RoundCall::kDispatchSend, size});
    for (int round = 0; round < size; ++round) {
      for (const RoundCall call : kCallsOfARound) calls.push_back({call, round});
    }
    return calls;
  }

  void replay(const std::vector<Call>& calls) {
    pair_.start_again();
    TableState table{max_in_flight_};
    for (const Call& call : calls) {
      const bool is_new = call.call == RoundCall::kDispatchSend;
      const RoundStage stage =
          is_new ? RoundStage::kFree : table.stages[static_cast<std::size_t>(call.round)];
      EXPECT_NO_THROW(pair_.make(call, stage)) << name_of(call.call) << " in " << text_of(calls);
      table.take(call);
    }
  }

  void expect_refused(const Call& call) {
    ++num_refused_;
    for (std::size_t r = 0; r < kNumRanks; ++r) {
      EXPECT_THROW(pair_.make(r, call), InvalidState)
          << name_of(call.call) << "(" << call.round << ") after " << text_of(calls_);
    }
  }

  Pair& pair_;
  int max_in_flight_;
  int max_length_;
  std::vector<Call> calls_;
  std::int64_t num_refused_ = 0;
};

TEST(ProtocolCallsTest, ExactlyTheCallsOfTheTableAreAccepted) {
  for (const int max_in_flight : {1, 2}) {
    AllToAllConfig config;
    config.num_experts = 2;
    config.top_k = 1;
    config.max_tokens_per_rank = 2;
    config.hidden = 1;
    config.dtype = DType::kFloat32;
    config.strategy = Strategy::kOneSided;
    config.max_in_flight = max_in_flight;
    Pair pair(config);
    Walk walk(pair, max_in_flight, kIsSanitizer ? 6 : 10);
    walk.visit();
    EXPECT_GT(walk.num_refused(), 40);
  }
}

}  // namespace
}  // namespace fanfold::testing
