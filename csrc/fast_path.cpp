// Calls of operators that skip the checks in Python, because they are plain and valid.
//
// Checks in Python take longer than a small call computes. A function in this file reads the
// caller's arguments. If they are plain and fit each other, it runs the op; otherwise it returns
// None, and the operator's checks in Python report what is wrong or convert what the op does not
// take. So each message exists once, in Python. A call is plain if its tensors are dense, on the
// CPU and of no other class than Tensor and Parameter, and if no mode or transform applies.
//
// With gradients a call is one node, a torch::autograd::Function. Its backward runs the backward
// op. Where that must be differentiated or batched in turn, torch's dispatcher runs the rules that
// are registered for the op (pytorch_ext/ops/_operator.py), as it does for any other call.

#include "fast_path.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"

namespace trifuse {
namespace fast_path {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Conditions of a plain call ----------------------------------------------------------------------

constexpr DispatchKeySet kAutocast({DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});

// The key of tensors with named dimensions, in versions of torch that have them.
template <class Key>
constexpr DispatchKeySet named_tensors() {
  if constexpr (requires { Key::Named; }) return DispatchKeySet(Key::Named);
  else return {};
}

// Returns whether no mode or transform applies to this thread's calls, other than autocast. Each of
// them changes the thread's dispatch keys, except modes of __torch_function__.
bool no_mode_but_autocast_applies() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  // Threads that run a backward exclude named tensors. These are not plain in any case.
  DispatchKeySet included = keys.included_;
  DispatchKeySet excluded = keys.excluded_ - named_tensors<DispatchKey>();
  if (c10::InferenceMode::is_enabled()) {
    included = included.add(DispatchKey::ADInplaceOrView);
    excluded = excluded - c10::autograd_dispatch_keyset;
  }
  return included == c10::default_included_set &&
      c10::default_excluded_set.isSupersetOf(excluded) && !at::impl::torch_function_mode_enabled();
}

bool autocast_is_off() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.isSupersetOf(kAutocast);
}

bool no_mode_applies() { return no_mode_but_autocast_applies() && autocast_is_off(); }

// Returns whether a tensor is dense, on the CPU or an NVIDIA GPU, without a tangent, and no wrapper
// or view that needs more than its memory.
bool is_plain(const Tensor& t) {
  constexpr DispatchKeySet on_cpu(
      {DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU,
       DispatchKey::AutocastCPU});
  constexpr DispatchKeySet on_gpu(
      {DispatchKey::CUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCUDA,
       DispatchKey::AutocastCUDA});
  return t.defined() && (on_cpu.isSupersetOf(t.key_set()) || on_gpu.isSupersetOf(t.key_set())) &&
      !t._fw_grad(0).defined();
}

bool all_plain(const variable_list& tensors) {
  for (const Tensor& t : tensors)
    if (t.defined() && !is_plain(t)) return false;
  return true;
}

// Reads an argument that must be a plain tensor, on any device.
bool read_anywhere(PyObject* object, Tensor& t) {
  if (!THPVariable_CheckExact(object)) return false;
  t = THPVariable_Unpack(object);
  return is_plain(t);
}

// Reads an argument that must be a plain tensor on the CPU.
bool read(PyObject* object, Tensor& t) { return read_anywhere(object, t) && t.is_cpu(); }

bool read(PyObject* object, OptionalTensor& t) {
  if (object == Py_None) return true;
  return read(object, t.emplace());
}

// Reads an argument that must be a plain tensor on the device of another, which was read before.
bool read_beside(const Tensor& first, PyObject* object, Tensor& t) {
  return read_anywhere(object, t) && t.device() == first.device();
}

bool read_beside(const Tensor& first, PyObject* object, OptionalTensor& t) {
  if (object == Py_None) return true;
  return read_beside(first, object, t.emplace());
}

bool read(PyObject* object, bool& flag) {
  flag = object == Py_True;
  return flag || object == Py_False;
}

bool read(PyObject* object, double& number) {
  if (!PyFloat_CheckExact(object)) return false;
  number = PyFloat_AS_DOUBLE(object);
  return std::isfinite(number);
}

bool read(PyObject* object, int64_t& number) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow;
  number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return !overflow;
}

bool read(PyObject* object, std::optional<double>& number) {
  return object == Py_None || read(object, number.emplace());
}

// The name lives as long as the object.
bool read(PyObject* object, std::optional<c10::string_view>& name) {
  if (object == Py_None) return true;
  if (!PyUnicode_Check(object)) return false;
  Py_ssize_t size;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (!text) throw python_error();
  name.emplace(text, size);
  return true;
}

bool is_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
}

bool is_probability(double p) { return 0 <= p && p <= 1; }

template <class... Tensors>
bool records(const Tensors&... tensors) {
  const auto needs_grad = [](const OptionalTensor& t) { return t && t->requires_grad(); };
  return at::GradMode::is_enabled() && (needs_grad(tensors) || ...);
}

// Draws a call's seed if it drops anything; the same as philox.draw_seed in Python.
OptionalTensor draw_seed(double dropout_p, const Tensor& like) {
  if (dropout_p == 0) return {};
  using Limits = std::numeric_limits<int64_t>;
  return at::randint(Limits::min(), Limits::max(), {1}, like.options().dtype(at::kLong));
}

// Calling ops ------------------------------------------------------------------------------------

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

// Runs an op's kernel, past all modes and transforms: the caller has found that none applies, and
// handles derivatives and autocast.
template <class Op, class... Args>
decltype(auto) run_kernel(const Op& op, const Args&... args) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  return op.call(args...);
}

// Runs a backward op, by its kernel alone if no derivative or transform of it is wanted.
template <class Op, class... Args>
decltype(auto) run_backward(bool plain, const Op& op, const Args&... args) {
  if (plain && !at::GradMode::is_enabled() && no_mode_but_autocast_applies())
    return run_kernel(op, args...);
  return op.call(args...);
}

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }
Tensor or_undefined(const OptionalTensor& t) { return t.value_or(Tensor()); }

// Returns whether each of a Function's first N inputs has a gradient that is wanted. torch counts
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
int64_t given_bits(std::initializer_list<bool> given) {
  int64_t bits = 0, bit = 1;
  for (bool each : given) {
    if (each) bits |= bit;
    bit <<= 1;
  }
  return bits;
}

bool none_defined(const variable_list& grads) {
  for (const Tensor& grad : grads)
    if (grad.defined()) return false;
  return true;
}

// A Function keeps its options in one entry, because each entry is a lookup by name.
constexpr const char* kKept = "kept";

template <class... Values>
void keep(AutogradContext& context, Values&&... values) {
  context.saved_data[kKept] = c10::ivalue::Tuple::create(std::forward<Values>(values)...);
}

c10::ArrayRef<c10::IValue> kept(const AutogradContext& context) {
  return context.saved_data.at(kKept).toTupleRef().elements().asArrayRef();
}

// dropout_add_layer_norm ----------------------------------------------------------------------

struct NormCall {
  Tensor x;
  OptionalTensor residual, weight, bias, x_bias, seed;
  double dropout_p, eps;
  bool rms_norm, prenorm;

  at::ScalarType sum_dtype() const { return residual ? residual->scalar_type() : x.scalar_type(); }

  void autocast() {}  // it leaves the norm's tensors as they are

  // Some valid calls don't fit: they need a conversion, which Python makes.
  bool fits() const {
    const at::ScalarType dtype = x.scalar_type(), wide = accumulation_type(dtype);
    if (x.dim() == 0 || !is_floating(dtype) || eps < 0) return false;
    const auto fits = [&](const OptionalTensor& t, at::IntArrayRef sizes) {
      return !t || (t->sizes() == sizes && (t->scalar_type() == dtype || t->scalar_type() == wide));
    };
    const auto features = x.sizes().slice(x.dim() - 1);
    return fits(residual, x.sizes()) && fits(weight, features) && fits(bias, features) &&
        fits(x_bias, features);
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> run() const {
    static const Overloads<std::tuple<Tensor, Tensor, Tensor, Tensor>(
        const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, double, double, bool, bool, at::ScalarType)>
        op("trifuse::dropout_add_layer_norm_forward");
    return run_kernel(
        op.of(x), x, residual, weight, bias, x_bias, seed, dropout_p, eps, rms_norm, prenorm,
        sum_dtype());
  }
};

class Norm : public torch::autograd::Function<Norm> {
 public:
  // Returns out, and the sum if that is wanted.
  static variable_list forward(
      AutogradContext* context, const Tensor& x, const OptionalTensor& residual,
      const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& x_bias,
      const NormCall& call) {
    auto [out, sum, mean, rstd] = call.run();
    // The sum stays alive as an output, so that keeping it in place of its terms costs nothing.
    const bool prenorm = call.prenorm;
    context->save_for_backward(
        {prenorm ? sum : x, prenorm ? Tensor() : or_undefined(residual), or_undefined(weight),
         or_undefined(bias), or_undefined(x_bias), or_undefined(call.seed), mean, rstd});
    // x and residual have one gradient if nothing is dropped or rounded between them.
    const bool shared = !call.seed && call.sum_dtype() == x.scalar_type();
    const int64_t given = given_bits(
        {true, residual.has_value(), weight.has_value(), bias.has_value(), x_bias.has_value()});
    keep(
        *context, given, shared, call.dropout_p, call.eps, call.rms_norm, prenorm,
        static_cast<int64_t>(x.scalar_type()), static_cast<int64_t>(call.sum_dtype()));
    context->set_materialize_grads(false);
    if (prenorm) return {out, sum};
    return {out};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found(6);  // one for each argument of forward
    if (none_defined(grads)) return found;
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &mean = saved[6], &rstd = saved[7];
    const auto options = kept(*context);
    const bool shared = options[1].toBool();
    const auto dtype = static_cast<at::ScalarType>(options[6].toInt());
    const auto sum_dtype = static_cast<at::ScalarType>(options[7].toInt());
    const Tensor grad_out = grads[0].defined()
        ? grads[0]
        : at::zeros(grads[1].sizes(), grads[1].options().dtype(dtype));
    const auto needed = needed_gradients<5>(*context, options[0].toInt());
    auto computed = needed;
    if (shared) {
      computed[0] = needed[0] || needed[1];
      computed[1] = false;
    }
    static const Overloads<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
        const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const Tensor&, const Tensor&, double, double, bool, bool, at::ScalarType,
        std::array<bool, 5>)>
        op("trifuse::dropout_add_layer_norm_backward");
    std::tie(found[0], found[1], found[2], found[3], found[4]) = run_backward(
        all_plain(grads) && all_plain(saved), op.of(x), grad_out,
        grads.size() > 1 ? optional(grads[1]) : std::nullopt, x, optional(saved[1]),
        optional(saved[2]), optional(saved[3]), optional(saved[4]), optional(saved[5]), mean, rstd,
        options[2].toDouble(), options[3].toDouble(), options[4].toBool(), options[5].toBool(),
        sum_dtype, computed);
    if (shared) found[1] = found[0];
    for (size_t i = 0; i < needed.size(); ++i)
      if (!needed[i]) found[i] = Tensor();
    return found;
  }
};

// Returns out or, with prenorm, (out, sum).
variable_list run(NormCall& call) {
  if (records(call.x, call.residual, call.weight, call.bias, call.x_bias))
    return Norm::apply(call.x, call.residual, call.weight, call.bias, call.x_bias, call);
  auto [out, sum, mean, rstd] = call.run();
  if (call.prenorm) return {out, sum};
  return {out};
}

// attention ------------------------------------------------------------------------------------

// A bound of the window.
using Bound = std::optional<c10::SymInt>;

Bound right_bound(bool is_causal) { return is_causal ? Bound(0) : Bound(); }

// With cu_seqlens, sequences are packed: query, key and value have B = 1.
struct AttentionCall {
  Tensor query, key, value;
  OptionalTensor mask, key_lengths, cu_seqlens_q, cu_seqlens_k, seed;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // read with cu_seqlens
  double dropout_p;
  std::optional<double> scale;
  bool is_causal, enable_gqa, return_lse;

  // Some valid calls don't fit: they need a broadcast or a conversion, which Python makes.
  bool fits() const {
    const at::ScalarType dtype = query.scalar_type();
    if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4 || !is_floating(dtype) ||
        key.scalar_type() != dtype || value.scalar_type() != dtype || !is_probability(dropout_p))
      return false;
    const int64_t B = query.size(0), H = query.size(1), Hkv = key.size(1), Lk = key.size(2);
    if (key.size(0) != B || key.size(3) != query.size(3) || value.size(0) != B ||
        value.size(1) != Hkv || value.size(2) != Lk ||
        (H != Hkv && (!enable_gqa || Hkv == 0 || H % Hkv != 0)))
      return false;
    if (mask) {
      const at::ScalarType type = mask->scalar_type();
      if (mask->dim() != 4 || (type != at::kBool && type != at::kFloat && type != dtype))
        return false;
      const int64_t full[4] = {B, H, query.size(2), Lk};
      for (int64_t d = 0; d < 4; ++d)
        if (mask->size(d) != 1 && mask->size(d) != full[d]) return false;
    }
    const auto integers = [](const OptionalTensor& t, int64_t count) {
      return t->dim() == 1 && t->size(0) == count &&
          (t->scalar_type() == at::kInt || t->scalar_type() == at::kLong);
    };
    if (cu_seqlens_q) {
      const int64_t boundaries = cu_seqlens_q->numel();
      return B == 1 && boundaries > 0 && integers(cu_seqlens_q, boundaries) &&
          integers(cu_seqlens_k, boundaries) && max_seqlen_q >= 0 && max_seqlen_k >= 0;
    }
    return !key_lengths || integers(key_lengths, B);
  }

  // Casts the tensors as autocast does for torch's own attention: not those in float64, nor a
  // float32 mask, which is served as it is.
  void autocast() {
    const c10::DeviceType device = query.device().type();
    if (!at::autocast::is_autocast_enabled(device)) return;
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
    const auto cast = [&](const Tensor& t) {
      return t.is_floating_point() && t.scalar_type() != at::kDouble ? t.to(dtype) : t;
    };
    query = cast(query);
    key = cast(key);
    value = cast(value);
    if (mask && mask->scalar_type() != at::kFloat) mask = cast(*mask);
  }

  int64_t longest_queries() const { return cu_seqlens_q ? max_seqlen_q : query.size(2); }
  int64_t longest_keys() const { return cu_seqlens_k ? max_seqlen_k : key.size(2); }

  std::tuple<Tensor, Tensor> run() const {
    static const Overloads<std::tuple<Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        c10::SymInt, c10::SymInt, std::optional<double>, std::optional<double>, Bound, Bound, bool,
        double)>
        op("trifuse::attention_forward");
    const OptionalTensor absent;
    return run_kernel(
        op.of(query), query, key, value, mask, absent, absent, absent, absent, key_lengths, absent,
        cu_seqlens_q, cu_seqlens_k, seed, longest_queries(), longest_keys(), scale, std::nullopt,
        Bound(), right_bound(is_causal), false, dropout_p);
  }
};

// Returns a bit for each dimension over which a mask is broadcast. The mask may be exchanged for
// another between the passes, and the op can't tell if both shapes fit.
int64_t broadcast_dims(const OptionalTensor& mask) {
  int64_t bits = 0;
  for (int64_t d = 0; mask && d < mask->dim(); ++d)
    if (mask->size(d) == 1) bits |= int64_t(1) << d;
  return bits;
}

class Attention : public torch::autograd::Function<Attention> {
 public:
  // Returns out, and the logsumexp if that is wanted.
  static variable_list forward(
      AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
      const OptionalTensor& mask, const AttentionCall& call) {
    auto [out, logsumexp] = call.run();
    context->save_for_backward(
        {query, key, value, or_undefined(mask), or_undefined(call.key_lengths),
         or_undefined(call.seed), out, logsumexp, or_undefined(call.cu_seqlens_q),
         or_undefined(call.cu_seqlens_k)});
    keep(
        *context, given_bits({true, true, true, mask.has_value()}), call.scale, call.is_causal,
        call.dropout_p, broadcast_dims(mask), call.longest_queries(), call.longest_keys());
    context->set_materialize_grads(false);
    if (call.return_lse) return {out, logsumexp};
    return {out};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found(5);  // one for each argument of forward
    if (none_defined(grads)) return found;
    const variable_list saved = context->get_saved_variables();
    const Tensor &query = saved[0], &key = saved[1], &value = saved[2], &out = saved[6],
                 &logsumexp = saved[7];
    const auto options = kept(*context);
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros(out.sizes(), out.options());
    const OptionalTensor mask = optional(saved[3]);
    TORCH_CHECK_VALUE(
        broadcast_dims(mask) == options[4].toInt(),
        "attn_mask: expected the shape that it had in the forward; got ", mask->sizes());
    const auto given = needed_gradients<4>(*context, options[0].toInt());
    const std::array<bool, 7> needed = {given[0], given[1], given[2], given[3]};
    static const Overloads<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
        const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, c10::SymInt,
        c10::SymInt, std::optional<double>, std::optional<double>, Bound, Bound, bool, double,
        std::array<bool, 7>)>
        op("trifuse::attention_backward");
    const OptionalTensor absent;
    std::tie(found[0], found[1], found[2], found[3], std::ignore, std::ignore, std::ignore) =
        run_backward(
            all_plain(grads) && all_plain(saved), op.of(query), grad_out,
            grads.size() > 1 ? optional(grads[1]) : std::nullopt, query, key, value, mask, absent,
            absent, absent, absent, optional(saved[4]), absent, optional(saved[8]),
            optional(saved[9]), optional(saved[5]), out, logsumexp, c10::SymInt(options[5].toInt()),
            c10::SymInt(options[6].toInt()), options[1].toOptional<double>(), std::nullopt, Bound(),
            right_bound(options[2].toBool()), false, options[3].toDouble(), needed);
    for (size_t i = 0; i < given.size(); ++i)
      if (!given[i]) found[i] = Tensor();
    return found;
  }
};

// Returns out or, with return_lse, (out, logsumexp).
variable_list run(AttentionCall& call) {
  if (records(call.query, call.key, call.value, call.mask))
    return Attention::apply(call.query, call.key, call.value, call.mask, call);
  auto [out, logsumexp] = call.run();
  if (call.return_lse) return {out, logsumexp};
  return {out};
}

// linear -----------------------------------------------------------------------------------------

// A call without gradients, of a weight (N, K) in either form.
struct LinearCall {
  using Activation = std::optional<c10::string_view>;

  Tensor x, weight;
  OptionalTensor bias;
  Activation activation;
  OptionalTensor up, up_bias;  // of a gated layer
  int64_t N, K;

  bool fits() const {
    if (x.dim() == 0 || x.size(-1) != K || x.numel() == 0 || N == 0) return false;
    const at::ScalarType type = x.scalar_type();
    return (type == at::kFloat || type == at::kBFloat16) &&
        (!bias || bias->scalar_type() == type) && (!up_bias || up_bias->scalar_type() == type) &&
        !records(x, weight, bias, up, up_bias);
  }

  // `limit`: the least number of rows that are not few.
  bool fits_unpacked(int64_t limit) {
    if (weight.dim() != 2 || weight.scalar_type() != x.scalar_type()) return false;
    // A gated product reads rows of the weights.
    if (up && (up->scalar_type() != x.scalar_type() || weight.stride(1) != 1 || up->stride(1) != 1))
      return false;
    N = weight.size(0);
    K = weight.size(1);
    return fits() && x.numel() / K < limit;
  }

  Tensor run_unpacked() const {
    static const auto op = find<Tensor(
        const Tensor&, const Tensor&, const OptionalTensor&, Activation, const OptionalTensor&,
        const OptionalTensor&)>("trifuse::linear_unpacked", "");
    return run(
        [&](const Tensor& rows) { return op.call(rows, weight, bias, activation, up, up_bias); });
  }

  Tensor run_packed() const {
    static const auto op = find<Tensor(
        const Tensor&, const Tensor&, int64_t, const OptionalTensor&, Activation,
        const OptionalTensor&, const OptionalTensor&)>("trifuse::linear_packed", "");
    return run([&](const Tensor& rows) {
      return op.call(rows, weight, N, bias, activation, up, up_bias);
    });
  }

 private:
  template <class F>
  Tensor run(const F& f) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (x.dim() == 2) return f(x);
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = N;
    return f(x.reshape({-1, K})).view(shape);
  }
};

// encoder_layer --------------------------------------------------------------------------------

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

struct EncoderLayerCall {
  Tensor x;
  OptionalTensor attn_mask, cu_seqlens;
  int64_t max_seqlen;
  std::vector<Tensor> weights;
  c10::List<OptionalTensor> biases, norms;
  int64_t num_heads, head_dim, intermediate_size;
  double scale;
  std::optional<c10::string_view> activation;
  bool norm_first, rms_norm;
  int64_t window_left, window_right;
  double eps1, eps2;
  OptionalTensor key_cache, value_cache;
  int64_t past = 0;
  OptionalTensor cos, sin;
  int64_t num_key_heads;
  bool first_norm, rotary_in_float32;
  double head_eps;

  // Reads what makes a layer: weights, biases, norms and options.
  bool read_layer(PyObject* const* parts) {
    return read_tuple<Tensor>(parts[0], weights) && read_tuple<OptionalTensor>(parts[1], biases) &&
        read_tuple<OptionalTensor>(parts[2], norms) && read_options(parts[3]);
  }

  bool read_options(PyObject* tuple) {
    if (!PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) != 15) return false;
    const auto at = [&](int i) { return PyTuple_GET_ITEM(tuple, i); };
    return read(at(0), num_heads) && read(at(1), head_dim) && read(at(2), intermediate_size) &&
        read(at(3), scale) && read(at(4), activation) && read(at(5), norm_first) &&
        read(at(6), rms_norm) && read(at(7), window_left) && read(at(8), window_right) &&
        read(at(9), eps1) && read(at(10), eps2) && read(at(11), num_key_heads) &&
        read(at(12), first_norm) && read(at(13), rotary_in_float32) && read(at(14), head_eps);
  }

  Tensor run() const {
    static const auto op = find<Tensor(
        const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, at::TensorList,
        const c10::List<OptionalTensor>&, const c10::List<OptionalTensor>&, int64_t, int64_t,
        int64_t, double, std::optional<c10::string_view>, bool, bool, int64_t, int64_t, double,
        double, const OptionalTensor&, const OptionalTensor&, int64_t, const OptionalTensor&,
        const OptionalTensor&, std::optional<int64_t>, bool, bool, double)>(
        "trifuse::encoder_layer", "");
    return run_kernel(
        op, x, attn_mask, cu_seqlens, max_seqlen, at::TensorList(weights), biases, norms, num_heads,
        head_dim, intermediate_size, scale, activation, norm_first, rms_norm, window_left,
        window_right, eps1, eps2, key_cache, value_cache, past, cos, sin,
        std::optional<int64_t>(num_key_heads), first_norm, rotary_in_float32, head_eps);
  }
};

// The sum of rows of embedding tables, and its norm.
struct EmbeddingCall {
  std::vector<Tensor> ids, tables;
  bool last_is_residual;  // the last rows are added in the norm, whose sum is not rounded
  NormCall norm{};

  Tensor sum(size_t first, size_t count) const {
    static const auto op =
        find<Tensor(at::TensorList, at::TensorList)>("trifuse::embedding_sum", "");
    const auto part = [&](const std::vector<Tensor>& all) {
      return at::TensorList(all).slice(first, count);
    };
    return run_kernel(op, part(ids), part(tables));
  }

  Tensor run() {
    TORCH_CHECK_VALUE(ids.size() == tables.size(), "tables: expected ids for each");
    const size_t last = tables.size() - 1;
    norm.x = sum(0, last_is_residual ? last : tables.size());
    if (last_is_residual) norm.residual = sum(last, 1).expand(norm.x.sizes());
    TORCH_CHECK_VALUE(norm.fits(), "weight, bias: expected one number for each feature");
    return std::get<0>(norm.run());
  }
};

// Functions of the module ----------------------------------------------------------------------

PyObject* wrap(variable_list results) {
  if (results.size() == 1) return THPVariable_Wrap(std::move(results[0]));
  THPObjectPtr pair(PyTuple_New(2));
  if (!pair) throw python_error();
  for (int i = 0; i < 2; ++i) {
    PyObject* each = THPVariable_Wrap(std::move(results[i]));
    if (!each) throw python_error();
    PyTuple_SET_ITEM(pair.get(), i, each);
  }
  return pair.release();
}

// Runs a call whose arguments have been read. Some values, such as those of lengths, are checked by
// the op alone, which throws one of four types of error; the checks in Python then report it.
template <class Run>
PyObject* run_or_decline(const Run& run) {
  variable_list results;
  try {
    const pybind11::gil_scoped_release no_gil;
    results = run();
  } catch (const c10::ValueError&) {
    Py_RETURN_NONE;
  } catch (const c10::TypeError&) {
    Py_RETURN_NONE;
  } catch (const c10::IndexError&) {
    Py_RETURN_NONE;
  } catch (const c10::NotImplementedError&) {
    Py_RETURN_NONE;
  }
  return wrap(std::move(results));
}

// `like` is a tensor on the call's device.
template <class Call>
PyObject* draw_and_run(Call& call, const Tensor& like) {
  call.autocast();
  if (!call.fits()) Py_RETURN_NONE;
  return run_or_decline([&] {
    call.seed = draw_seed(call.dropout_p, like);
    return run(call);
  });
}

void check_count(Py_ssize_t given, Py_ssize_t expected) {
  TORCH_CHECK_TYPE(given == expected, "expected ", expected, " arguments; got ", given);
}

PyObject* dropout_add_layer_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 10);
  NormCall call;
  bool training;
  const Tensor& x = call.x;
  if (!no_mode_but_autocast_applies() || !read_anywhere(args[0], call.x) ||
      !read_beside(x, args[1], call.residual) || !read_beside(x, args[2], call.weight) ||
      !read_beside(x, args[3], call.bias) || !read(args[4], call.dropout_p) ||
      !read(args[5], call.eps) || !read(args[6], training) || !read(args[7], call.prenorm) ||
      !read_beside(x, args[8], call.x_bias) || !read(args[9], call.rms_norm) ||
      !is_probability(call.dropout_p))
    Py_RETURN_NONE;
  if (!training) call.dropout_p = 0;
  return draw_and_run(call, x);
  END_HANDLE_TH_ERRORS
}

PyObject* attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 10);
  AttentionCall call;
  const Tensor& query = call.query;
  if (!no_mode_but_autocast_applies() || !read_anywhere(args[0], call.query) ||
      !read_beside(query, args[1], call.key) || !read_beside(query, args[2], call.value) ||
      !read_beside(query, args[3], call.mask) || !read(args[4], call.dropout_p) ||
      !read(args[5], call.is_causal) || !read(args[6], call.scale) ||
      !read(args[7], call.enable_gqa) || !read_beside(query, args[8], call.key_lengths) ||
      !read(args[9], call.return_lse))
    Py_RETURN_NONE;
  return draw_and_run(call, query);
  END_HANDLE_TH_ERRORS
}

PyObject* packed_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 11);
  AttentionCall call;
  const Tensor& query = call.query;
  if (!no_mode_but_autocast_applies() || !read_anywhere(args[0], call.query) ||
      !read_beside(query, args[1], call.key) || !read_beside(query, args[2], call.value) ||
      !read_beside(query, args[3], call.cu_seqlens_q.emplace()) ||
      !read_beside(query, args[4], call.cu_seqlens_k.emplace()) ||
      !read(args[5], call.max_seqlen_q) || !read(args[6], call.max_seqlen_k) ||
      !read(args[7], call.dropout_p) || !read(args[8], call.is_causal) ||
      !read(args[9], call.scale) || !read(args[10], call.enable_gqa))
    Py_RETURN_NONE;
  call.return_lse = false;
  return draw_and_run(call, query);
  END_HANDLE_TH_ERRORS
}

PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 7);
  LinearCall call;
  int64_t limit;
  if (!no_mode_applies() || !read(args[0], call.x) || !read(args[1], call.weight) ||
      !read(args[2], call.bias) || !read(args[3], call.activation) || !read(args[4], call.up) ||
      !read(args[5], call.up_bias) || !read(args[6], limit) || !call.fits_unpacked(limit))
    Py_RETURN_NONE;
  return run_or_decline([&] { return variable_list{call.run_unpacked()}; });
  END_HANDLE_TH_ERRORS
}

PyObject* linear_packed(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 8);
  LinearCall call;
  if (!no_mode_applies() || !read(args[0], call.x) || !read(args[1], call.weight) ||
      !read(args[2], call.N) || !read(args[3], call.K) || !read(args[4], call.bias) ||
      !read(args[5], call.activation) || !read(args[6], call.up) || !read(args[7], call.up_bias) ||
      !call.fits())
    Py_RETURN_NONE;
  return run_or_decline([&] { return variable_list{call.run_packed()}; });
  END_HANDLE_TH_ERRORS
}

PyObject* encoder_layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 13);
  EncoderLayerCall call;
  if (!no_mode_applies() || !read(args[0], call.x) || !read(args[1], call.attn_mask) ||
      !read(args[2], call.cu_seqlens) || !read(args[3], call.max_seqlen) ||
      !call.read_layer(args + 4) || !read(args[8], call.key_cache) ||
      !read(args[9], call.value_cache) || !read(args[10], call.past) || !read(args[11], call.cos) ||
      !read(args[12], call.sin) ||
      records(call.x, call.attn_mask, call.key_cache, call.value_cache, call.cos, call.sin))
    Py_RETURN_NONE;
  return run_or_decline([&] { return variable_list{call.run()}; });
  END_HANDLE_TH_ERRORS
}

PyObject* encoder_layers(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 5);
  EncoderLayerCall first;
  if (!no_mode_applies() || !read(args[0], first.x) || !read(args[1], first.attn_mask) ||
      !read(args[2], first.cu_seqlens) || !read(args[3], first.max_seqlen) ||
      records(first.x, first.attn_mask))
    Py_RETURN_NONE;
  TORCH_CHECK_TYPE(PyTuple_CheckExact(args[4]), "layers: expected a tuple");
  std::vector<EncoderLayerCall> calls;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[4]); ++i) {
    PyObject* layer = PyTuple_GET_ITEM(args[4], i);
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(layer) && PyTuple_GET_SIZE(layer) == 4,
        "layers: expected tuples (weights, biases, norms, options)");
    PyObject* const parts[] = {
        PyTuple_GET_ITEM(layer, 0), PyTuple_GET_ITEM(layer, 1), PyTuple_GET_ITEM(layer, 2),
        PyTuple_GET_ITEM(layer, 3)};
    EncoderLayerCall call;
    call.attn_mask = first.attn_mask;
    call.cu_seqlens = first.cu_seqlens;
    call.max_seqlen = first.max_seqlen;
    if (!call.read_layer(parts)) Py_RETURN_NONE;
    calls.push_back(std::move(call));
  }
  return run_or_decline([&] {
    Tensor x = first.x;
    for (EncoderLayerCall& call : calls) {
      call.x = std::move(x);
      x = call.run();
    }
    return variable_list{x};
  });
  END_HANDLE_TH_ERRORS
}

PyObject* embed(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 6);
  EmbeddingCall call;
  if (!no_mode_applies() || !read_tuple<Tensor>(args[0], call.ids) ||
      !read_tuple<Tensor>(args[1], call.tables) || call.tables.size() < 2 ||
      !read(args[2], call.norm.weight) || !read(args[3], call.norm.bias) ||
      !read(args[4], call.norm.eps) || !read(args[5], call.last_is_residual) ||
      records(call.norm.weight, call.norm.bias))
    Py_RETURN_NONE;
  return run_or_decline([&] { return variable_list{call.run()}; });
  END_HANDLE_TH_ERRORS
}

PyObject* plain_call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  bool plain = no_mode_applies();
  for (Py_ssize_t i = 0; i < count && plain; ++i) {
    OptionalTensor t;
    plain = read(args[i], t);
  }
  return PyBool_FromLong(plain);
  END_HANDLE_TH_ERRORS
}

// Returns whether a dictionary has no entry for a key, or an empty one.
bool lacks(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (!value && PyErr_Occurred()) throw python_error();
  return !value || (PyDict_Check(value) && PyDict_Size(value) == 0);
}

// Returns whether all hooks in a dictionary are functions with these globals.
bool hooks_are_of(PyObject* hooks, PyObject* globals) {
  PyObject *name, *hook;
  Py_ssize_t position = 0;
  while (PyDict_Next(hooks, &position, &name, &hook))
    if (!PyFunction_Check(hook) || PyFunction_GET_GLOBALS(hook) != globals) return false;
  return true;
}

// Between two calls the weights of a model have passed through the caches, so each module is read
// from memory. The passes over all of them let these reads overlap.
PyObject* modules_as_planned(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2);
  static PyObject* training = PyUnicode_InternFromString("training");
  static PyObject* hooks = PyUnicode_InternFromString("_forward_hooks");
  // Backward hooks do not matter: no gradient is recorded.
  static PyObject* watching[] = {
      PyUnicode_InternFromString("_forward_pre_hooks"),
      PyUnicode_InternFromString("forward"),
  };
  TORCH_CHECK_TYPE(PyTuple_CheckExact(args[0]), "modules: expected a tuple");
  PyObject* idle = args[1];
  TORCH_CHECK_TYPE(idle == Py_None || PyDict_Check(idle), "idle: expected a dictionary or None");
  struct Entry {
    PyObject *siblings, *name, *module, *type;
    THPObjectPtr own;  // the module's attributes
  };
  std::vector<Entry> entries(PyTuple_GET_SIZE(args[0]));
  for (size_t i = 0; i < entries.size(); ++i) {
    PyObject* entry = PyTuple_GET_ITEM(args[0], i);
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 4 &&
            PyDict_Check(PyTuple_GET_ITEM(entry, 0)),
        "modules: expected tuples (siblings, name, module, class)");
    Entry& e = entries[i];
    e.siblings = PyTuple_GET_ITEM(entry, 0);
    e.name = PyTuple_GET_ITEM(entry, 1);
    e.module = PyTuple_GET_ITEM(entry, 2);
    e.type = PyTuple_GET_ITEM(entry, 3);
    __builtin_prefetch(e.module);
  }
  for (Entry& e : entries) {
    PyObject* found = PyDict_GetItemWithError(e.siblings, e.name);
    if (!found && PyErr_Occurred()) throw python_error();
    if (found != e.module || reinterpret_cast<PyObject*>(Py_TYPE(e.module)) != e.type)
      Py_RETURN_FALSE;
    e.own = PyObject_GenericGetDict(e.module, nullptr);
    if (!e.own) throw python_error();
    __builtin_prefetch(e.own.get());
  }
  for (Entry& e : entries) {
    if (PyDict_GetItemWithError(e.own.get(), training) != Py_False) Py_RETURN_FALSE;
    if (!lacks(e.own.get(), hooks) &&
        !hooks_are_of(PyDict_GetItemWithError(e.own.get(), hooks), idle))
      Py_RETURN_FALSE;
    for (PyObject* key : watching)
      if (!lacks(e.own.get(), key)) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* values_as_planned(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1);
  TORCH_CHECK_TYPE(PyTuple_CheckExact(args[0]), "values: expected a tuple");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); ++i) {
    PyObject* entry = PyTuple_GET_ITEM(args[0], i);
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 3,
        "values: expected tuples (dictionary or class, key, value)");
    PyObject *owner = PyTuple_GET_ITEM(entry, 0), *key = PyTuple_GET_ITEM(entry, 1);
    if (PyType_Check(owner)) {
      const THPObjectPtr found(PyObject_GetAttr(owner, key));
      if (!found && !PyErr_ExceptionMatches(PyExc_AttributeError)) throw python_error();
      PyErr_Clear();
      if (found.get() != PyTuple_GET_ITEM(entry, 2)) Py_RETURN_FALSE;
      continue;
    }
    TORCH_CHECK_TYPE(PyDict_Check(owner), "values: expected a dictionary or a class");
    PyObject* found = PyDict_GetItemWithError(owner, key);
    if (!found && PyErr_Occurred()) throw python_error();
    if (found != PyTuple_GET_ITEM(entry, 2)) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyCFunction function(_PyCFunctionFast f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

}  // namespace
}  // namespace fast_path

void add_fast_paths(pybind11::module_& m) {
  using namespace fast_path;
  static PyMethodDef functions[] = {
      {"attention", function(&attention), METH_FASTCALL,
       "The results of a plain and valid call, or None for any other"},
      {"packed_attention", function(&packed_attention), METH_FASTCALL,
       "The result of a plain and valid call on packed sequences, or None for any other"},
      {"dropout_add_layer_norm", function(&dropout_add_layer_norm), METH_FASTCALL,
       "The results of a plain and valid call, or None for any other"},
      {"linear", function(&linear), METH_FASTCALL,
       "The result of a plain and valid call of few rows without gradients, or None for any other"},
      {"linear_packed", function(&linear_packed), METH_FASTCALL,
       "The result of a plain and valid call without gradients, or None for any other"},
      {"encoder_layer", function(&encoder_layer), METH_FASTCALL,
       "The result of a plain and valid call without gradients, or None for any other"},
      {"encoder_layers", function(&encoder_layers), METH_FASTCALL,
       "The result of layers one after another, or None as encoder_layer"},
      {"embed", function(&embed), METH_FASTCALL,
       "The norm of a sum of embeddings, without gradients, or None for a call that is not plain"},
      {"modules_as_planned", function(&modules_as_planned), METH_FASTCALL,
       "Whether modules, as tuples (siblings, name, module, class), have the name and class that "
       "they had, evaluate, and run nothing but their class's forward and hooks with the globals "
       "that come second"},
      {"values_as_planned", function(&values_as_planned), METH_FASTCALL,
       "Whether dictionaries or classes, as tuples (owner, key, value), have these very values"},
      {"plain_call", function(&plain_call), METH_FASTCALL,
       "Whether a call on these tensors may skip the checks in Python"},
      {}};
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw pybind11::error_already_set();
}

}  // namespace trifuse
