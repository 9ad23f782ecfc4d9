// SPDX-License-Identifier: Apache-2.0
// Stands in for kernels_avx2.cpp and kernels_avx512.cpp where the build leaves them out.
#include "base/kernels.h"

namespace fanfold::base {

const Kernels* avx2_kernels() noexcept { return nullptr; }
const Kernels* avx512_kernels() noexcept { return nullptr; }

}  // namespace fanfold::base
