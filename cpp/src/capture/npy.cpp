// SPDX-License-Identifier: Apache-2.0
#include "capture/npy.h"

#include <utility>

#include "base/format.h"
#include "capture/check.h"

namespace fanfold::capture {
namespace {

using base::str;

constexpr std::string_view kMagic("\x93NUMPY\x01\x00", 8);
constexpr std::size_t kPrefixBytes = 10;    // the magic and a 16-bit length
constexpr std::size_t kDataAlignment = 64;  // of the array in the file
constexpr std::size_t kMaxDigits = 18;      // of an extent: always fits 64 bits

constexpr std::pair<std::string_view, DType> kDescriptions[] = {{"|i1", DType::kInt8},
                                                                {"|u1", DType::kUInt8},
                                                                {"<i2", DType::kInt16},
                                                                {"<u2", DType::kUInt16},
                                                                {"<i4", DType::kInt32}};

[[noreturn]] void refuse_npy(const std::string& got) {
  refuse("npy",
         "version 1.0, a C-ordered array [tokens, layers, top_k] of |i1, |u1, <i2, <u2 or <i4",
         got);
}

/// Reads the Python literal of a header, piece by piece.
class Literal {
 public:
  explicit Literal(std::string_view text) : rest_(text) {}

  bool skip(char wanted) {
    skip_spaces();
    if (rest_.empty() || rest_.front() != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }
  void expect(char wanted) {
    if (!skip(wanted)) refuse_npy(str("a header without '", wanted, "' before ", quote(rest_)));
  }
  std::string_view quoted() {
    skip_spaces();
    const char mark = rest_.empty() ? '\0' : rest_.front();
    const std::size_t end =
        mark == '\'' || mark == '"' ? rest_.find(mark, 1) : std::string_view::npos;
    if (end == std::string_view::npos)
      refuse_npy(str("a header without a string at ", quote(rest_)));
    const std::string_view inner = rest_.substr(1, end - 1);
    rest_.remove_prefix(end + 1);
    return inner;
  }
  bool boolean() {
    skip_spaces();
    for (const std::string_view word : {"True", "False"}) {
      if (rest_.substr(0, word.size()) != word) continue;
      rest_.remove_prefix(word.size());
      return word == "True";
    }
    refuse_npy(str("a header without a truth value at ", quote(rest_)));
  }
  std::int64_t number() {
    skip_spaces();
    std::int64_t value = 0;
    std::size_t digits = 0;
    while (digits < rest_.size() && rest_[digits] >= '0' && rest_[digits] <= '9') {
      if (digits == kMaxDigits) refuse_npy("an extent of too many digits");
      value = value * 10 + (rest_[digits++] - '0');
    }
    if (digits == 0) refuse_npy(str("a header without a number at ", quote(rest_)));
    rest_.remove_prefix(digits);
    return value;
  }
  bool is_at_end() {
    skip_spaces();
    return rest_.empty();
  }

 private:
  void skip_spaces() {
    const std::size_t first = rest_.find_first_not_of(" \n");
    rest_.remove_prefix(first == std::string_view::npos ? rest_.size() : first);
  }

  std::string_view rest_;
};

DType dtype_of_description(std::string_view text) {
  for (const auto& [description, dtype] : kDescriptions) {
    if (text == description) return dtype;
  }
  refuse_npy(str("type ", quote(text)));
}

void read_shape(Literal& literal, NpyHeader& header) {
  literal.expect('(');
  std::size_t dims = 0;
  while (!literal.skip(')')) {
    if (dims == header.shape.size()) refuse_npy("more than three dimensions");
    header.shape[dims++] = literal.number();
    if (!literal.skip(',')) {
      literal.expect(')');
      break;
    }
  }
  if (dims < header.shape.size()) refuse_npy(str(dims, " dimensions"));
}

}  // namespace

std::string npy_header(DType dtype, const std::array<std::int64_t, 3>& shape) {
  std::string_view description;
  for (const auto& [text, of_dtype] : kDescriptions) {
    if (of_dtype == dtype) description = text;
  }
  std::string text = str("{'descr': '", description, "', 'fortran_order': False, 'shape': (",
                         shape[0], ", ", shape[1], ", ", shape[2], "), }");
  // numpy also leaves room for the first extent to grow; for three extents that changes nothing.
  text.append(kDataAlignment - (kPrefixBytes + text.size() + 1) % kDataAlignment, ' ');
  text += '\n';
  std::string header(kMagic);
  header += static_cast<char>(text.size() % 256);
  header += static_cast<char>(text.size() / 256);
  return header + text;
}

NpyHeader read_npy_header(std::string_view file) {
  if (file.substr(0, kMagic.size()) != kMagic) refuse_npy("another beginning");
  if (file.size() < kPrefixBytes) refuse_npy(str("a file cut off after ", file.size(), " bytes"));
  const std::size_t length =
      static_cast<unsigned char>(file[8]) + std::size_t{256} * static_cast<unsigned char>(file[9]);
  NpyHeader header;
  header.bytes = kPrefixBytes + length;
  if (file.size() < header.bytes) refuse_npy(str("a file cut off after ", file.size(), " bytes"));
  Literal literal(file.substr(kPrefixBytes, length));
  bool has_type = false;
  bool has_order = false;
  bool has_shape = false;
  literal.expect('{');
  while (!literal.skip('}')) {
    const std::string_view key = literal.quoted();
    literal.expect(':');
    if (key == "descr" && !has_type) {
      header.dtype = dtype_of_description(literal.quoted());
      has_type = true;
    } else if (key == "fortran_order" && !has_order) {
      if (literal.boolean()) refuse_npy("Fortran order");
      has_order = true;
    } else if (key == "shape" && !has_shape) {
      read_shape(literal, header);
      has_shape = true;
    } else {
      refuse_npy(str("key ", quote(key)));
    }
    if (!literal.skip(',')) {
      literal.expect('}');
      break;
    }
  }
  if (!has_type || !has_order || !has_shape || !literal.is_at_end()) {
    refuse_npy("a header without descr, fortran_order and shape, or with more");
  }
  return header;
}

}  // namespace fanfold::capture
