// SPDX-License-Identifier: Apache-2.0
#include "fanfold/transport.h"

namespace fanfold {

Transport::~Transport() = default;

}  // namespace fanfold
