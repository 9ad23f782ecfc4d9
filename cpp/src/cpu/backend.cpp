// SPDX-License-Identifier: Apache-2.0
#include "cpu/backend.h"

namespace fanfold::cpu {
namespace {

class CpuBackend final : public exec::Backend {
 public:
  using Backend::Backend;
  void dispatch_send(const exec::DispatchSendParams& params) override {
    cpu::dispatch_send(context_, params);
  }
  void dispatch_recv(const exec::DispatchRecvParams& params) override {
    cpu::dispatch_recv(context_, params);
  }
  void expand_rows(const exec::ExpandRowsParams& params) override {
    cpu::expand_rows(context_, params);
  }
  void move_rows(const exec::MoveRowsParams& params) override { cpu::move_rows(context_, params); }
  void pack_rows(const exec::PackRowsParams& params) override { cpu::pack_rows(context_, params); }
  void gather_rows(const exec::GatherRowsParams& params) override {
    cpu::gather_rows(context_, params);
  }
  void combine_send(const exec::CombineSendParams& params) override {
    cpu::combine_send(context_, params);
  }
  void wait_flags(const exec::WaitFlagsParams& params) override {
    cpu::wait_flags(context_, params);
  }
  void sum_rows(const exec::SumRowsParams& params) override { cpu::sum_rows(context_, params); }
  void sanitize(const exec::SanitizeParams& params) override { cpu::sanitize(params); }
};

}  // namespace

std::unique_ptr<exec::Backend> make_backend(const exec::Context& context) {
  return std::make_unique<CpuBackend>(context);
}

}  // namespace fanfold::cpu
