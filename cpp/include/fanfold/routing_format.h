// SPDX-License-Identifier: Apache-2.0
#pragma once

// Recorded routing as bytes and text: our own format, NumPy's, and what serving engines return.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fanfold/dtype.h"
#include "fanfold/export.h"
#include "fanfold/routing_rows.h"

namespace fanfold {

// Known prefixes are omitted by `slice_tokens` before writing and joined by `concat_tokens` after
// reading. The formats of others carry no position: their readers are told it.
//
// Formats of others may use all values of an unsigned type as ids (uint8 for 256 experts). Their
// readers then give the narrowest signed type, and their writers refuse a sentinel.

/// A header of 64 bytes, then the ids. All numbers little-endian:
///   0  8 bytes  "FANFOLDR"        24  uint32  num_layers     40  int64  sentinel
///   8  uint32   version, 1        28  uint32  top_k          48  int64  number of tokens
///  12  uint32   64                32  uint32  num_experts    56  int64  first position
///  16  uint32   type: 1 int8, 2 int16, 3 int32, 4 uint8, 5 uint16
///  20  uint32   ids: 0 logical, 1 physical                   36  uint32  0
/// @throws InvalidArgument  rows that `check_rows` refuses; so do all writers.
FANFOLD_EXPORT std::vector<std::byte> encode_rows(const RoutingRows& rows);
/// @throws InvalidArgument  not such bytes, of another version, cut off or too long, or ids out of
///         range.
FANFOLD_EXPORT RoutingRows decode_rows(const void* data, std::size_t size);

/// A .npy file (version 1.0) of [tokens, num_layers, top_k], equal to what numpy.save writes.
FANFOLD_EXPORT std::vector<std::byte> encode_npy(const RoutingRows& rows);
/// @throws InvalidArgument  not a .npy file of version 1.0 with a C-ordered array of three
///         dimensions and one of our types, little-endian, of the right length; or ids out of
///         range.
FANFOLD_EXPORT RoutingRows decode_npy(const void* data, std::size_t size, int num_experts,
                                      std::int64_t first_position = 0);

/// RFC 4648, with padding.
FANFOLD_EXPORT std::string encode_base64(const void* data, std::size_t size);
/// @throws InvalidArgument  another character, a wrong length, or bits behind the end.
FANFOLD_EXPORT std::vector<std::byte> decode_base64(std::string_view text);

/// What vLLM's API returns: a .npy file in base64, int16, or uint8 for up to 256 experts, or
/// uint16 for up to 65536.
/// @throws InvalidArgument  `dtype` is another or cannot hold the ids; names the first.
FANFOLD_EXPORT std::string encode_vllm(const RoutingRows& rows, DType dtype = DType::kInt16);
/// @throws InvalidArgument  as decode_base64 and decode_npy.
FANFOLD_EXPORT RoutingRows decode_vllm(std::string_view text, int num_experts,
                                       std::int64_t first_position = 0);

/// What SGLang's API returns: the ids alone in base64, int32, or uint8 or uint16 said beside it.
/// @throws InvalidArgument  `dtype` is another or cannot hold the ids; names the first.
FANFOLD_EXPORT std::string encode_sglang(const RoutingRows& rows, DType dtype = DType::kInt32);
/// @throws InvalidArgument  as decode_base64; a length that is no number of tokens, or ids out of
///         range.
FANFOLD_EXPORT RoutingRows decode_sglang(std::string_view text, DType dtype, int num_layers,
                                         int num_experts, int top_k,
                                         std::int64_t first_position = 0);

}  // namespace fanfold
