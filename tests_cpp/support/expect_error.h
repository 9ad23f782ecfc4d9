// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks an exception's type and text.

#include <string>
#include <typeinfo>
#include <vector>

#include "fanfold/error.h"
#include "gtest/gtest.h"

namespace fanfold::testing {

/// Expects that `call` throws exactly an `ErrorType` whose text contains all `words`; returns the
/// text.
template <class ErrorType, class Call>
std::string expect_error(const std::vector<std::string>& words, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(typeid(error).name(), typeid(ErrorType).name()) << text;
    for (const std::string& word : words) {
      EXPECT_NE(text.find(word), std::string::npos) << "no '" << word << "' in: " << text;
    }
    return text;
  }
  ADD_FAILURE() << "expected " << typeid(ErrorType).name() << ", nothing was thrown";
  return {};
}

}  // namespace fanfold::testing
