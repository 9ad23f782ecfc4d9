// SPDX-License-Identifier: Apache-2.0

#include "peer.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "cudasim/control.h"
#include "virtual_range.h"

namespace fanfold::gpu::litmus {

bool send_message(int socket, const Message& message) {
  iovec part = {const_cast<Message*>(&message), sizeof(message)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (message.fd >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* const first = CMSG_FIRSTHDR(&header);
    first->cmsg_level = SOL_SOCKET;
    first->cmsg_type = SCM_RIGHTS;
    first->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(first), &message.fd, sizeof(int));
  }
  return ::sendmsg(socket, &header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(message));
}

bool receive_message(int socket, Message* message) {
  iovec part = {message, sizeof(*message)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  const ssize_t bytes = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  message->fd = -1;
  const cmsghdr* const first = CMSG_FIRSTHDR(&header);
  if (first != nullptr && first->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&message->fd, CMSG_DATA(first), sizeof(int));
  }
  return bytes == static_cast<ssize_t>(sizeof(*message));
}

Peer::Peer() {
  std::array<int, 2> ends = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()) != 0) {
    return;
  }
  process_ = ::fork();
  if (process_ == 0) {
    ::close(ends[0]);
    const std::string number = std::to_string(ends[1]);
    ::execl("/proc/self/exe", "cudasim_litmus", "--peer", number.c_str(), nullptr);
    ::_exit(127);
  }
  ::close(ends[1]);
  socket_ = ends[0];
  const timeval patience = {10, 0};
  ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
}

Peer::~Peer() {
  hang_up();
  kill();
}

void Peer::hang_up() {
  if (socket_ >= 0) {
    ::close(socket_);
    socket_ = -1;
  }
}

void Peer::kill() {
  if (process_ > 0) {
    ::kill(process_, SIGKILL);
    wait();
  }
}

int Peer::wait() {
  int status = -1;
  if (process_ > 0) {
    ::waitpid(process_, &status, 0);
    process_ = -1;
  }
  return status;
}

namespace {

/// What the peer has; all of it is of one memory.
struct Holdings {
  std::unique_ptr<Memory> memory;
  std::unique_ptr<Mapped> mapped;

  void release() {
    mapped.reset();
    memory.reset();
  }
};

bool import(const Message& message, Holdings* holdings) {
  CUmemGenericAllocationHandle handle = 0;
  const bool is_fd = message.kind == Message::Kind::kImportFd;
  Message copy = message;
  void* const shareable =
      is_fd ? at_address(static_cast<std::uintptr_t>(message.fd)) : copy.fabric.data();
  const CUresult error = cuMemImportFromShareableHandle(
      &handle, shareable,
      is_fd ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_FABRIC);
  if (message.fd >= 0) {
    ::close(message.fd);
  }
  if (error != CUDA_SUCCESS) {
    return false;
  }
  holdings->memory = std::make_unique<Memory>(handle);
  holdings->mapped = std::make_unique<Mapped>(handle, 1);
  return true;
}

bool create(int value, Holdings* holdings, Message* reply) {
  constexpr unsigned kBoth = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
  holdings->memory = std::make_unique<Memory>(0, kBoth);
  const CUmemGenericAllocationHandle handle = holdings->memory->handle();
  holdings->mapped = std::make_unique<Mapped>(handle, 1);
  return cuMemsetD32(holdings->mapped->address(), static_cast<unsigned>(value), 64) ==
             CUDA_SUCCESS &&
         cuCtxSynchronize() == CUDA_SUCCESS &&
         cuMemExportToShareableHandle(&reply->fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      0) == CUDA_SUCCESS &&
         cuMemExportToShareableHandle(reply->fabric.data(), handle, CU_MEM_HANDLE_TYPE_FABRIC, 0) ==
             CUDA_SUCCESS;
}

bool do_as_told(const Message& message, Holdings* holdings, cudaStream_t stream, Message* reply) {
  switch (message.kind) {
    case Message::Kind::kImportFd:
    case Message::Kind::kImportFabric:
      return import(message, holdings);
    case Message::Kind::kExport:
      return create(message.value, holdings, reply);
    case Message::Kind::kConsume:
      reply->kind = Message::Kind::kResult;
      message_passing(holdings->mapped->words(kReleaseAcquire), 1, stream);
      if (cudaStreamSynchronize(stream) != cudaSuccess) {
        return false;
      }
      return cudaMemcpy(&reply->value, holdings->mapped->words(0).out, sizeof(int),
                        cudaMemcpyDeviceToHost) == cudaSuccess;
    case Message::Kind::kLeave: {
      holdings->release();
      const cudasim::Stats left = cudasim::stats();
      reply->kind = Message::Kind::kResult;
      reply->value = static_cast<int>(left.handles + left.mappings + left.reservations);
      return true;
    }
    default:
      return false;
  }
}

}  // namespace

int run_peer(int socket) {
  cudasim::Config config;
  config.multiprocess = true;
  config.driver.first_device = 1;
  cudasim::configure(config);
  int count = 0;
  if (cuDeviceGetCount(&count) != CUDA_ERROR_NOT_INITIALIZED) {
    return 4;  // nothing works before cuInit
  }
  cudaStream_t stream = nullptr;
  if (cuInit(0) != CUDA_SUCCESS || cudaStreamCreate(&stream) != cudaSuccess) {
    return 2;
  }
  Holdings holdings;
  Message message;
  while (receive_message(socket, &message)) {
    Message reply;
    if (!do_as_told(message, &holdings, stream, &reply) || !send_message(socket, reply)) {
      return 3;
    }
    if (reply.fd >= 0) {
      ::close(reply.fd);
    }
  }
  return 0;
}

}  // namespace fanfold::gpu::litmus
