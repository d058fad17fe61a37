// This file decides which calls are plain, and reads their arguments from Python.
//
// A call is plain if its tensors are dense, on the CPU or an NVIDIA GPU, and of the classes Tensor
// or Parameter, and if no mode or transform applies. A `read` function returns false for any other
// argument.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "arguments.h"

namespace trifuse::fast_path {

using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr DispatchKeySet kAutocast({DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});

// The key of tensors with named dimensions, in versions of torch that have them.
template <class Key>
constexpr DispatchKeySet named_tensors() {
  if constexpr (requires { Key::Named; }) return DispatchKeySet(Key::Named);
  else return {};
}

// Returns whether no mode or transform other than autocast applies to this thread's calls. Each of
// them changes the thread's dispatch keys, except modes of __torch_function__.
inline bool no_mode_but_autocast_applies() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  // Threads that run a backward exclude named tensors, which are never plain anyway.
  DispatchKeySet included = keys.included_;
  DispatchKeySet excluded = keys.excluded_ - named_tensors<DispatchKey>();
  if (c10::InferenceMode::is_enabled()) {
    included = included.add(DispatchKey::ADInplaceOrView);
    excluded = excluded - c10::autograd_dispatch_keyset;
  }
  return included == c10::default_included_set &&
      c10::default_excluded_set.isSupersetOf(excluded) && !at::impl::torch_function_mode_enabled();
}

inline bool autocast_is_off() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.isSupersetOf(kAutocast);
}

inline bool no_mode_applies() { return no_mode_but_autocast_applies() && autocast_is_off(); }

// Returns whether a tensor is dense, on the CPU or an NVIDIA GPU, without a tangent, and not a
// wrapper or a view that its memory alone does not describe.
inline bool is_plain(const Tensor& t) {
  constexpr DispatchKeySet on_cpu(
      {DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU,
       DispatchKey::AutocastCPU});
  constexpr DispatchKeySet on_gpu(
      {DispatchKey::CUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCUDA,
       DispatchKey::AutocastCUDA});
  return t.defined() && (on_cpu.isSupersetOf(t.key_set()) || on_gpu.isSupersetOf(t.key_set())) &&
      !t._fw_grad(0).defined();
}

inline bool all_plain(const variable_list& tensors) {
  for (const Tensor& t : tensors)
    if (t.defined() && !is_plain(t)) return false;
  return true;
}

// Reads an argument that must be a plain tensor, on any device.
inline bool read_anywhere(PyObject* object, Tensor& t) {
  if (!THPVariable_CheckExact(object)) return false;
  t = THPVariable_Unpack(object);
  return is_plain(t);
}

// Reads an argument that must be a plain tensor on the CPU.
inline bool read(PyObject* object, Tensor& t) { return read_anywhere(object, t) && t.is_cpu(); }

inline bool read(PyObject* object, OptionalTensor& t) {
  if (object == Py_None) return true;
  return read(object, t.emplace());
}

// Reads an argument that must be a plain tensor on the device of a tensor that was read before.
inline bool read_beside(const Tensor& first, PyObject* object, Tensor& t) {
  return read_anywhere(object, t) && t.device() == first.device();
}

inline bool read_beside(const Tensor& first, PyObject* object, OptionalTensor& t) {
  if (object == Py_None) return true;
  return read_beside(first, object, t.emplace());
}

inline bool read(PyObject* object, bool& flag) {
  flag = object == Py_True;
  return flag || object == Py_False;
}

// Reads a float, or an int such as the 0 of dropout_p=0.
inline bool read(PyObject* object, double& number) {
  if (PyFloat_CheckExact(object)) {
    number = PyFloat_AS_DOUBLE(object);
  } else {
    int overflow;
    if (!PyLong_CheckExact(object)) return false;
    number = static_cast<double>(PyLong_AsLongLongAndOverflow(object, &overflow));
    if (overflow) return false;
  }
  return std::isfinite(number);
}

inline bool read(PyObject* object, int64_t& number) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow;
  number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return !overflow;
}

inline bool read(PyObject* object, std::optional<double>& number) {
  return object == Py_None || read(object, number.emplace());
}

inline bool read(PyObject* object, std::vector<double>& numbers) {
  if (!PyTuple_CheckExact(object)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i)
    if (!read(PyTuple_GET_ITEM(object, i), numbers.emplace_back())) return false;
  return true;
}

// The name lives as long as the object.
inline bool read(PyObject* object, std::optional<c10::string_view>& name) {
  if (object == Py_None) return true;
  if (!PyUnicode_Check(object)) return false;
  Py_ssize_t size;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (!text) throw python_error();
  name.emplace(text, size);
  return true;
}

inline bool is_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
}

inline bool is_probability(double p) { return 0 <= p && p <= 1; }

template <class... Tensors>
bool records(const Tensors&... tensors) {
  const auto needs_grad = [](const OptionalTensor& t) { return t && t->requires_grad(); };
  return at::GradMode::is_enabled() && (needs_grad(tensors) || ...);
}

inline Tensor random_seeds(int64_t count, const Tensor& like) {
  using Limits = std::numeric_limits<int64_t>;
  return at::randint(Limits::min(), Limits::max(), {count}, like.options().dtype(at::kLong));
}

// Draws a call's seed if it drops anything; the same as philox.draw_seed in Python.
inline OptionalTensor draw_seed(double dropout_p, const Tensor& like) {
  if (dropout_p == 0) return {};
  return random_seeds(1, like);
}

// Reads a tuple of tensors, or of tensors and None.
template <class Each, class Tensors>
bool read_tuple(PyObject* object, Tensors& tensors) {
  if (!PyTuple_CheckExact(object)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
    Each each;
    if (!read(PyTuple_GET_ITEM(object, i), each) || records(each)) return false;
    tensors.push_back(std::move(each));
  }
  return true;
}

inline void check_count(Py_ssize_t given, Py_ssize_t expected) {
  TORCH_CHECK_TYPE(given == expected, "expected ", expected, " arguments; got ", given);
}

}  // namespace trifuse::fast_path
