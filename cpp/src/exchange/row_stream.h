// SPDX-License-Identifier: Apache-2.0
#pragma once

// Several arrays of rows that travel as one stream of bytes, one array after the other.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fanfold::exchange {

/// Null pointers are legal for no bytes, but not for memcpy.
inline void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

/// Rows of one array, `stride_bytes` apart; in a stream they follow each other without gaps.
struct RowSpan {
  const std::byte* rows = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t row_bytes = 0;
  std::int64_t stride_bytes = 0;

  std::int64_t bytes() const noexcept { return num_rows * row_bytes; }
  bool is_dense() const noexcept { return stride_bytes == row_bytes; }
  /// One row of the bytes of `object`.
  template <class Object>
  static RowSpan of(const Object& object) noexcept {
    return {reinterpret_cast<const std::byte*>(&object), 1, sizeof object, sizeof object};
  }
};

inline std::int64_t stream_bytes(const std::vector<RowSpan>& spans) noexcept {
  std::int64_t bytes = 0;
  for (const RowSpan& span : spans) bytes += span.bytes();
  return bytes;
}

/// Bytes [begin, end) of one array, which lie `offset` bytes into the part of the stream.
struct SpanPart {
  std::size_t span;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t offset;
};

/// Calls visit(SpanPart) for each of the arrays [first, last) of which the bytes [begin, begin +
/// bytes) of their stream hold some; bytes_of(span) is the size of one.
template <class BytesOf, class Visit>
void for_each_span(std::size_t first, std::size_t last, BytesOf&& bytes_of, std::int64_t begin,
                   std::int64_t bytes, Visit&& visit) {
  std::int64_t at = 0;  // of the array, in the stream
  for (std::size_t span = first; span < last && at < begin + bytes; ++span) {
    const std::int64_t end = at + bytes_of(span);
    const std::int64_t from = std::max(at, begin);
    const std::int64_t to = std::min(end, begin + bytes);
    if (from < to) visit(SpanPart{span, from - at, to - at, from - begin});
    at = end;
  }
}

/// Calls visit(row, offset within the row, position in the stream, bytes) for the rows of which the
/// bytes [begin, end) of a stream of rows of `row_bytes` hold some.
template <class Visit>
void for_each_row(std::int64_t row_bytes, std::int64_t begin, std::int64_t end, Visit&& visit) {
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t row = at / row_bytes;
    const std::int64_t within = at - row * row_bytes;
    const std::int64_t bytes = std::min(row_bytes - within, end - at);
    visit(row, within, at, bytes);
    at += bytes;
  }
}

/// Puts the bytes [begin, end) of the rows, as a stream has them, to consecutive bytes at `out`, by
/// copy(to, from, bytes).
template <class Copy>
void put_rows(const RowSpan& span, std::byte* out, std::int64_t begin, std::int64_t end,
              Copy&& copy) {
  if (span.is_dense()) {
    copy(out, span.rows + begin, end - begin);
    return;
  }
  for_each_row(span.row_bytes, begin, end,
               [&](std::int64_t row, std::int64_t within, std::int64_t at, std::int64_t bytes) {
                 copy(out + (at - begin), span.rows + row * span.stride_bytes + within, bytes);
               });
}

/// The same for the bytes [begin, begin + bytes) of the stream of all `spans`.
template <class Copy>
void put_stream(const std::vector<RowSpan>& spans, std::byte* out, std::int64_t begin,
                std::int64_t bytes, Copy&& copy) {
  const auto bytes_of = [&](std::size_t span) { return spans[span].bytes(); };
  for_each_span(0, spans.size(), bytes_of, begin, bytes, [&](const SpanPart& part) {
    put_rows(spans[part.span], out + part.offset, part.begin, part.end, copy);
  });
}

}  // namespace fanfold::exchange
