// SPDX-License-Identifier: Apache-2.0
#include "capture/row_blocks.h"

#include <iterator>
#include <unordered_set>
#include <utility>

namespace fanfold::capture {

BlockPtr KeyedBlocks::use(const std::string& key) {
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) return nullptr;
  uses_.splice(uses_.end(), uses_, entry->second.use);
  return entry->second.block;
}

void KeyedBlocks::add(const std::string& key, BlockPtr block) {
  uses_.push_back(key);
  try {
    const auto entry = entries_.emplace(key, Entry{std::move(block), std::prev(uses_.end())}).first;
    ++entry->second.block->num_keys;
  } catch (...) {
    uses_.pop_back();
    throw;
  }
}

std::optional<std::vector<KeyedBlocks::Uses::iterator>> KeyedBlocks::choose(std::int64_t count) {
  std::unordered_map<const RowBlock*, std::int64_t> keys_seen;
  std::unordered_set<const RowBlock*> chosen;
  for (auto key = uses_.begin(); count > 0 && key != uses_.end(); ++key) {
    const BlockPtr& block = entries_.find(*key)->second.block;
    if (block.use_count() > block->num_keys) continue;  // a request has it
    if (++keys_seen[block.get()] < block->num_keys) continue;
    chosen.insert(block.get());
    --count;
  }
  if (count > 0) return std::nullopt;
  std::vector<Uses::iterator> keys;
  for (auto key = uses_.begin(); key != uses_.end(); ++key) {
    if (chosen.count(entries_.find(*key)->second.block.get()) > 0) keys.push_back(key);
  }
  return keys;
}

void KeyedBlocks::drop(const std::vector<Uses::iterator>& keys) noexcept {
  for (const auto key : keys) {
    const auto entry = entries_.find(*key);
    --entry->second.block->num_keys;
    entries_.erase(entry);
    uses_.erase(key);
  }
}

void KeyedBlocks::clear() {
  for (const auto& entry : entries_) --entry.second.block->num_keys;
  entries_.clear();
  uses_.clear();
}

}  // namespace fanfold::capture
