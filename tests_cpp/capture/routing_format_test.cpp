// SPDX-License-Identifier: Apache-2.0
#include "fanfold/routing_format.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "capture/capture_case.h"
#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using testing::expect_error;
using testing::Numbers;
using testing::numbers_of;
using testing::rows_of;

using Bytes = std::vector<std::byte>;

constexpr DType kStoredTypes[] = {DType::kInt8, DType::kInt16, DType::kInt32, DType::kUInt8,
                                  DType::kUInt16};

RoutingRows sample(DType dtype, IdSpace id_space = IdSpace::kLogical) {
  const RoutingSpec spec = make_routing_spec(2, 100, 2, dtype, id_space);
  const std::int64_t none = spec.sentinel();
  return rows_of(spec, {0, 99, none, none, 1, 2, 3, none, 98, 97, 96, 95}, 4000);
}

void expect_equal(const RoutingRows& got, const RoutingRows& expected) {
  EXPECT_EQ(got.spec.describe(), expected.spec.describe());
  EXPECT_EQ(got.first_position, expected.first_position);
  EXPECT_EQ(got.num_tokens, expected.num_tokens);
  EXPECT_EQ(got.data, expected.data);
}

Bytes bytes_of(const std::string& text) {
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(RowsFormatTest, EverythingTravelsAndComesBackByteForByte) {
  for (const DType dtype : kStoredTypes) {
    for (const IdSpace id_space : {IdSpace::kLogical, IdSpace::kPhysical}) {
      const RoutingRows rows = sample(dtype, id_space);
      const Bytes bytes = encode_rows(rows);
      EXPECT_EQ(bytes.size(), 64 + rows.data.size());
      const RoutingRows read = decode_rows(bytes.data(), bytes.size());
      expect_equal(read, rows);
      EXPECT_EQ(encode_rows(read), bytes);
    }
  }
  const RoutingRows none = rows_of(make_routing_spec(1, 4, 1), {});
  const Bytes bytes = encode_rows(none);
  expect_equal(decode_rows(bytes.data(), bytes.size()), none);
}

TEST(RowsFormatTest, EveryCutOffFileIsRefused) {
  const Bytes bytes = encode_rows(sample(DType::kInt16));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const Bytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_THROW(decode_rows(cut.data(), cut.size()), InvalidArgument) << size;
  }
  Bytes longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_THROW(decode_rows(longer.data(), longer.size()), InvalidArgument);
}

TEST(RowsFormatTest, EveryFieldIsChecked) {
  const Bytes good = encode_rows(sample(DType::kInt16));
  const auto refused = [&](std::size_t at, std::uint8_t value, const std::string& words) {
    Bytes bytes = good;
    bytes[at] = static_cast<std::byte>(value);
    expect_error<InvalidArgument>({words}, [&] { decode_rows(bytes.data(), bytes.size()); });
  };
  refused(0, 'X', "another beginning");
  refused(8, 2, "version 2");
  refused(12, 65, "65");
  refused(16, 0, "type");
  refused(16, 6, "type");
  refused(20, 2, "ids");
  refused(24, 0, "num_layers");
  refused(27, 0x80, "num_layers");
  refused(28, 3, "data");
  refused(32, 50, "data: expected ids below 50");
  refused(35, 0xff, "num_experts");
  refused(36, 1, "version 1");
  refused(40, 0, "sentinel");
  refused(48, 2, "data: expected 2 tokens");
  refused(55, 0x7f, "data");
  refused(63, 0x80, "first_position");
  Bytes huge = good;
  for (const std::size_t at : {24U, 28U}) {
    for (std::size_t i = 0; i < 4; ++i) huge[at + i] = static_cast<std::byte>(i < 3 ? 0xff : 0x7f);
  }
  expect_error<InvalidArgument>({"ids per token"}, [&] { decode_rows(huge.data(), huge.size()); });
  refused(63, 0x7f, "first_position");
  refused(64, 100, "100 at token 0, layer 0, column 0");
}

TEST(NpyFormatTest, TheHeaderIsThatOfNumpy) {
  const Bytes bytes = encode_npy(sample(DType::kInt16));
  const std::string file = text_of(bytes);
  EXPECT_EQ(file.size(), 128 + 24U);
  EXPECT_EQ(file.substr(0, 10), std::string("\x93NUMPY\x01\x00\x76\x00", 10));
  EXPECT_EQ(file.substr(10, 61), "{'descr': '<i2', 'fortran_order': False, 'shape': (3, 2, 2), ");
  EXPECT_EQ(file[127], '\n');
}

TEST(NpyFormatTest, EveryTypeComesBackByteForByte) {
  for (const DType dtype : kStoredTypes) {
    const RoutingRows rows = sample(dtype);
    const Bytes bytes = encode_npy(rows);
    const RoutingRows read = decode_npy(bytes.data(), bytes.size(), 100, 4000);
    expect_equal(read, rows);
    EXPECT_EQ(encode_npy(read), bytes);
  }
}

Bytes npy_file(const std::string& header, const std::string& ids) {
  std::string file("\x93NUMPY\x01\x00", 8);
  file += static_cast<char>(header.size());
  file += '\0';
  return bytes_of(file + header + ids);
}

TEST(NpyFormatTest, HeadersMayBeWrittenInAnyWay) {
  const Bytes file = npy_file("{\"shape\":(1,1,2),'fortran_order':False,'descr':\"|i1\"}\n",
                              std::string("\x05\xff", 2));
  const RoutingRows rows = decode_npy(file.data(), file.size(), 8);
  EXPECT_EQ(numbers_of(rows.array()), (Numbers{5, -1}));
}

TEST(NpyFormatTest, WhatIsNoRoutingIsRefused) {
  const auto refused = [](const std::string& words, const Bytes& file) {
    expect_error<InvalidArgument>({words}, [&] { decode_npy(file.data(), file.size(), 8); });
  };
  const auto header = [](const std::string& descr, const std::string& order,
                         const std::string& shape) {
    return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + "}";
  };
  refused("another beginning", bytes_of("PK"));
  refused("cut off", bytes_of(std::string("\x93NUMPY\x01\x00\x10", 9)));
  refused("cut off", bytes_of(std::string("\x93NUMPY\x01\x00\x10\x00{", 11)));
  refused("type \"<f4\"", npy_file(header("<f4", "False", "(1, 1, 1)"), "abcd"));
  refused("type \">i2\"", npy_file(header(">i2", "False", "(1, 1, 1)"), "ab"));
  refused("Fortran order", npy_file(header("|i1", "True", "(1, 1, 1)"), "\x01"));
  refused("2 dimensions", npy_file(header("|i1", "False", "(1, 1)"), "\x01"));
  refused("more than three", npy_file(header("|i1", "False", "(1, 1, 1, 1)"), "\x01"));
  refused("too many digits",
          npy_file(header("|i1", "False", "(9999999999999999999, 1, 1)"), "\x01"));
  refused("a truth value", npy_file(header("|i1", "Maybe", "(1, 1, 1)"), "\x01"));
  refused("a number", npy_file(header("|i1", "False", "(-1, 1, 1)"), "\x01"));
  refused("key \"other\"", npy_file("{'other': 1}", ""));
  refused("without descr", npy_file("{'descr': '|i1'}", ""));
  refused("a string", npy_file("{'descr", ""));
  refused("one layer and one id", npy_file(header("|i1", "False", "(1, 0, 1)"), ""));
  refused("2 tokens of 1 bytes", npy_file(header("|i1", "False", "(2, 1, 1)"), "\x01"));
  refused("2 bytes", npy_file(header("|i1", "False", "(1, 1, 1)"), "\x01\x01"));
  refused("key \"\\xff\\x00\"", npy_file(std::string("{'\xff\x00'", 5) + ": 1}", ""));
  refused("key \"" + std::string(40, 'k') + "\"...",
          npy_file("{'" + std::string(41, 'k') + "': 1}", ""));
  refused("8 at token 0", npy_file(header("|i1", "False", "(1, 1, 1)"), "\x08"));
}

TEST(Base64Test, TheVectorsOfTheRfcHold) {
  const std::string plain = "foobar";
  const char* const encoded[] = {"", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"};
  for (std::size_t length = 0; length <= plain.size(); ++length) {
    EXPECT_EQ(encode_base64(plain.data(), length), encoded[length]);
    EXPECT_EQ(text_of(decode_base64(encoded[length])), plain.substr(0, length));
  }
}

TEST(Base64Test, AllBytesComeBackAndOtherTextIsRefused) {
  Bytes all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<std::byte>(i));
  EXPECT_EQ(decode_base64(encode_base64(all.data(), all.size())), all);
  for (const char* wrong : {"Z", "Zg", "Zg=", "Z===", "====", "Zg==Zg==", "Zm9*",
                            "Zh==", "Zm9=", "Zm 9", "Z=g=", "Zm-_"}) {
    EXPECT_THROW(decode_base64(wrong), InvalidArgument) << wrong;
  }
}

TEST(VllmFormatTest, RoutingComesBackByteForByte) {
  for (const DType dtype : {DType::kInt16, DType::kUInt16, DType::kUInt8}) {
    const RoutingRows rows = sample(dtype);
    const std::string text = encode_vllm(rows, dtype);
    expect_equal(decode_vllm(text, 100, 4000), rows);
    EXPECT_EQ(encode_vllm(decode_vllm(text, 100), dtype), text);
    EXPECT_EQ(encode_vllm(sample(DType::kInt32), dtype), text) << "whatever the rows' own type";
  }
}

// C8
TEST(VllmFormatTest, Uint8Of256ExpertsHasNoRoomForNoExpert) {
  const RoutingSpec spec = make_routing_spec(1, 256, 2);
  const RoutingRows rows = rows_of(spec, {255, 0, 127, 128});
  const std::string text = encode_vllm(rows, DType::kUInt8);
  expect_equal(decode_vllm(text, 256), rows);
  EXPECT_EQ(encode_vllm(decode_vllm(text, 256), DType::kUInt8), text);
  expect_error<InvalidArgument>(
      {"room for \"no expert\"", "uint8 for token 1, layer 0, column 0"},
      [&] { encode_vllm(rows_of(spec, {255, 0, -1, 1}), DType::kUInt8); });
  expect_error<InvalidArgument>({"uint8, which holds"}, [] {
    encode_vllm(rows_of(make_routing_spec(1, 257, 1), {1}), DType::kUInt8);
  });
  expect_error<InvalidArgument>({"int16, uint16 or uint8", "got int32"},
                                [&] { encode_vllm(rows, DType::kInt32); });
}

// C15
TEST(VllmFormatTest, AnOmittedPrefixIsJoinedAgain) {
  const RoutingRows rows = rows_of(make_routing_spec(1, 300, 1), {10, 11, 12, 13, 14});
  const RoutingRows known = slice_tokens(rows, 0, 3);
  const std::string rest = encode_vllm(slice_tokens(rows, 3, 5));
  expect_equal(concat_tokens({known, decode_vllm(rest, 300, 3)}), rows);
}

TEST(SglangFormatTest, RoutingComesBackByteForByte) {
  for (const DType dtype : {DType::kInt32, DType::kUInt16, DType::kUInt8}) {
    const RoutingRows rows = sample(dtype);
    const std::string text = encode_sglang(rows, dtype);
    expect_equal(decode_sglang(text, dtype, 2, 100, 2, 4000), rows);
    EXPECT_EQ(encode_sglang(decode_sglang(text, dtype, 2, 100, 2), dtype), text);
    EXPECT_EQ(decode_base64(text), rows.data);
  }
  const RoutingRows all = rows_of(make_routing_spec(1, 65536, 1), {65535, 0});
  expect_equal(
      astype(decode_sglang(encode_sglang(all, DType::kUInt16), DType::kUInt16, 1, 65536, 1),
             DType::kInt32),
      all);
}

TEST(SglangFormatTest, WhatDoesNotFitIsRefused) {
  const std::string text = encode_sglang(sample(DType::kInt32));
  expect_error<InvalidArgument>({"data: expected 2 tokens of 20 bytes", "48 bytes"},
                                [&] { decode_sglang(text, DType::kInt32, 1, 100, 5); });
  expect_error<InvalidArgument>({"ids below 99"},
                                [&] { decode_sglang(text, DType::kInt32, 2, 99, 2); });
  expect_error<InvalidArgument>({"int32, uint16 or uint8", "got int16"},
                                [&] { decode_sglang(text, DType::kInt16, 2, 100, 2); });
  expect_error<InvalidArgument>({"got int8"},
                                [] { encode_sglang(sample(DType::kInt8), DType::kInt8); });
}

}  // namespace
}  // namespace fanfold
