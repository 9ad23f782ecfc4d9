// SPDX-License-Identifier: Apache-2.0
#include "fanfold/tensor_view.h"

#include <cstdint>
#include <vector>

#include "fanfold/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/expect_error.h"

namespace fanfold {
namespace {

using ::testing::ElementsAre;

std::vector<std::int64_t> strides_of(const TensorView& view) {
  return {view.strides.begin(), view.strides.begin() + view.ndim};
}

TEST(TensorViewTest, AViewOfShapeIsContiguous) {
  float data[24] = {};
  const TensorView view(data, DType::kFloat32, {2, 3, 4});
  EXPECT_EQ(view.data, data);
  EXPECT_EQ(view.ndim, 3);
  EXPECT_THAT(strides_of(view), ElementsAre(12, 4, 1));
  EXPECT_EQ(view.num_elements(), 24);
  EXPECT_EQ(view.row_bytes(), 48);
  EXPECT_EQ(view.row_stride_bytes(), 48);
  EXPECT_TRUE(view.rows_are_contiguous());
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(view.device, DeviceType::kCpu);
}

TEST(TensorViewTest, ConstantDataMayBeViewed) {
  const std::int16_t data[2] = {};
  const TensorView view(data, DType::kInt16, {2});
  EXPECT_EQ(view.data, data);
  EXPECT_EQ(view.row_bytes(), 2);
}

TEST(TensorViewTest, TheDefaultIsNoTensor) {
  const TensorView none;
  EXPECT_FALSE(none.has_value());
  EXPECT_EQ(none.num_elements(), 0);
  EXPECT_EQ(none.row_stride_bytes(), 0);
}

TEST(TensorViewTest, NullDataWithAShapeIsATensor) {
  const TensorView empty(static_cast<void*>(nullptr), DType::kInt32, {0, 8});
  EXPECT_TRUE(empty.has_value());
  EXPECT_EQ(empty.num_elements(), 0);
  EXPECT_EQ(empty.row_bytes(), 32);
  EXPECT_TRUE(empty.is_contiguous());
}

TEST(TensorViewTest, RowsMayLieApartAndStayContiguousInThemselves) {
  TensorView view(static_cast<void*>(nullptr), DType::kBFloat16, {4, 3, 5});
  view.strides[0] = 40;
  EXPECT_EQ(view.row_bytes(), 30);
  EXPECT_EQ(view.row_stride_bytes(), 80);
  EXPECT_TRUE(view.rows_are_contiguous());
  EXPECT_FALSE(view.is_contiguous());
}

TEST(TensorViewTest, SkippingWithinARowIsNotContiguous) {
  TensorView view(static_cast<void*>(nullptr), DType::kUInt8, {4, 3, 5});
  view.strides[2] = 2;
  EXPECT_FALSE(view.rows_are_contiguous());
  view = TensorView(static_cast<void*>(nullptr), DType::kUInt8, {4, 3, 5});
  view.strides[1] = 6;
  EXPECT_FALSE(view.rows_are_contiguous());
  EXPECT_FALSE(view.is_contiguous());
}

TEST(TensorViewTest, StridesOfSingleElementsDoNotMatter) {
  TensorView view(static_cast<void*>(nullptr), DType::kUInt8, {1, 1, 5});
  view.strides[0] = 1000;
  view.strides[1] = 77;
  EXPECT_TRUE(view.rows_are_contiguous());
  EXPECT_TRUE(view.is_contiguous());
}

TEST(TensorViewTest, SizesAreExactBeyondThirtyTwoBits) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 20;
  const TensorView view(static_cast<void*>(nullptr), DType::kFloat32, {kLarge, kLarge, 4});
  EXPECT_EQ(view.num_elements(), std::int64_t{1} << 42);
  EXPECT_EQ(view.row_bytes(), std::int64_t{1} << 24);
  EXPECT_EQ(view.strides[0], std::int64_t{1} << 22);
}

TEST(TensorViewTest, DescribesTypeShapeAndPlace) {
  TensorView view(static_cast<void*>(nullptr), DType::kBFloat16, {128, 2048});
  EXPECT_EQ(view.describe(), "bfloat16 [128, 2048] on cpu");
  view.device = DeviceType::kGpu;
  EXPECT_EQ(view.describe(), "bfloat16 [128, 2048] on cuda:0");
  EXPECT_EQ(TensorView(static_cast<void*>(nullptr), DType::kInt32, {7}).describe(),
            "int32 [7] on cpu");
  EXPECT_EQ(TensorView().describe(), "uint8 [] on cpu");
}

TEST(TensorViewTest, EightDimensionsAreTheMost) {
  EXPECT_EQ(TensorView(static_cast<void*>(nullptr), DType::kInt8, {1, 2, 1, 2, 1, 2, 1, 2}).ndim,
            8);
  EXPECT_EQ(testing::expect_error<InvalidArgument>({},
                                                   [] {
                                                     TensorView(static_cast<void*>(nullptr),
                                                                DType::kInt8,
                                                                {1, 1, 1, 1, 1, 1, 1, 1, 1});
                                                   }),
            "tensor: expected at most 8 dimensions, got 9");
}

}  // namespace
}  // namespace fanfold
