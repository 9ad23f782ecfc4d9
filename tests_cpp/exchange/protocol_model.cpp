// SPDX-License-Identifier: Apache-2.0
#include "exchange/protocol_model.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "exchange/protocol_state.h"
#include "support/random_bits.h"

namespace fanfold::testing {
namespace {

// Without padding, equal states are equal bytes.
static_assert(std::has_unique_object_representations_v<ModelState>);

/// 128 bits stand for a state: two of the few million states colliding has a chance below 1e-24.
struct Fingerprint {
  std::uint64_t low;
  std::uint64_t high;
  bool operator==(const Fingerprint& other) const { return low == other.low && high == other.high; }
};
struct FingerprintHash {
  std::size_t operator()(const Fingerprint& print) const { return print.low; }
};

Fingerprint fingerprint(const ModelState& state) {
  Fingerprint print{1, 2};
  const auto* bytes = reinterpret_cast<const unsigned char*>(&state);
  for (std::size_t at = 0; at < sizeof state; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min<std::size_t>(8, sizeof state - at));
    print.low = mix(print.low ^ word);
    print.high = (print.high ^ word) * 0x9fb21c651e98df25ULL;
    print.high ^= print.high >> 35;
  }
  return print;
}

/// The visited states, in the order of the search, with how each was reached.
struct Arrival {
  std::uint32_t from;
  ModelMove move;
};

std::vector<std::string> trace_of(const ProtocolRules& rules, const std::vector<Arrival>& arrivals,
                                  std::uint32_t last) {
  std::vector<ModelMove> moves;
  for (std::uint32_t at = last; at != 0; at = arrivals[at].from) moves.push_back(arrivals[at].move);
  std::reverse(moves.begin(), moves.end());
  std::vector<std::string> lines;
  ModelState state = rules.initial();
  for (const ModelMove& move : moves) {
    lines.push_back(rules.describe(move, state));
    (void)rules.take(move, state);
  }
  return lines;
}

}  // namespace

ProtocolReport explore_protocol(const ProtocolOptions& options) {
  const ProtocolRules rules(options);
  std::unordered_set<Fingerprint, FingerprintHash> seen;
  std::vector<Arrival> arrivals;
  std::deque<ModelState> frontier;  // state i of the search, from `first` on
  std::uint32_t first = 0;
  ProtocolReport report;

  frontier.push_back(rules.initial());
  seen.insert(fingerprint(frontier.front()));
  arrivals.push_back({});
  std::vector<ModelMove> moves;
  while (!frontier.empty()) {
    const ModelState state = frontier.front();
    frontier.pop_front();
    const std::uint32_t number = first++;
    moves.clear();
    rules.moves(state, moves);
    if (moves.empty() && !rules.is_finished(state)) {
      report.violation = "deadlock: no rank can move";
      report.trace = trace_of(rules, arrivals, number);
      break;
    }
    for (const ModelMove& move : moves) {
      ModelState next = state;
      const std::string broken = rules.take(move, next);
      if (broken.empty() && !seen.insert(fingerprint(next)).second) continue;
      arrivals.push_back({number, move});
      if (!broken.empty()) {
        report.violation = broken;
        report.trace = trace_of(rules, arrivals, static_cast<std::uint32_t>(arrivals.size() - 1));
        break;
      }
      frontier.push_back(next);
    }
    if (!report.violation.empty()) break;
  }
  report.num_states = static_cast<std::int64_t>(seen.size());
  return report;
}

}  // namespace fanfold::testing
