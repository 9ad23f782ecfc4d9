// SPDX-License-Identifier: Apache-2.0
#pragma once

// A second process for the tests: this program started again, at the other end of a socket.

#include <sys/types.h>

#include <array>

namespace fanfold::gpu::litmus {

/// What goes over the socket; a descriptor may come with it.
struct Message {
  enum class Kind : int {
    kImportFd,      // to the peer: map the descriptor that comes along, then say kReady
    kImportFabric,  // to the peer: map the fabric handle, then say kReady
    kExport,        // to the peer: create memory filled with `value`, send its handles
    kReady,
    kConsume,  // to the peer: wait for the flag, then send the payload as kResult
    kResult,
    kLeave,  // to the peer: give everything back, then send what is left as kResult
  };
  Kind kind = Kind::kReady;
  int value = 0;
  std::array<unsigned char, 64> fabric = {};
  int fd = -1;  // of the receiver
};

/// Sends a message; false if the other end is gone.
bool send_message(int socket, const Message& message);
/// Receives one; false if the other end is gone or says nothing for ten seconds.
bool receive_message(int socket, Message* message);

/// The process, and the end of the socket that leads to it. Killed and reaped at the end.
class Peer {
 public:
  Peer();
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  int socket() const { return socket_; }
  /// Kills the process at once, as a crash would end it.
  void kill();
  /// Closes the socket: the process ends by itself.
  void hang_up();
  /// Waits for its end; its exit status.
  int wait();

 private:
  int socket_ = -1;
  pid_t process_ = -1;
};

/// What the process does; returns its exit status.
int run_peer(int socket);

}  // namespace fanfold::gpu::litmus
