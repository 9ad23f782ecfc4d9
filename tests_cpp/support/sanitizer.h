// SPDX-License-Identifier: Apache-2.0
#pragma once

// Under a sanitizer tests take smaller sizes.

namespace fanfold::testing {

#ifdef __SANITIZE_THREAD__
inline constexpr bool kIsThreadSanitizer = true;
#else
inline constexpr bool kIsThreadSanitizer = false;
#endif

#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kIsSanitizer = true;
#else
inline constexpr bool kIsSanitizer = kIsThreadSanitizer;
#endif

}  // namespace fanfold::testing
