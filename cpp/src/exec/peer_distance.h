// SPDX-License-Identifier: Apache-2.0
#pragma once

// How far apart two ranks' cores are, learnt from the flags that travel between them anyway.

#include <algorithm>
#include <cstdint>

namespace fanfold::exec {

/// Smallest recent latency of a peer's flags. Cores that share a last-level cache see a flag within
/// about 50 to 90 ns, clocks included, others after 190 ns and more (measured on Zen 4), and the
/// host of a virtual machine moves its cores at run time: so the estimate forgets, and it gives way
/// to what the stores themselves show.
class PeerDistance {
 public:
  /// A flag that was sent `latency_ns` ago has just been seen by a rank that was looking for it.
  void add(std::int64_t latency_ns) noexcept {
    age_ = 0;
    current_ = std::min(current_, latency_ns);
    if (++num_samples_ < kBlock) return;
    num_samples_ = 0;
    previous_ = current_;
    current_ = kUnknown;
  }
  /// A round has begun.
  void next_round() noexcept {
    ++age_;
    if (refuted_rounds_ > 0) --refuted_rounds_;
  }
  /// Ordinary stores to the peer have just crawled: it is far, whatever its flags say.
  void refute() noexcept { refuted_rounds_ = kRefutedRounds; }
  /// False while unknown.
  bool is_near() const noexcept {
    return refuted_rounds_ == 0 && age_ < kMaxAge && std::min(previous_, current_) < kNearNs;
  }

 private:
  static constexpr std::int64_t kUnknown = INT64_MAX;
  static constexpr std::int64_t kNearNs = 130;
  static constexpr int kBlock = 16;
  static constexpr int kMaxAge = 256;  // rounds without a sample
  static constexpr int kRefutedRounds = 256;

  std::int64_t previous_ = kUnknown;
  std::int64_t current_ = kUnknown;
  int num_samples_ = 0;
  int age_ = kMaxAge;
  int refuted_rounds_ = 0;
};

}  // namespace fanfold::exec
