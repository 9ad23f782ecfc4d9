// SPDX-License-Identifier: Apache-2.0

// Our declarations of NCCL's interface against its own header.

// NCCL's header includes these for nothing that it declares, and not every installation has them.
// NOLINTBEGIN(bugprone-reserved-identifier)
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
// NOLINTEND(bugprone-reserved-identifier)
#include <nccl.h>
#include <nccl_device/host.h>

#include <cstddef>
#include <type_traits>

#include "gpu/nccl_api.h"
#include "gtest/gtest.h"

namespace fanfold::gpu::nccl {
namespace {

/// Passed alike: pointers as pointers, else numbers or structs of the same size.
template <class A, class B>
constexpr bool kPassedAlike = std::is_pointer_v<A> == std::is_pointer_v<B> &&
                              std::is_class_v<A> == std::is_class_v<B> && sizeof(A) == sizeof(B);

template <class A, class B>
struct CalledAlike : std::false_type {};
template <class ResultA, class... A, class ResultB, class... B>
struct CalledAlike<ResultA (*)(A...), ResultB (*)(B...)>
    : std::bool_constant<sizeof...(A) == sizeof...(B)> {
  static constexpr bool check() {
    if constexpr (sizeof...(A) == sizeof...(B)) {
      return kPassedAlike<ResultA, ResultB> && (kPassedAlike<A, B> && ...);
    }
    return false;
  }
};

#define FANFOLD_NCCL_COMPARE(name, since, ...)                                              \
  static_assert(CalledAlike<decltype(Functions::name), decltype(&::name)>::check(), #name); \
  static_assert((since) <= NCCL_VERSION_CODE, #name);
FANFOLD_NCCL_FUNCTIONS(FANFOLD_NCCL_COMPARE)
#undef FANFOLD_NCCL_COMPARE

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(int{kSuccess} == ncclSuccess && int{kUnhandledCudaError} == ncclUnhandledCudaError &&
              int{kSystemError} == ncclSystemError && int{kInternalError} == ncclInternalError &&
              int{kInvalidArgument} == ncclInvalidArgument &&
              int{kInvalidUsage} == ncclInvalidUsage && int{kRemoteError} == ncclRemoteError &&
              int{kInProgress} == ncclInProgress && int{kTimeout} == ncclTimeout);
static_assert(int{kUint8} == ncclUint8 && int{kInt32} == ncclInt32 && int{kInt64} == ncclInt64 &&
              int{kFloat16} == ncclFloat16 && int{kFloat32} == ncclFloat32 &&
              int{kBfloat16} == ncclBfloat16 && int{kSum} == ncclSum);
static_assert(kUndefined == NCCL_CONFIG_UNDEF_INT && kShrinkAbort == NCCL_SHRINK_ABORT &&
              kWindowSymmetric == NCCL_WIN_COLL_SYMMETRIC &&
              kWindowAlignment == NCCL_WIN_REQUIRED_ALIGNMENT);

TEST(NcclAbiTest, TheConfigIsOneOfNccls) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const Config ours;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.blocking, theirs.blocking);
  EXPECT_EQ(ours.split_share, theirs.splitShare);
}

}  // namespace
}  // namespace fanfold::gpu::nccl
