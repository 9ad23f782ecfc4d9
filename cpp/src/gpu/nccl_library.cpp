// SPDX-License-Identifier: Apache-2.0
#include "gpu/nccl_library.h"

#include <dlfcn.h>

#include <utility>

#include "base/env.h"
#include "base/format.h"
#include "fanfold/error.h"

namespace fanfold::gpu {
namespace {

constexpr const char* kSystemLibrary = "libnccl.so.2";
constexpr const char* kPathVariable = "FANFOLD_NCCL_LIBRARY";

struct Need {
  int version;
  const char* what;
};

Need need_of(NcclFeature feature) {
  switch (feature) {
    case NcclFeature::kCollectives:
      return {21900, "collectives on GPU memory"};
    case NcclFeature::kWindows:
      return {22700, "symmetric memory of NCCL"};
    case NcclFeature::kShrink:
      return {22700, "shrinking a communicator"};
    case NcclFeature::kPeerPointers:
      return {22900, "addresses of peers' memory"};
    case NcclFeature::kRanksShareDevice:
      return {23000, "several ranks on one GPU"};
  }
  return {0, ""};
}

std::string last_loader_error() {
  const char* const reason = ::dlerror();  // NOLINT(concurrency-mt-unsafe): per thread in glibc
  return reason == nullptr ? "no reason given" : reason;
}

void* open_file(const std::string& file, const char* origin) {
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  throw Unsupported(base::str("NCCL: expected a library at ", file, " (", origin,
                              "), got: ", last_loader_error()));
}

/// The caller's file; for a handle only where the process has it already: another copy of NCCL
/// would not know the handle.
void* open_given(const std::string& file, const char* origin, bool only_loaded) {
  if (!only_loaded) return open_file(file, origin);
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library != nullptr) return library;
  throw Unsupported(
      base::str("NCCL: expected the library that the handle is of, which this process "
                "has loaded, got ",
                file, " (", origin, "), which it has not"));
}

struct Found {
  void* library;
  std::string name;  // under which it was found
};

Found find_library(const NcclSearch& search) {
  if (!search.path.empty()) {
    return {open_given(search.path, "the path given", search.only_loaded), search.path};
  }
  if (const auto path = base::env_variable(kPathVariable); path && !path->empty()) {
    return {open_given(*path, kPathVariable, search.only_loaded), *path};
  }
  if (void* const loaded = ::dlopen(kSystemLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) {
    return {loaded, kSystemLibrary};
  }
  if (::dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr) {
    return {::dlopen(nullptr, RTLD_NOW), "this process"};
  }
  if (search.only_loaded) {
    throw Unsupported(
        "NCCL: expected this process to have loaded the library that the handle is of, found none; "
        "give its path");
  }
  if (!search.default_path.empty()) {
    return {open_file(search.default_path, "of the environment"), search.default_path};
  }
  if (void* const library = ::dlopen(kSystemLibrary, RTLD_NOW | RTLD_LOCAL)) {
    return {library, kSystemLibrary};
  }
  throw Unsupported(base::str("NCCL: expected ", kSystemLibrary,
                              " in this process or on the system, got: ", last_loader_error(),
                              "; give its path, or set ", kPathVariable));
}

std::string file_of(const void* symbol, const std::string& otherwise) {
  Dl_info info{};
  if (::dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return otherwise;
  return info.dli_fname;
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
}

}  // namespace

std::shared_ptr<const NcclLibrary> NcclLibrary::open(const NcclSearch& search) {
  const Found found = find_library(search);
  void* const get_version = ::dlsym(found.library, "ncclGetVersion");
  if (get_version == nullptr) {
    throw Unsupported(base::str("NCCL: expected ncclGetVersion in ", found.name,
                                ", which has no such function: it is not NCCL"));
  }
  return std::shared_ptr<const NcclLibrary>(
      new NcclLibrary(found.library, file_of(get_version, found.name)));
}

NcclLibrary::NcclLibrary(void* library, std::string file) : file_(std::move(file)) {
#define FANFOLD_NCCL_FIND(name, since, ...) find(library, #name, functions_.name);
  FANFOLD_NCCL_FUNCTIONS(FANFOLD_NCCL_FIND)
#undef FANFOLD_NCCL_FIND
  const nccl::Result result = functions_.ncclGetVersion(&version_);
  if (result != nccl::kSuccess) {
    throw Unsupported(base::str("NCCL: expected ", file_, " to tell its version, got result ",
                                static_cast<int>(result)));
  }
  require(NcclFeature::kCollectives);
  // What the version promises must be there: calls go through the pointers unasked.
#define FANFOLD_NCCL_EXPECT(name, since, ...)                                              \
  if (version_ >= (since) && functions_.name == nullptr) {                                 \
    throw Unsupported(base::str("NCCL: expected " #name " in ", file_, " of version ",     \
                                nccl_version_text(version_), ", which does not have it")); \
  }
  FANFOLD_NCCL_FUNCTIONS(FANFOLD_NCCL_EXPECT)
#undef FANFOLD_NCCL_EXPECT
}

bool NcclLibrary::has(NcclFeature feature) const noexcept {
  return version_ >= need_of(feature).version;
}

void NcclLibrary::require(NcclFeature feature) const {
  if (has(feature)) return;
  const Need need = need_of(feature);
  throw Unsupported(base::str("NCCL: ", need.what, ": expected version ",
                              nccl_version_text(need.version), " or later, got ",
                              nccl_version_text(version_), " (", file_, ")"));
}

std::string NcclLibrary::describe(nccl::Result result, nccl::Comm comm) const {
  std::string text = functions_.ncclGetErrorString(result);
  const char* const last = functions_.ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') text += base::str("; ", last);
  return base::str(text, " [NCCL ", nccl_version_text(version_), "]");
}

std::string nccl_version_text(int version) {
  // Below 2.9 the minor version took two digits, not three.
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int minor = version < 10000 ? version / 100 % 10 : version / 100 % 100;
  return base::str(major, ".", minor, ".", version % 100);
}

}  // namespace fanfold::gpu
