// SPDX-License-Identifier: Apache-2.0

// Base64 after RFC 4648, section 4.

#include <array>
#include <cstdint>

#include "base/format.h"
#include "capture/check.h"
#include "fanfold/routing_format.h"

namespace fanfold {
namespace {

constexpr std::string_view kBase64Digits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr std::uint8_t kNoDigit = 64;

constexpr std::array<std::uint8_t, 256> make_base64_values() {
  std::array<std::uint8_t, 256> values{};
  for (std::uint8_t& value : values) value = kNoDigit;
  for (std::size_t i = 0; i < kBase64Digits.size(); ++i) {
    values[static_cast<unsigned char>(kBase64Digits[i])] = static_cast<std::uint8_t>(i);
  }
  return values;
}
constexpr std::array<std::uint8_t, 256> kBase64Values = make_base64_values();

}  // namespace

std::string encode_base64(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::string text;
  text.reserve((size + 2) / 3 * 4);
  for (std::size_t at = 0; at < size; at += 3) {
    const std::size_t here = size - at < 3 ? size - at : 3;
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < 3; ++i) word = word << 8 | (i < here ? bytes[at + i] : 0U);
    for (std::size_t i = 0; i < 4; ++i) {
      text += i <= here ? kBase64Digits[word >> (18 - 6 * i) & 63U] : '=';
    }
  }
  return text;
}

std::vector<std::byte> decode_base64(std::string_view text) {
  using base::str;
  if (text.size() % 4 != 0) {
    capture::refuse("base64", "a multiple of 4 characters", str(text.size()));
  }
  std::vector<std::byte> bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (std::size_t at = 0; at < text.size(); at += 4) {
    const bool is_last = at + 4 == text.size();
    std::size_t num_digits = 4;
    if (is_last && text[at + 3] == '=') num_digits = text[at + 2] == '=' ? 2 : 3;
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      std::uint32_t value = 0;
      if (i < num_digits) {
        value = kBase64Values[static_cast<unsigned char>(text[at + i])];
        if (value == kNoDigit) {
          capture::refuse("base64", "A-Z, a-z, 0-9, + and /", str("another character at ", at + i));
        }
      }
      word = word << 6 | value;
    }
    for (std::size_t i = 0; i + 1 < num_digits; ++i) {
      bytes.push_back(static_cast<std::byte>(word >> (16 - 8 * i) & 255U));
    }
    const auto left = static_cast<std::uint32_t>(24 - 8 * (num_digits - 1));
    if (num_digits < 4 && (word & ((1U << left) - 1U)) != 0) {
      capture::refuse("base64", "zero bits behind the last byte", "others");
    }
  }
  return bytes;
}

}  // namespace fanfold
