// SPDX-License-Identifier: Apache-2.0
#include "fanfold/error.h"

#include <cerrno>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "gtest/gtest.h"

namespace fanfold {
namespace {

/// Throws `error` and catches it as `Base`.
template <class Base, class Thrown>
std::string caught_as(const Thrown& error) {
  try {
    throw Thrown(error);  // a copy, as the language makes one
  } catch (const Base& base) {
    return base.what();
  }
}

template <class Thrown>
void expect_family(const Thrown& error) {
  EXPECT_EQ(caught_as<Thrown>(error), "what, expected, got");
  EXPECT_EQ(caught_as<Error>(error), "what, expected, got");
  EXPECT_EQ(caught_as<std::runtime_error>(error), "what, expected, got");
  static_assert(std::is_nothrow_copy_constructible_v<Thrown>);
  static_assert(std::is_nothrow_copy_assignable_v<Thrown>);
}

TEST(ErrorTest, EveryClassIsAnErrorWithItsMessage) {
  const std::string text = "what, expected, got";
  expect_family(InvalidArgument(text));
  expect_family(InvalidState(text));
  expect_family(Unsupported(text));
  expect_family(SystemFailure(text, EMFILE));
  expect_family(CudaFailure(text, 2));
  expect_family(CapacityExceeded(text));
  expect_family(PeerTimeout(text, 1));
  expect_family(PeerAborted(text, 1, "reason"));
  expect_family(PeerLost(text, 1));
}

TEST(ErrorTest, PeerErrorsNameTheRank) {
  EXPECT_EQ(PeerTimeout("late", 3).rank(), 3);
  EXPECT_EQ(PeerLost("gone", 0).rank(), 0);
  const PeerAborted aborted("aborted", 5, "out of memory");
  EXPECT_EQ(aborted.rank(), 5);
  EXPECT_EQ(aborted.reason(), "out of memory");
  EXPECT_EQ(caught_as<PeerError>(aborted), "aborted");
}

TEST(ErrorTest, SystemFailuresKeepTheErrno) {
  EXPECT_EQ(SystemFailure("open failed", ENOENT).code(), ENOENT);
}

TEST(ErrorTest, CudaFailuresKeepTheCode) { EXPECT_EQ(CudaFailure("failed", 801).code(), 801); }

TEST(ErrorTest, OutOfMemoryIsABadAllocWithItsMessage) {
  EXPECT_EQ(caught_as<std::bad_alloc>(OutOfMemory("4 bytes on device 0")), "4 bytes on device 0");
  static_assert(std::is_nothrow_copy_constructible_v<OutOfMemory>);
}

TEST(ErrorTest, AssignmentCarriesTheData) {
  PeerAborted error("first", 1, "a");
  error = PeerAborted("second", 2, "b");
  EXPECT_STREQ(error.what(), "second");
  EXPECT_EQ(error.rank(), 2);
  EXPECT_EQ(error.reason(), "b");
}

TEST(ErrorTest, OneKindIsNotCaughtAsAnother) {
  static_assert(!std::is_base_of_v<InvalidArgument, InvalidState>);
  static_assert(!std::is_base_of_v<PeerTimeout, PeerLost>);
  static_assert(!std::is_base_of_v<PeerError, InvalidState>);
  static_assert(std::is_base_of_v<PeerError, PeerTimeout>);
  static_assert(std::is_base_of_v<PeerError, PeerAborted>);
  static_assert(std::is_base_of_v<PeerError, PeerLost>);
}

}  // namespace
}  // namespace fanfold
