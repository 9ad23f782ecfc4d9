// SPDX-License-Identifier: Apache-2.0
#pragma once

// NCCL, found at run time: nothing links it, so that all of the library loads where there is none.

#include <cstdint>
#include <memory>
#include <string>

#include "gpu/nccl_api.h"

namespace fanfold::gpu {

/// What needs which version of NCCL.
enum class NcclFeature : std::uint8_t {
  kCollectives,       ///< 2.19: collectives on one's own communicator or on another's
  kWindows,           ///< 2.27: memory that NCCL makes known to all ranks
  kShrink,            ///< 2.27: the survivors' communicator out of one that lost ranks
  kPeerPointers,      ///< 2.29: addresses of peers' windows
  kRanksShareDevice,  ///< 2.30: several ranks on one GPU
};

struct NcclSearch {
  std::string path;          ///< of the caller; empty: environment variable FANFOLD_NCCL_LIBRARY
  std::string default_path;  ///< where the process has none: before the system's; may be empty
  bool only_loaded = false;  ///< only one that the process has already, also by a path
};

/// NCCL's functions. Any thread; stays loaded.
class NcclLibrary {
 public:
  /// A path that is given; else the library that the process has loaded; else the default path;
  /// else the system's libnccl.so.2.
  /// @throws Unsupported  none is found, the one found cannot be opened, or it is older than 2.19.
  static std::shared_ptr<const NcclLibrary> open(const NcclSearch& search);

  const nccl::Functions& functions() const noexcept { return functions_; }
  /// 23203 of 2.32.3.
  int version() const noexcept { return version_; }
  /// The file it comes from.
  const std::string& file() const noexcept { return file_; }
  bool has(NcclFeature feature) const noexcept;
  /// @throws Unsupported  the version found lacks it; names both versions and the file.
  void require(NcclFeature feature) const;
  /// NCCL's words for a result of a call on `comm` (may be null), with its last error.
  std::string describe(nccl::Result result, nccl::Comm comm) const;

 private:
  NcclLibrary(void* library, std::string file);

  nccl::Functions functions_;
  std::string file_;
  int version_ = 0;
};

/// "2.32.3".
std::string nccl_version_text(int version);

}  // namespace fanfold::gpu
