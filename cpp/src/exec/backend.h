// SPDX-License-Identifier: Apache-2.0
#pragma once

// The data movement that a strategy asks for. One implementation per kind of device.

#include <memory>

#include "exec/params.h"

namespace fanfold::exec {

/// Executes phases. Stateless apart from its context; the pointers in the params say what is
/// touched.
class Backend {
 public:
  explicit Backend(const Context& context) noexcept : context_(context) {}
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  /// From now on large phases are shared out to `workers`, which must outlive this; null (so at
  /// first): the calling thread only.
  void use_workers(Workers* workers) noexcept { context_.workers = workers; }

  /// Pushes rows into every active rank's slot and publishes the dispatch flags.
  virtual void dispatch_send(const DispatchSendParams& params) = 0;
  /// Waits for the dispatch flags and pads the ids.
  /// @throws InvalidArgument (the ranks' calls differ), PeerTimeout, PeerAborted, PeerLost
  virtual void dispatch_recv(const DispatchRecvParams& params) = 0;
  /// Copies received rows to expert order.
  virtual void expand_rows(const ExpandRowsParams& params) = 0;
  /// Copies received rows to where a layout per rank wants them.
  virtual void move_rows(const MoveRowsParams& params) = 0;
  /// Packs rows for a wire.
  virtual void pack_rows(const PackRowsParams& params) = 0;
  /// Copies picked rows to consecutive rows.
  virtual void gather_rows(const GatherRowsParams& params) = 0;
  /// Stages or reduces the experts' rows and publishes the combine flags.
  virtual void combine_send(const CombineSendParams& params) = 0;
  /// Waits for the flags of one phase.
  /// @throws as dispatch_recv
  virtual void wait_flags(const WaitFlagsParams& params) = 0;
  /// Sums rows to tokens.
  virtual void sum_rows(const SumRowsParams& params) = 0;
  /// Overwrites ids by policy.
  virtual void sanitize(const SanitizeParams& params) = 0;

 protected:
  Context context_;
};

}  // namespace fanfold::exec
