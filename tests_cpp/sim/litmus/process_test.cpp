// SPDX-License-Identifier: Apache-2.0

// Memory that two processes share, and what is left when one of them is killed.

#include <gmock/gmock.h>
#include <unistd.h>

#include <memory>

#include "driver_litmus.h"
#include "peer.h"

namespace fanfold::gpu::litmus {
namespace {

using Kind = Message::Kind;

class ProcessLitmus : public DriverTest {
 protected:
  void SetUp() override {
    DriverTest::SetUp();
    config_.multiprocess = true;
    start(config_);
  }

  static Message ask(const Peer& peer, const Message& message) {
    EXPECT_TRUE(send_message(peer.socket(), message));
    Message reply;
    EXPECT_TRUE(receive_message(peer.socket(), &reply));
    return reply;
  }

  /// A kernel here writes and announces, one in the peer waits and reads.
  void pass_message(Kind how) {
    Peer peer;
    const Memory memory(0, kFd | kFabric);
    const Mapped mapped(memory.handle(), 1);
    mapped.clear();
    Message message;
    message.kind = how;
    const bool is_fd = how == Kind::kImportFd;
    ASSERT_EQ(cuMemExportToShareableHandle(
                  is_fd ? static_cast<void*>(&message.fd) : message.fabric.data(), memory.handle(),
                  is_fd ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_FABRIC, 0),
              CUDA_SUCCESS);
    EXPECT_EQ(ask(peer, message).kind, Kind::kReady);
    if (is_fd) {
      EXPECT_EQ(close(message.fd), 0);
    }
    message = {};
    message.kind = Kind::kConsume;
    ASSERT_TRUE(send_message(peer.socket(), message));
    message_passing(mapped.words(kReleaseAcquire), 0, stream(0));
    ASSERT_EQ(sync(), cudaSuccess);
    Message reply;
    ASSERT_TRUE(receive_message(peer.socket(), &reply));
    EXPECT_EQ(reply.kind, Kind::kResult);
    EXPECT_EQ(reply.value, 42);
    EXPECT_EQ(kinds(), "") << all_texts();
    message.kind = Kind::kLeave;
    EXPECT_EQ(ask(peer, message).value, 0);
    peer.hang_up();
    EXPECT_EQ(peer.wait(), 0);
  }
};

TEST_F(ProcessLitmus, AFileDescriptorOverASocketSharesMemory) { pass_message(Kind::kImportFd); }

TEST_F(ProcessLitmus, AFabricHandleSharesMemory) { pass_message(Kind::kImportFabric); }

TEST_F(ProcessLitmus, MemoryOfAKilledProcessLivesWhereItIsMappedAndNowhereElse) {
  Peer peer;
  Message message;
  message.kind = Kind::kExport;
  message.value = 77;
  Message exported = ask(peer, message);
  ASSERT_GE(exported.fd, 0);
  EXPECT_EQ(close(exported.fd), 0);
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(
      cuMemImportFromShareableHandle(&handle, exported.fabric.data(), CU_MEM_HANDLE_TYPE_FABRIC),
      CUDA_SUCCESS);
  {
    const Memory imported(handle);
    const Mapped mapped(handle, 1);
    peer.kill();
    int value = 0;
    ASSERT_EQ(cuMemcpyDtoH(&value, mapped.address(), sizeof(value)), CUDA_SUCCESS);
    EXPECT_EQ(value, 77);
  }
  EXPECT_EQ(
      cuMemImportFromShareableHandle(&handle, exported.fabric.data(), CU_MEM_HANDLE_TYPE_FABRIC),
      CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(ProcessLitmus, AKilledImporterLeavesNothing) {
  Peer peer;
  const Memory memory(0, kFabric);
  Message message;
  message.kind = Kind::kImportFabric;
  ASSERT_EQ(cuMemExportToShareableHandle(message.fabric.data(), memory.handle(),
                                         CU_MEM_HANDLE_TYPE_FABRIC, 0),
            CUDA_SUCCESS);
  EXPECT_EQ(ask(peer, message).kind, Kind::kReady);
  peer.kill();
  const Mapped mapped(memory.handle(), 1);  // the memory is as it was
  put(mapped.words(0), stream(0));
  EXPECT_EQ(sync(), cudaSuccess);
}

TEST_F(ProcessLitmus, AKernelThatWaitsForAKilledPeerTimesOutInVirtualTime) {
  auto peer = std::make_unique<Peer>();
  const Words parts = words(1);
  wait_for_ever(parts, stream(0));
  peer->kill();
  EXPECT_EQ(sync(), cudaSuccess);
  EXPECT_EQ(result(parts), 1);
}

}  // namespace
}  // namespace fanfold::gpu::litmus
