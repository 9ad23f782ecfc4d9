// SPDX-License-Identifier: Apache-2.0
#include "capture/row_spans.h"

#include <numeric>
#include <utility>

#include "base/format.h"
#include "capture/check.h"
#include "capture/row_set.h"

namespace fanfold {

CaptureLayout CaptureLayout::local(std::int64_t token_offset) {
  CaptureLayout layout;
  layout.token_offset = token_offset;
  return layout;
}

CaptureLayout CaptureLayout::concatenated(std::vector<std::int64_t> counts, int rank,
                                          std::int64_t token_offset) {
  CaptureLayout layout = local(token_offset);
  layout.kind = Kind::kConcatenated;
  layout.counts = std::move(counts);
  layout.rank = rank;
  return layout;
}

CaptureLayout CaptureLayout::padded(std::vector<std::int64_t> counts, int rank, std::int64_t stride,
                                    std::int64_t token_offset) {
  CaptureLayout layout = concatenated(std::move(counts), rank, token_offset);
  layout.kind = Kind::kPadded;
  layout.stride = stride;
  return layout;
}

CaptureLayout CaptureLayout::sharded(std::vector<std::int64_t> counts, int rank,
                                     std::int64_t num_tokens, std::int64_t token_offset) {
  CaptureLayout layout = concatenated(std::move(counts), rank, token_offset);
  layout.kind = Kind::kSharded;
  layout.num_tokens = num_tokens;
  return layout;
}

CaptureLayout CaptureLayout::row_map(std::vector<std::int64_t> token_of_row,
                                     std::int64_t token_offset) {
  CaptureLayout layout = local(token_offset);
  layout.kind = Kind::kRowMap;
  layout.token_of_row = std::move(token_of_row);
  return layout;
}

namespace capture {

using base::str;

namespace {

/// Runs of consecutive rows that go to consecutive tokens.
std::vector<RowSpan> spans_of_map(const CaptureLayout& layout, std::int64_t num_rows,
                                  std::int64_t max_tokens) {
  if (static_cast<std::int64_t>(layout.token_of_row.size()) != num_rows) {
    refuse("layout.row_map", str(num_rows, " entries (one per row)"),
           str(layout.token_of_row.size()));
  }
  RowSet taken(max_tokens);
  std::vector<RowSpan> spans;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t entry = layout.token_of_row[static_cast<std::size_t>(row)];
    if (entry < 0) continue;
    if (entry >= max_tokens - layout.token_offset) {
      refuse(
          "layout.row_map",
          str("tokens below ", max_tokens - layout.token_offset, " (max_tokens, less the offset)"),
          str(entry, " at row ", row));
    }
    const std::int64_t token = entry + layout.token_offset;
    if (taken.contains(token)) {
      refuse("layout.row_map", "each token once", str(entry, " again at row ", row));
    }
    taken.add(token, 1);
    if (!spans.empty() && spans.back().source + spans.back().num_rows == row &&
        spans.back().token + spans.back().num_rows == token) {
      ++spans.back().num_rows;
    } else {
      spans.push_back({row, token, 1});
    }
  }
  return spans;
}

void check_padded(const CaptureLayout& layout, std::int64_t num_rows) {
  if (layout.stride < 0) refuse("layout.stride", "0 or more rows", str(layout.stride));
  const auto num_ranks = static_cast<std::int64_t>(layout.counts.size());
  if (num_rows % num_ranks != 0 || num_rows / num_ranks != layout.stride) {
    refuse("topk_ids",
           str(num_ranks, " x ", layout.stride, " rows (layout.stride of each of layout.counts)"),
           str(num_rows));
  }
  for (std::size_t rank = 0; rank < layout.counts.size(); ++rank) {
    if (layout.counts[rank] > layout.stride) {
      refuse("layout.counts", str("at most ", layout.stride, " tokens (layout.stride)"),
             str(layout.counts[rank], " of rank ", rank));
    }
  }
}

}  // namespace

std::int64_t check_counts(const CaptureLayout& layout) {
  const auto num_ranks = static_cast<std::int64_t>(layout.counts.size());
  if (layout.rank < 0 || layout.rank >= num_ranks) {
    refuse("layout.rank", str("a rank of the ", num_ranks, " in layout.counts"), str(layout.rank));
  }
  std::int64_t sum = 0;
  for (std::size_t rank = 0; rank < layout.counts.size(); ++rank) {
    const std::int64_t count = layout.counts[rank];
    if (count < 0 || count > INT64_MAX - sum) {
      refuse("layout.counts", "numbers of rows, 0 or more", str(count, " of rank ", rank));
    }
    sum += count;
  }
  return sum;
}

std::vector<RowSpan> row_spans(const CaptureLayout& layout, std::int64_t num_rows,
                               std::int64_t max_tokens) {
  if (layout.token_offset < 0 || layout.token_offset > max_tokens) {
    refuse("layout.token_offset", str("a token in [0, ", max_tokens, "] (max_tokens)"),
           str(layout.token_offset));
  }
  RowSpan span{0, layout.token_offset, num_rows};
  switch (layout.kind) {
    case CaptureLayout::Kind::kRowMap:
      return spans_of_map(layout, num_rows, max_tokens);
    case CaptureLayout::Kind::kConcatenated: {
      const std::int64_t sum = check_counts(layout);
      if (sum != num_rows) {
        refuse("topk_ids", str(sum, " rows (the sum of layout.counts)"), str(num_rows));
      }
      const auto mine = layout.counts.begin() + layout.rank;
      span.source = std::accumulate(layout.counts.begin(), mine, std::int64_t{0});
      span.num_rows = *mine;
      break;
    }
    case CaptureLayout::Kind::kPadded:
      check_counts(layout);
      check_padded(layout, num_rows);
      span.source = layout.stride * layout.rank;
      span.num_rows = layout.counts[static_cast<std::size_t>(layout.rank)];
      break;
    case CaptureLayout::Kind::kLocal:
    case CaptureLayout::Kind::kSharded:
      break;
  }
  if (span.num_rows > max_tokens - span.token) {
    refuse("topk_ids",
           str("at most ", max_tokens - span.token, " tokens from token ", span.token,
               " on (max_tokens)"),
           str(span.num_rows));
  }
  return {span};
}

}  // namespace capture
}  // namespace fanfold
