// SPDX-License-Identifier: Apache-2.0
#pragma once

// Blocks of rows that requests and keys share, and the requests' lists of them.

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "fanfold/routing_store.h"

namespace fanfold::capture {

/// Rows of one block; counts itself in `num_blocks`. One that several hold is not changed.
struct RowBlock {
  RowBlock(std::int64_t bytes, std::int64_t& num_blocks_)
      : data(static_cast<std::size_t>(bytes)), num_blocks(num_blocks_) {
    ++num_blocks;
  }
  ~RowBlock() { --num_blocks; }
  RowBlock(const RowBlock&) = delete;
  RowBlock& operator=(const RowBlock&) = delete;

  std::vector<std::byte> data;
  std::int64_t& num_blocks;
  std::int64_t num_keys = 0;  // that it is under
};
using BlockPtr = std::shared_ptr<RowBlock>;

/// Rows [first, last) of a request; blocks[i] has those of block first / block_tokens + i.
struct RequestRows {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::vector<BlockPtr> blocks;
};

/// Blocks under keys, and which was used when. Threads: one at a time.
class KeyedBlocks {
 public:
  /// The block under `key`, now the most recently used; null if there is none.
  BlockPtr use(const std::string& key);
  bool has(const std::string& key) const { return entries_.count(key) > 0; }
  /// A key that has no block.
  void add(const std::string& key, BlockPtr block);
  using Uses = std::list<std::string>;  // keys, the least recently used first
  /// The keys of the `count` least recently used blocks that only keys hold; none if there are
  /// fewer. A block is as recently used as the latest of its keys.
  std::optional<std::vector<Uses::iterator>> choose(std::int64_t count);
  void drop(const std::vector<Uses::iterator>& keys) noexcept;
  void clear();
  std::int64_t size() const { return static_cast<std::int64_t>(entries_.size()); }

 private:
  struct Entry {
    BlockPtr block;
    Uses::iterator use;
  };
  Uses uses_;
  std::unordered_map<std::string, Entry> entries_;
};

}  // namespace fanfold::capture
