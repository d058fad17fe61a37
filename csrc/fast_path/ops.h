// Runs ops of trifuse below torch's dispatcher, and keeps what a node of autograd needs.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <initializer_list>
#include <utility>

#include "fast_path/plain.h"

namespace trifuse::fast_path {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* op, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, overload).template typed<Signature>();
}

// An op's overloads for the kernels of each device.
template <class Signature>
struct Overloads {
  c10::TypedOperatorHandle<Signature> cpp, cuda;

  explicit Overloads(const char* op)
      : cpp(find<Signature>(op, "cpp")), cuda(find<Signature>(op, "cuda")) {}
  const c10::TypedOperatorHandle<Signature>& of(const Tensor& t) const {
    return t.is_cpu() ? cpp : cuda;
  }
};

// Runs an op's kernel and skips all modes and transforms. The caller has checked that none applies,
// and handles derivatives and autocast.
template <class Op, class... Args>
decltype(auto) run_kernel(const Op& op, const Args&... args) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  return op.call(args...);
}

// Returns whether kernels alone may compute a backward, because no derivative or transform of it is
// needed. `plain`: whether its tensors are.
inline bool kernels_suffice(bool plain) {
  return plain && !at::GradMode::is_enabled() && no_mode_but_autocast_applies();
}

// Runs a backward op; only its kernel, if that suffices.
template <class Op, class... Args>
decltype(auto) run_backward(bool plain, const Op& op, const Args&... args) {
  if (kernels_suffice(plain)) return run_kernel(op, args...);
  return op.call(args...);
}

inline OptionalTensor optional(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}
inline Tensor or_undefined(const OptionalTensor& t) { return t.value_or(Tensor()); }

// Returns, for each of a Function's first N inputs, whether its gradient is needed. torch counts
// only the inputs that were given.
template <size_t N>
std::array<bool, N> needed_gradients(const AutogradContext& context, int64_t given) {
  std::array<bool, N> needed{};
  size_t edge = 0;
  for (size_t i = 0; i < N; ++i)
    if (given >> i & 1) needed[i] = context.needs_input_grad(edge++);
  return needed;
}

// Returns a bit for each tensor that was given, as needed_gradients takes it.
inline int64_t given_bits(std::initializer_list<bool> given) {
  int64_t bits = 0, bit = 1;
  for (bool each : given) {
    if (each) bits |= bit;
    bit <<= 1;
  }
  return bits;
}

inline bool none_defined(const variable_list& grads) {
  for (const Tensor& grad : grads)
    if (grad.defined()) return false;
  return true;
}

// A Function keeps its options in one entry, because each entry costs a lookup by name.
constexpr const char* kKept = "kept";

template <class... Values>
void keep(AutogradContext& context, Values&&... values) {
  context.saved_data[kKept] = c10::ivalue::Tuple::create(std::forward<Values>(values)...);
}

inline c10::ArrayRef<c10::IValue> kept(const AutogradContext& context) {
  return context.saved_data.at(kKept).toTupleRef().elements().asArrayRef();
}

}  // namespace trifuse::fast_path
