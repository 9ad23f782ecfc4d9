// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory and streams of a GPU, for helpers that are also linked where there is none.

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fanfold::testing {

/// What a test program with a GPU brings. Threads: any.
class TestDevice {
 public:
  virtual ~TestDevice() = default;
  /// Memory of device `index`. What nobody holds any more is used again, never freed in between:
  /// that would wait for the device, on which another rank's kernel may be waiting for this rank.
  virtual std::shared_ptr<std::byte> allocate(int index, std::int64_t bytes) = 0;
  /// A stream that no other waits for.
  virtual std::shared_ptr<void> make_stream(int index) = 0;
  virtual void synchronize(int index, void* stream) = 0;
  // On `stream`; these wait until it is done.
  virtual void upload(int index, void* to, const void* from, std::int64_t bytes, void* stream) = 0;
  virtual void download(int index, void* to, const void* from, std::int64_t bytes,
                        void* stream) = 0;
};

/// The program's; null: it has no GPU.
inline TestDevice*& test_device() {
  static TestDevice* device = nullptr;
  return device;
}

}  // namespace fanfold::testing
