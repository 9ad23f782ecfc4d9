// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_format.h"

#include <cstring>
#include <initializer_list>
#include <iterator>

#include "base/format.h"
#include "capture/check.h"
#include "capture/foreign_ids.h"
#include "capture/npy.h"

namespace fanfold {

using base::str;
using capture::refuse;

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "ids are written as they lie in memory");

constexpr char kRowsMagic[8] = {'F', 'A', 'N', 'F', 'O', 'L', 'D', 'R'};
constexpr std::uint32_t kRowsVersion = 1;
constexpr DType kRowsTypes[] = {DType::kInt8, DType::kInt16, DType::kInt32, DType::kUInt8,
                                DType::kUInt16};

struct RowsHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint32_t type;
  std::uint32_t id_space;
  std::uint32_t num_layers;
  std::uint32_t top_k;
  std::uint32_t num_experts;
  std::uint32_t zero;
  std::int64_t sentinel;
  std::int64_t num_tokens;
  std::int64_t first_position;
};
static_assert(sizeof(RowsHeader) == 64);

std::uint32_t number_of_type(DType dtype) {
  std::uint32_t number = 1;
  for (const DType known : kRowsTypes) {
    if (known == dtype) break;
    ++number;
  }
  return number;
}

std::vector<std::byte> joined(const void* header, std::size_t size,
                              const std::vector<std::byte>& ids) {
  std::vector<std::byte> bytes(size + ids.size());
  std::memcpy(bytes.data(), header, size);
  if (!ids.empty()) std::memcpy(bytes.data() + size, ids.data(), ids.size());
  return bytes;
}

/// A count that must be an int.
int count_of(const char* name, std::uint32_t value) {
  if (value < 1 || value > INT32_MAX) refuse(name, "1 or more", str(value));
  return static_cast<int>(value);
}

void check_one_of(DType dtype, std::initializer_list<DType> known, const char* names) {
  for (const DType one : known) {
    if (one == dtype) return;
  }
  refuse("dtype", names, name_of(dtype));
}

RoutingSpec spec_of(const RowsHeader& header) {
  if (std::memcmp(header.magic, kRowsMagic, sizeof(kRowsMagic)) != 0) {
    refuse("data", "routing rows, which begin with FANFOLDR", "another beginning");
  }
  if (header.version != kRowsVersion || header.header_bytes != sizeof(RowsHeader) ||
      header.zero != 0) {
    refuse("data", str("version ", kRowsVersion, " with a header of 64 bytes"),
           str("version ", header.version, " with ", header.header_bytes));
  }
  if (header.type < 1 || header.type > std::size(kRowsTypes)) {
    refuse("type", str("1 to ", std::size(kRowsTypes)), str(header.type));
  }
  if (header.id_space > 1) refuse("ids", "0 (logical) or 1 (physical)", str(header.id_space));
  const RoutingSpec spec = make_routing_spec(
      count_of("num_layers", header.num_layers), count_of("num_experts", header.num_experts),
      count_of("top_k", header.top_k), kRowsTypes[header.type - 1],
      static_cast<IdSpace>(header.id_space));
  if (header.sentinel != spec.sentinel()) {
    refuse("sentinel", str(spec.sentinel(), " for ", name_of(spec.dtype)), str(header.sentinel));
  }
  return spec;
}

}  // namespace

std::vector<std::byte> encode_rows(const RoutingRows& rows) {
  check_rows(rows);
  RowsHeader header{};
  std::memcpy(header.magic, kRowsMagic, sizeof(kRowsMagic));
  header.version = kRowsVersion;
  header.header_bytes = sizeof(RowsHeader);
  header.type = number_of_type(rows.spec.dtype);
  header.id_space = static_cast<std::uint32_t>(rows.spec.id_space);
  header.num_layers = static_cast<std::uint32_t>(rows.spec.num_layers);
  header.top_k = static_cast<std::uint32_t>(rows.spec.top_k);
  header.num_experts = static_cast<std::uint32_t>(rows.spec.num_experts);
  header.sentinel = rows.spec.sentinel();
  header.num_tokens = rows.num_tokens;
  header.first_position = rows.first_position;
  return joined(&header, sizeof(RowsHeader), rows.data);
}

RoutingRows decode_rows(const void* data, std::size_t size) {
  RowsHeader header{};
  if (size < sizeof(RowsHeader)) {
    refuse("data", "64 bytes or more", str(size));
  }
  std::memcpy(&header, data, sizeof(RowsHeader));
  RoutingRows rows;
  rows.spec = spec_of(header);
  rows.num_tokens = header.num_tokens;
  rows.first_position = header.first_position;
  const auto* ids = static_cast<const std::byte*>(data) + sizeof(RowsHeader);
  rows.data.assign(ids, ids + (size - sizeof(RowsHeader)));
  check_rows(rows);
  return rows;
}

std::vector<std::byte> encode_npy(const RoutingRows& rows) {
  check_rows(rows);
  const std::string header = capture::npy_header(
      rows.spec.dtype, {rows.num_tokens, rows.spec.num_layers, rows.spec.top_k});
  return joined(header.data(), header.size(), rows.data);
}

RoutingRows decode_npy(const void* data, std::size_t size, int num_experts,
                       std::int64_t first_position) {
  const capture::NpyHeader header =
      capture::read_npy_header({static_cast<const char*>(data), size});
  for (const std::size_t dim : {1U, 2U}) {
    if (header.shape[dim] < 1 || header.shape[dim] > INT32_MAX) {
      refuse("npy", "one layer and one id or more per token",
             str("shape [", header.shape[0], ", ", header.shape[1], ", ", header.shape[2], "]"));
    }
  }
  return capture::rows_of_foreign_ids(static_cast<const std::byte*>(data) + header.bytes,
                                      size - header.bytes, header.dtype, header.shape[0],
                                      static_cast<int>(header.shape[1]), num_experts,
                                      static_cast<int>(header.shape[2]), first_position);
}

std::string encode_vllm(const RoutingRows& rows, DType dtype) {
  check_one_of(dtype, {DType::kInt16, DType::kUInt16, DType::kUInt8}, "int16, uint16 or uint8");
  const std::vector<std::byte> ids = capture::foreign_ids(rows, dtype);
  std::string file =
      capture::npy_header(dtype, {rows.num_tokens, rows.spec.num_layers, rows.spec.top_k});
  file.append(reinterpret_cast<const char*>(ids.data()), ids.size());
  return encode_base64(file.data(), file.size());
}

RoutingRows decode_vllm(std::string_view text, int num_experts, std::int64_t first_position) {
  const std::vector<std::byte> file = decode_base64(text);
  return decode_npy(file.data(), file.size(), num_experts, first_position);
}

std::string encode_sglang(const RoutingRows& rows, DType dtype) {
  check_one_of(dtype, {DType::kInt32, DType::kUInt16, DType::kUInt8}, "int32, uint16 or uint8");
  const std::vector<std::byte> ids = capture::foreign_ids(rows, dtype);
  return encode_base64(ids.data(), ids.size());
}

RoutingRows decode_sglang(std::string_view text, DType dtype, int num_layers, int num_experts,
                          int top_k, std::int64_t first_position) {
  check_one_of(dtype, {DType::kInt32, DType::kUInt16, DType::kUInt8}, "int32, uint16 or uint8");
  const RoutingSpec spec = make_routing_spec(num_layers, num_experts, top_k);
  const std::vector<std::byte> ids = decode_base64(text);
  const std::int64_t row_bytes = spec.row_bytes() / size_of(spec.dtype) * size_of(dtype);
  return capture::rows_of_foreign_ids(ids.data(), ids.size(), dtype,
                                      static_cast<std::int64_t>(ids.size()) / row_bytes, num_layers,
                                      num_experts, top_k, first_position);
}

}  // namespace fanfold
