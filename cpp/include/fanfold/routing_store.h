// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keeps recorded routing per request until it is asked for, in the host's memory.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fanfold/export.h"
#include "fanfold/routing_rows.h"
#include "fanfold/tensor_view.h"

namespace fanfold {

/// What a RoutingStore is made from.
struct FANFOLD_EXPORT RoutingStoreConfig {
  RoutingSpec spec;                                ///< of every row
  std::int64_t block_tokens = 16;                  ///< tokens of a block that can be published
  std::int64_t max_bytes = std::int64_t{1} << 30;  ///< of all rows; a block counts whole
};

/// What a store holds and did.
struct FANFOLD_EXPORT RoutingStoreStats {
  std::int64_t num_requests = 0;
  std::int64_t num_keys = 0;   ///< that have a block; several may have the same
  std::int64_t num_bytes = 0;  ///< of all rows; a block counts whole
  std::int64_t max_bytes = 0;
  std::int64_t num_hits = 0;       ///< keys that `assemble` found
  std::int64_t num_misses = 0;     ///< keys that it did not
  std::int64_t num_evictions = 0;  ///< blocks that made room for others
  std::uint64_t generation = 0;
};

/// Tokens [first, last) of a request.
struct FANFOLD_EXPORT TokenRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

/// Rows that were put together, and what they lack.
struct FANFOLD_EXPORT AssembledRouting {
  RoutingRows rows;                 ///< missing tokens hold the sentinel
  std::vector<TokenRange> missing;  ///< ascending, not adjacent
  /// Which of the keys given were not found.
  std::vector<std::size_t> missing_keys;
  bool is_complete() const noexcept { return missing.empty(); }
};

/// Rows per request, and blocks of rows under opaque keys, such as hashes of a prefix cache.
///
/// A request's rows follow each other from its first position on; its blocks begin at multiples of
/// block_tokens. Blocks under keys outlive their requests; those that no request uses make room
/// for new rows with all of their keys, the least recently used first. A request's own rows are
/// never dropped. Every error, bad_alloc too, leaves requests, rows and keys as they were.
///
/// Threads: any, at the same time; each call is atomic. Copies nothing but rows.
class FANFOLD_EXPORT RoutingStore {
 public:
  static constexpr std::size_t kMinKeyBytes = 16;
  static constexpr std::size_t kMaxKeyBytes = 32;

  /// @throws InvalidArgument  `config` contradicts itself.
  explicit RoutingStore(const RoutingStoreConfig& config);
  ~RoutingStore();
  RoutingStore(RoutingStore&&) noexcept;
  RoutingStore& operator=(RoutingStore&&) noexcept;

  /// Adds a request whose first row will be at `first_position`: those before are known from
  /// elsewhere.
  /// @throws InvalidState     there is one of that name.
  /// @throws InvalidArgument  a negative position, or no name.
  void begin(const std::string& request, std::int64_t first_position = 0);
  /// Adds rows at `position`, which must be where the request's rows end: after `truncate`, where
  /// that left them. RoutingSnapshot::rows gives rows all of which were recorded; a sentinel then
  /// says "no expert". `rows.first_position` does not matter here.
  /// @throws InvalidArgument   no such request, another position or spec, or an id that is neither
  ///         an expert nor the sentinel: names token, layer and column.
  /// @throws CapacityExceeded  max_bytes are in use by requests.
  void append(const std::string& request, std::int64_t position, const RoutingRows& rows);
  /// The same with an array [tokens, num_layers, top_k] of the spec's dtype, which cannot say
  /// whether its rows were recorded: they count as such.
  /// @param allow_unrouted  tokens without any expert in some layer, such as padding, are meant.
  /// @throws InvalidState   without that, there is one: names position and layer.
  void append(const std::string& request, std::int64_t position, const TensorView& rows,
              bool allow_unrouted = false);
  /// Drops the rows from `position` on, as of rejected draft tokens. Published blocks stay.
  /// @throws InvalidArgument  no such request, or a position that it does not have.
  void truncate(const std::string& request, std::int64_t position);
  /// Adds a request that has the rows of another and goes its own way from here on. Shares them.
  /// @throws InvalidArgument  no such request.
  /// @throws InvalidState     there is one of the new name.
  void fork(const std::string& request, const std::string& new_request);
  /// Forgets a request and its rows. Published blocks stay.
  /// @throws InvalidArgument  no such request.
  void finish(const std::string& request);
  bool contains(const std::string& request) const;
  /// Where the request's rows begin and end.
  /// @throws InvalidArgument  no such request.
  TokenRange range(const std::string& request) const;

  /// Makes the full block of the request at `position` known under `key`. A key that has a block
  /// keeps it. Returns whether the block is new.
  /// @param generation  that the key belongs to; default: the present one.
  /// @throws InvalidArgument  no such request, a key of another length, a position that is no
  ///         multiple of block_tokens, or a block that is not full.
  /// @throws InvalidState     the key belongs to another generation.
  bool publish(const std::string& request, std::int64_t position, const std::string& key,
               std::optional<std::uint64_t> generation = {});
  bool has_key(const std::string& key) const;

  /// The tokens [first, last) of a request.
  /// @throws InvalidArgument  no such request, or a range that begins below 0 or ends before it
  ///         begins.
  AssembledRouting assemble(const std::string& request, std::int64_t first, std::int64_t last);
  /// Block i at position i * block_tokens for each key, then the rows that `tail` (none if empty)
  /// has behind them, to its end. Where a key is missing, rows that `tail` has take its place.
  /// @throws InvalidArgument  no such request, or a key of another length.
  AssembledRouting assemble_keys(const std::vector<std::string>& keys,
                                 const std::string& tail = {});

  /// Forgets all keys: their blocks describe a cache that is gone. Requests keep their rows.
  /// Returns the new generation.
  std::uint64_t reset();
  RoutingStoreStats stats() const;
  const RoutingStoreConfig& config() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fanfold
