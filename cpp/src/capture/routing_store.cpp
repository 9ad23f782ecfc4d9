// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_store.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/format.h"
#include "capture/check.h"
#include "capture/row_blocks.h"
#include "fanfold/error.h"

namespace fanfold {

using base::str;
using capture::BlockPtr;
using capture::refuse;
using capture::RequestRows;
using Uses = capture::KeyedBlocks::Uses;

namespace {

void check_key(const std::string& key) {
  if (key.size() >= RoutingStore::kMinKeyBytes && key.size() <= RoutingStore::kMaxKeyBytes) return;
  refuse("key", str(RoutingStore::kMinKeyBytes, " to ", RoutingStore::kMaxKeyBytes, " bytes"),
         str(key.size()));
}

void check_store_config(const RoutingStoreConfig& config) {
  const RoutingSpec& spec = config.spec;
  make_routing_spec(spec.num_layers, spec.num_experts, spec.top_k, spec.dtype, spec.id_space);
  if (config.block_tokens < 1 || config.block_tokens > INT64_MAX / 4 / spec.row_bytes()) {
    refuse("block_tokens", "1 or more, of rows that memory can hold", str(config.block_tokens));
  }
  const std::int64_t block_bytes = config.block_tokens * spec.row_bytes();
  if (config.max_bytes < block_bytes) {
    refuse("max_bytes", str(block_bytes, " or more (one block)"), str(config.max_bytes));
  }
}

/// Some expert in every layer of every token.
void check_routed(const RoutingRows& rows, std::int64_t position) {
  const RoutingSpec& spec = rows.spec;
  const auto size = static_cast<std::size_t>(spec.top_k * size_of(spec.dtype));
  // The sentinel of every type has all bits set.
  const std::string unrouted(size, '\xff');
  for (std::int64_t cell = 0; cell < rows.num_tokens * spec.num_layers; ++cell) {
    const std::byte* ids = rows.data.data() + cell * static_cast<std::int64_t>(size);
    if (std::memcmp(ids, unrouted.data(), size) != 0) continue;
    throw InvalidState(
        str("rows: expected an expert in every layer (or allow_unrouted, or "
            "RoutingRows), got none for position ",
            position + cell / spec.num_layers, ", layer ", cell % spec.num_layers));
  }
}

void add_missing(std::vector<TokenRange>& missing, std::int64_t first, std::int64_t last) {
  if (first >= last) return;
  if (!missing.empty() && missing.back().last == first) {
    missing.back().last = last;
  } else {
    missing.push_back({first, last});
  }
}

}  // namespace

class RoutingStore::Impl {
 public:
  explicit Impl(const RoutingStoreConfig& config)
      : config_(config),
        row_bytes_(config.spec.row_bytes()),
        block_bytes_(config.block_tokens * row_bytes_) {}

  RequestRows& at(const std::string& request) {
    const auto found = requests_.find(request);
    if (found == requests_.end()) refuse("request", "one that has begun", str('"', request, '"'));
    return found->second;
  }
  void check_new(const std::string& request) const {
    if (request.empty()) refuse("request", "a name", "none");
    if (requests_.count(request) == 0) return;
    throw InvalidState(str("request: expected a new name, got \"", request, "\" again"));
  }

  std::int64_t block_of(std::int64_t position) const { return position / config_.block_tokens; }
  /// Which of a request's blocks has `position`.
  std::size_t index_in(const RequestRows& rows, std::int64_t position) const {
    return static_cast<std::size_t>(block_of(position) - block_of(rows.first));
  }

  /// What must go so that `num_blocks` more fit.
  std::vector<Uses::iterator> choose_for(std::int64_t num_blocks) {
    const std::int64_t fits = config_.max_bytes / block_bytes_;
    const std::int64_t excess = num_blocks_ + num_blocks - fits;
    if (excess <= 0) return {};
    if (auto chosen = keyed_.choose(excess)) return *std::move(chosen);
    throw CapacityExceeded(str("store: expected room for ", num_blocks, " blocks of ", block_bytes_,
                               " bytes within ", config_.max_bytes, " (max_bytes), got ",
                               num_blocks_ * block_bytes_, " in use, too much of it by requests"));
  }

  BlockPtr new_block() { return std::make_shared<capture::RowBlock>(block_bytes_, num_blocks_); }

  void append(RequestRows& rows, const TensorView& array) {
    const std::int64_t count = array.shape[0];
    if (count == 0) return;
    const std::int64_t last = rows.last + count;
    // The block that the rows end in is copied if others hold it: its end may be theirs too.
    const bool is_open = rows.last > rows.first && rows.last % config_.block_tokens != 0;
    const bool is_shared = is_open && rows.blocks.back().use_count() > 1;
    const std::int64_t num_held = static_cast<std::int64_t>(rows.blocks.size());
    const std::int64_t num_wanted = block_of(last - 1) - block_of(rows.first) + 1;
    // Chosen, allocated, and only then dropped: nothing throws behind the drop.
    const std::vector<Uses::iterator> leaving =
        choose_for(num_wanted - num_held + (is_shared ? 1 : 0));
    std::vector<BlockPtr> blocks = rows.blocks;
    if (is_shared) {
      const BlockPtr copy = new_block();
      copy->data = blocks.back()->data;
      blocks.back() = copy;
    }
    while (static_cast<std::int64_t>(blocks.size()) < num_wanted) blocks.push_back(new_block());
    const std::int64_t num_most = num_blocks_;
    keyed_.drop(leaving);
    num_evictions_ += num_most - num_blocks_;
    rows.blocks = std::move(blocks);
    TensorView part = array;
    for (std::int64_t position = rows.last; position < last;) {
      const std::int64_t in_block = position % config_.block_tokens;
      const std::int64_t here = std::min(config_.block_tokens - in_block, last - position);
      part.shape[0] = here;
      capture::copy_dense(
          rows.blocks[index_in(rows, position)]->data.data() + in_block * row_bytes_, part, here);
      part.data = static_cast<std::byte*>(part.data) + here * part.row_stride_bytes();
      position += here;
    }
    rows.last = last;
  }

  /// Copies [first, last), all of which `rows` has, to their place in `out`.
  void copy_out(const RequestRows& rows, std::int64_t first, std::int64_t last,
                RoutingRows& out) const {
    for (std::int64_t position = first; position < last;) {
      const std::int64_t in_block = position % config_.block_tokens;
      const std::int64_t here = std::min(config_.block_tokens - in_block, last - position);
      std::memcpy(out.data.data() + (position - out.first_position) * row_bytes_,
                  rows.blocks[index_in(rows, position)]->data.data() + in_block * row_bytes_,
                  static_cast<std::size_t>(here * row_bytes_));
      position += here;
    }
  }

  /// Adds what `rows` has of [first, last) to `out`, and what it lacks to `missing`.
  void collect(const RequestRows& rows, std::int64_t first, std::int64_t last,
               AssembledRouting& out) const {
    const std::int64_t from = std::clamp(rows.first, first, last);
    const std::int64_t to = std::clamp(rows.last, from, last);
    copy_out(rows, from, to, out.rows);
    if (from == to) {
      add_missing(out.missing, first, last);
      return;
    }
    add_missing(out.missing, first, from);
    add_missing(out.missing, to, last);
  }

  AssembledRouting empty(std::int64_t first, std::int64_t last) const {
    if (first < 0 || last < first || last - first > INT64_MAX / 4 / row_bytes_) {
      refuse("assemble", "positions [first, last), 0 or more", str("[", first, ", ", last, ")"));
    }
    AssembledRouting out;
    out.rows = {config_.spec, first, last - first, {}};
    // The sentinel of every type has all bits set.
    out.rows.data.assign(static_cast<std::size_t>((last - first) * row_bytes_), std::byte{0xff});
    return out;
  }

  mutable std::mutex mutex;  // guards all below
  RoutingStoreConfig config_;
  std::int64_t row_bytes_;
  std::int64_t block_bytes_;
  std::int64_t num_blocks_ = 0;  // that exist; outlives them
  std::unordered_map<std::string, RequestRows> requests_;
  capture::KeyedBlocks keyed_;
  std::int64_t num_hits_ = 0;
  std::int64_t num_misses_ = 0;
  std::int64_t num_evictions_ = 0;
  std::uint64_t generation_ = 0;
};

using Lock = std::lock_guard<std::mutex>;

RoutingStore::RoutingStore(const RoutingStoreConfig& config) {
  check_store_config(config);
  impl_ = std::make_unique<Impl>(config);
}
RoutingStore::~RoutingStore() = default;
RoutingStore::RoutingStore(RoutingStore&&) noexcept = default;
RoutingStore& RoutingStore::operator=(RoutingStore&&) noexcept = default;

void RoutingStore::begin(const std::string& request, std::int64_t first_position) {
  const Lock lock(impl_->mutex);
  impl_->check_new(request);
  if (first_position < 0 || first_position > capture::kMaxPosition) {
    refuse("first_position", str("0 to ", capture::kMaxPosition), str(first_position));
  }
  impl_->requests_.emplace(request, RequestRows{first_position, first_position, {}});
}

void RoutingStore::append(const std::string& request, std::int64_t position,
                          const RoutingRows& rows) {
  if (rows.spec != impl_->config_.spec) {
    refuse("rows", impl_->config_.spec.describe(), rows.spec.describe());
  }
  capture::check_sizes("rows", rows);
  capture::check_ids("rows", rows);
  const Lock lock(impl_->mutex);
  RequestRows& held = impl_->at(request);
  if (position != held.last) {
    refuse("position", str(held.last, " (where the rows of \"", request, "\" end)"), str(position));
  }
  impl_->append(held, rows.array());
}

void RoutingStore::append(const std::string& request, std::int64_t position, const TensorView& rows,
                          bool allow_unrouted) {
  capture::check_routing_array("rows", impl_->config_.spec, rows);
  if (position < 0 || position > capture::kMaxPosition) {
    refuse("position", str("0 to ", capture::kMaxPosition), str(position));
  }
  const RoutingRows copied = copy_rows(impl_->config_.spec, rows);
  if (!allow_unrouted) check_routed(copied, position);
  append(request, position, copied);
}

void RoutingStore::truncate(const std::string& request, std::int64_t position) {
  const Lock lock(impl_->mutex);
  RequestRows& held = impl_->at(request);
  if (position < held.first || position > held.last) {
    refuse("position",
           str("one in [", held.first, ", ", held.last, "] (the rows of \"", request, "\")"),
           str(position));
  }
  const std::int64_t keep =
      position == held.first ? 0 : impl_->block_of(position - 1) - impl_->block_of(held.first) + 1;
  held.blocks.resize(static_cast<std::size_t>(keep));
  held.last = position;
}

void RoutingStore::fork(const std::string& request, const std::string& new_request) {
  const Lock lock(impl_->mutex);
  RequestRows held = impl_->at(request);
  impl_->check_new(new_request);
  impl_->requests_.emplace(new_request, std::move(held));
}

void RoutingStore::finish(const std::string& request) {
  const Lock lock(impl_->mutex);
  impl_->at(request);
  impl_->requests_.erase(request);
}

bool RoutingStore::contains(const std::string& request) const {
  const Lock lock(impl_->mutex);
  return impl_->requests_.count(request) > 0;
}

TokenRange RoutingStore::range(const std::string& request) const {
  const Lock lock(impl_->mutex);
  const RequestRows& held = impl_->at(request);
  return {held.first, held.last};
}

bool RoutingStore::publish(const std::string& request, std::int64_t position,
                           const std::string& key, std::optional<std::uint64_t> generation) {
  check_key(key);
  const Lock lock(impl_->mutex);
  RequestRows& held = impl_->at(request);
  const std::int64_t size = impl_->config_.block_tokens;
  if (generation && *generation != impl_->generation_) {
    throw InvalidState(str("publish: expected a key of generation ", impl_->generation_,
                           ", got one of ", *generation));
  }
  if (position < 0 || position % size != 0) {
    refuse("position", str("a multiple of ", size, " (block_tokens)"), str(position));
  }
  if (position < held.first || position > held.last - size) {
    refuse("position",
           str("a full block within [", held.first, ", ", held.last, ") of \"", request, "\""),
           str(position));
  }
  if (impl_->keyed_.use(key) != nullptr) return false;
  impl_->keyed_.add(key, held.blocks[impl_->index_in(held, position)]);
  return true;
}

bool RoutingStore::has_key(const std::string& key) const {
  const Lock lock(impl_->mutex);
  return impl_->keyed_.has(key);
}

AssembledRouting RoutingStore::assemble(const std::string& request, std::int64_t first,
                                        std::int64_t last) {
  const Lock lock(impl_->mutex);
  const RequestRows& held = impl_->at(request);
  AssembledRouting out = impl_->empty(first, last);
  impl_->collect(held, first, last, out);
  return out;
}

AssembledRouting RoutingStore::assemble_keys(const std::vector<std::string>& keys,
                                             const std::string& tail) {
  for (const std::string& key : keys) check_key(key);
  const Lock lock(impl_->mutex);
  const RequestRows none;
  const RequestRows& held = tail.empty() ? none : impl_->at(tail);
  const std::int64_t size = impl_->config_.block_tokens;
  const std::int64_t end_of_keys = static_cast<std::int64_t>(keys.size()) * size;
  const std::int64_t last = std::max(end_of_keys, held.last);
  AssembledRouting out = impl_->empty(0, last);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto first = static_cast<std::int64_t>(i) * size;
    if (const BlockPtr block = impl_->keyed_.use(keys[i])) {
      ++impl_->num_hits_;
      std::memcpy(out.rows.data.data() + first * impl_->row_bytes_, block->data.data(),
                  block->data.size());
      continue;
    }
    ++impl_->num_misses_;
    out.missing_keys.push_back(i);
    impl_->collect(held, first, first + size, out);
  }
  if (last > end_of_keys) impl_->collect(held, end_of_keys, last, out);
  return out;
}

std::uint64_t RoutingStore::reset() {
  const Lock lock(impl_->mutex);
  impl_->keyed_.clear();
  return ++impl_->generation_;
}

RoutingStoreStats RoutingStore::stats() const {
  const Lock lock(impl_->mutex);
  RoutingStoreStats stats;
  stats.num_requests = static_cast<std::int64_t>(impl_->requests_.size());
  stats.num_keys = impl_->keyed_.size();
  stats.num_bytes = impl_->num_blocks_ * impl_->block_bytes_;
  stats.max_bytes = impl_->config_.max_bytes;
  stats.num_hits = impl_->num_hits_;
  stats.num_misses = impl_->num_misses_;
  stats.num_evictions = impl_->num_evictions_;
  stats.generation = impl_->generation_;
  return stats;
}

const RoutingStoreConfig& RoutingStore::config() const noexcept { return impl_->config_; }

}  // namespace fanfold
