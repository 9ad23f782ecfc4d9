// SPDX-License-Identifier: Apache-2.0
#include "fanfold/dtype.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fanfold/error.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

struct Known {
  DType dtype;
  const char* name;
  std::int64_t bytes;
};

constexpr Known kKnown[] = {
    {DType::kBool, "bool", 1},
    {DType::kUInt8, "uint8", 1},
    {DType::kInt8, "int8", 1},
    {DType::kUInt16, "uint16", 2},
    {DType::kInt16, "int16", 2},
    {DType::kUInt32, "uint32", 4},
    {DType::kInt32, "int32", 4},
    {DType::kUInt64, "uint64", 8},
    {DType::kInt64, "int64", 8},
    {DType::kFloat8E4M3, "float8_e4m3fn", 1},
    {DType::kFloat8E5M2, "float8_e5m2", 1},
    {DType::kFloat8E8M0, "float8_e8m0fnu", 1},
    {DType::kFloat4E2M1x2, "float4_e2m1fn_x2", 1},
    {DType::kFloat16, "float16", 2},
    {DType::kBFloat16, "bfloat16", 2},
    {DType::kFloat32, "float32", 4},
    {DType::kFloat64, "float64", 8},
    {DType::kComplex64, "complex64", 8},
    {DType::kComplex128, "complex128", 16},
};

TEST(DTypeTest, EveryTypeHasItsSizeAndName) {
  for (const Known& known : kKnown) {
    EXPECT_STREQ(name_of(known.dtype), known.name);
    EXPECT_EQ(size_of(known.dtype), known.bytes) << known.name;
    EXPECT_EQ(dtype_from_name(known.name), known.dtype) << known.name;
  }
}

TEST(DTypeTest, NoTypeIsLeftOut) {
  // The first value past the last type has no name.
  EXPECT_STREQ(name_of(static_cast<DType>(std::size(kKnown))), "unknown");
  EXPECT_EQ(size_of(static_cast<DType>(std::size(kKnown))), 0);
  std::set<DType> types;
  for (const Known& known : kKnown) types.insert(known.dtype);
  EXPECT_EQ(types.size(), std::size(kKnown));
}

TEST(DTypeTest, OnlyThreeTypesCanBeAdded) {
  const std::set<DType> summable = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  for (const Known& known : kKnown) {
    EXPECT_EQ(is_summable(known.dtype), summable.count(known.dtype) == 1) << known.name;
  }
}

TEST(DTypeTest, UnknownNamesAreRefused) {
  for (const std::string name : {"", "unknown", "BFloat16", "torch.bfloat16", "float8_e4m3"}) {
    EXPECT_EQ(testing::expect_error<InvalidArgument>({}, [&] { dtype_from_name(name); }),
              "dtype: expected a name such as bfloat16, got \"" + name + '"');
  }
}

}  // namespace
}  // namespace fanfold
