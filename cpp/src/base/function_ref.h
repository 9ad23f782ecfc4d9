// SPDX-License-Identifier: Apache-2.0
#pragma once

// A callable that the callee borrows for the length of one call.

#include <type_traits>
#include <utility>

namespace fanfold::base {

template <class Signature>
class FunctionRef;

/// Points at a callable; the callable must outlive it. Costs one indirect call, allocates nothing.
template <class Result, class... Args>
class FunctionRef<Result(Args...)> {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, FunctionRef>>>
  FunctionRef(F&& f) noexcept  // NOLINT: implicit by design, as std::function is
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* object, Args... args) -> Result {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<Args>(args)...);
        }) {}
  Result operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  Result (*call_)(void*, Args...);
};

}  // namespace fanfold::base
