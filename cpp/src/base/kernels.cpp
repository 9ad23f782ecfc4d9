// SPDX-License-Identifier: Apache-2.0
#include "base/kernels.h"

#include <string>
#include <string_view>

#include "fanfold/error.h"

namespace fanfold::base {

namespace {

// What the processor and the operating system offer; what the build offers is the other question,
// answered by the null pointers of `avx2_kernels` and `avx512_kernels`.
#if defined(__x86_64__)
bool processor_has_avx2() noexcept {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}
bool processor_has_avx512() noexcept {
  return processor_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}
#else
bool processor_has_avx2() noexcept { return false; }
bool processor_has_avx512() noexcept { return false; }
#endif

// Null where the processor or the build lacks `isa`. The processor is asked first: a file built for
// an instruction set must not be entered without it.
const Kernels* find_kernels(Isa isa) noexcept {
  switch (isa) {
    case Isa::kAuto:
      for (const Isa candidate : {Isa::kAvx512, Isa::kAvx2}) {
        if (const Kernels* found = find_kernels(candidate)) return found;
      }
      return portable_kernels();
    case Isa::kPortable:
      return portable_kernels();
    case Isa::kAvx2:
      return processor_has_avx2() ? avx2_kernels() : nullptr;
    case Isa::kAvx512:
      return processor_has_avx512() ? avx512_kernels() : nullptr;
  }
  return nullptr;
}

const char* name_of_isa(Isa isa) noexcept {
  switch (isa) {
    case Isa::kAuto:
      return "auto";
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace

const Kernels& kernels(Isa isa) {
  const Kernels* found = find_kernels(isa);
  if (found == nullptr) {
    throw Unsupported(
        std::string("isa: expected an instruction set of this processor and build, ") + "got " +
        name_of_isa(isa));
  }
  return *found;
}

bool is_supported(Isa isa) noexcept { return find_kernels(isa) != nullptr; }

Isa isa_from_name(const char* name) {
  const std::string_view wanted = name == nullptr ? std::string_view() : name;
  for (const Isa isa : {Isa::kAuto, Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (wanted == name_of_isa(isa)) return isa;
  }
  throw InvalidArgument("isa: expected auto, portable, avx2 or avx512, got '" +
                        std::string(wanted) + "'");
}

}  // namespace fanfold::base
