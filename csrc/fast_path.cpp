// Calls of operators that skip the checks in Python, because they are plain and valid.
//
// Checks in Python take longer than the computation of a small call. A function in this file reads
// the caller's arguments. If they are plain and fit each other, it runs the op. Otherwise it
// returns None, and the operator's checks in Python report what is wrong or convert what the op
// does not take. So each message exists only once, in Python. A call is plain if its tensors are
// dense, on the CPU, and of the classes Tensor or Parameter, and if no mode or transform applies.
//
// With gradients a call is one node, a torch::autograd::Function. Its backward runs the backward
// op. If that must itself be differentiated or batched, torch's dispatcher runs the rules that are
// registered for the op (pytorch_ext/ops/_operator.py), as for any other call.

#include "fast_path.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/autograd.h>
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

// Returns whether no mode or transform other than autocast applies to this thread's calls. Each of
// them changes the thread's dispatch keys, except modes of __torch_function__.
bool no_mode_but_autocast_applies() {
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

bool autocast_is_off() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.isSupersetOf(kAutocast);
}

bool no_mode_applies() { return no_mode_but_autocast_applies() && autocast_is_off(); }

// Returns whether a tensor is dense, on the CPU or an NVIDIA GPU, without a tangent, and not a
// wrapper or a view that its memory alone does not describe.
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

// Reads an argument that must be a plain tensor on the device of a tensor that was read before.
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

// Runs an op's kernel and skips all modes and transforms. The caller has checked that none applies,
// and handles derivatives and autocast.
template <class Op, class... Args>
decltype(auto) run_kernel(const Op& op, const Args&... args) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  return op.call(args...);
}

// Runs a backward op; only its kernel, if no derivative or transform of it is needed.
template <class Op, class... Args>
decltype(auto) run_backward(bool plain, const Op& op, const Args&... args) {
  if (plain && !at::GradMode::is_enabled() && no_mode_but_autocast_applies())
    return run_kernel(op, args...);
  return op.call(args...);
}

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }
Tensor or_undefined(const OptionalTensor& t) { return t.value_or(Tensor()); }

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

// A Function keeps its options in one entry, because each entry costs a lookup by name.
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

  void autocast() {}  // autocast does not change the norm's tensors

  // Some valid calls don't fit, because they need a conversion, which Python does.
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

using NormBackward = Overloads<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const Tensor&, const Tensor&, double, double, bool, bool, at::ScalarType, std::array<bool, 5>)>;

const NormBackward& norm_backward_op() {
  static const NormBackward op("trifuse::dropout_add_layer_norm_backward");
  return op;
}

class Norm : public torch::autograd::Function<Norm> {
 public:
  // Returns out, and the sum if it is requested.
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
    std::tie(found[0], found[1], found[2], found[3], found[4]) = run_backward(
        all_plain(grads) && all_plain(saved), norm_backward_op().of(x), grad_out,
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

// Returns whether a mask needs no conversion; `full` is the shape of the scores.
bool mask_fits(const Tensor& mask, at::ScalarType dtype, const std::array<int64_t, 4>& full) {
  const at::ScalarType type = mask.scalar_type();
  if (mask.dim() != 4 || (type != at::kBool && type != at::kFloat && type != dtype)) return false;
  for (int64_t d = 0; d < 4; ++d)
    if (mask.size(d) != 1 && mask.size(d) != full[d]) return false;
  return true;
}

bool integers_fit(const Tensor& t, int64_t count) {
  return t.dim() == 1 && t.size(0) == count &&
      (t.scalar_type() == at::kInt || t.scalar_type() == at::kLong);
}

// With cu_seqlens, sequences are packed: query, key and value have B = 1.
struct AttentionCall {
  Tensor query, key, value;
  OptionalTensor mask, key_lengths, cu_seqlens_q, cu_seqlens_k, seed;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // read with cu_seqlens
  double dropout_p;
  std::optional<double> scale;
  bool is_causal, enable_gqa, return_lse;

  // Some valid calls don't fit, because they need a broadcast or a conversion, which Python does.
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
    if (mask && !mask_fits(*mask, dtype, {B, H, query.size(2), Lk})) return false;
    if (cu_seqlens_q) {
      const int64_t boundaries = cu_seqlens_q->numel();
      return B == 1 && boundaries > 0 && integers_fit(*cu_seqlens_q, boundaries) &&
          integers_fit(*cu_seqlens_k, boundaries) && max_seqlen_q >= 0 && max_seqlen_k >= 0;
    }
    return !key_lengths || integers_fit(*key_lengths, B);
  }

  // Casts the tensors as autocast does for torch's own attention, except those in float64 and a
  // float32 mask, which the op takes unchanged.
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

// Returns a bit for each dimension over which a mask is broadcast. The mask may be replaced between
// the passes, and the op can't detect that if both shapes fit.
int64_t broadcast_dims(const OptionalTensor& mask) {
  int64_t bits = 0;
  for (int64_t d = 0; mask && d < mask->dim(); ++d)
    if (mask->size(d) == 1) bits |= int64_t(1) << d;
  return bits;
}

using AttentionBackward =
    Overloads<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
        const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, c10::SymInt,
        c10::SymInt, std::optional<double>, std::optional<double>, Bound, Bound, bool, double,
        std::array<bool, 7>)>;

const AttentionBackward& attention_backward_op() {
  static const AttentionBackward op("trifuse::attention_backward");
  return op;
}

class Attention : public torch::autograd::Function<Attention> {
 public:
  // Returns out, and the logsumexp if it is requested.
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
    const OptionalTensor absent;
    std::tie(found[0], found[1], found[2], found[3], std::ignore, std::ignore, std::ignore) =
        run_backward(
            all_plain(grads) && all_plain(saved), attention_backward_op().of(query), grad_out,
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

// A call without gradients, with a weight (N, K), packed or not.
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

  // `limit`: the least number of rows that does not count as few.
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

  // Reads the parts of a layer: weights, biases, norms and options.
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

// embedded_rows --------------------------------------------------------------------------------

// Rows of embedding tables in training: the sum of those of all tables except the last, and those
// of the last, which the norm adds as its residual.
class EmbeddedRows : public torch::autograd::Function<EmbeddedRows> {
 public:
  // `ids` have the sum's shape, or hold one id for all rows. Rows of `paddings` get no gradient.
  static variable_list forward(
      AutogradContext* context, at::TensorList tables, const std::vector<Tensor>& ids,
      const std::vector<int64_t>& paddings) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Tensor sum = at::embedding(tables[0], ids[0]);
    for (size_t i = 1; i + 1 < tables.size(); ++i) sum.add_(at::embedding(tables[i], ids[i]));
    const Tensor last = at::embedding(tables.back(), ids.back());
    context->save_for_backward(ids);
    c10::List<int64_t> heights;
    for (const Tensor& table : tables) heights.push_back(table.size(0));
    keep(
        *context, heights, c10::List<int64_t>(c10::ArrayRef<int64_t>(paddings)),
        sum.scalar_type() == at::kBFloat16 || sum.scalar_type() == at::kHalf);
    context->set_materialize_grads(false);
    return {sum, last};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list ids = context->get_saved_variables();
    const auto options = kept(*context);
    const auto heights = options[0].toIntVector(), paddings = options[1].toIntVector();
    const bool plain = !at::GradMode::is_enabled() && no_mode_but_autocast_applies() &&
        all_plain(grads) && all_plain(ids);
    variable_list found(ids.size() + 2);  // one for each table, for the ids and the paddings
    for (size_t i = 0; i < ids.size(); ++i) {
      const Tensor& grad = grads[i + 1 == ids.size()];
      if (!grad.defined() || !context->needs_input_grad(i)) continue;
      found[i] = plain && options[2].toBool() && heights[i] <= kLow &&
              heights[i] * ids[i].numel() <= kMost && paddings[i] < 0
          ? add_rows_by_product(grad, ids[i], heights[i])
          : at::embedding_dense_backward(
                grad, ids[i].expand(grad.sizes().slice(0, grad.dim() - 1)), heights[i], paddings[i],
                false);
    }
    return found;
  }

 private:
  // torch sorts the ids, which takes a dozen launches. For a small table, one product with a matrix
  // of zeros and ones adds up the rows, if that matrix takes no more than 32 MiB.
  static constexpr int64_t kLow = 1024, kMost = 1 << 24;

  static Tensor add_rows_by_product(const Tensor& grad, const Tensor& ids, int64_t height) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
    Tensor rows = grad.reshape({-1, grad.size(-1)});
    if (ids.numel() == 1) rows = rows.sum(0, /*keepdim=*/true);
    const Tensor chosen = at::zeros({height, rows.size(0)}, rows.options());
    return at::mm(chosen.scatter_(0, ids.reshape({1, -1}), 1), rows);
  }
};

// post_norm_layers -----------------------------------------------------------------------------

// The activations of a feed-forward network, by their names in Python.
enum class ActivationKind : int64_t { Gelu, GeluTanh, Relu, Silu };

std::optional<ActivationKind> activation_of(std::optional<c10::string_view> name) {
  if (name == "gelu") return ActivationKind::Gelu;
  if (name == "gelu_tanh") return ActivationKind::GeluTanh;
  if (name == "relu") return ActivationKind::Relu;
  if (name == "silu") return ActivationKind::Silu;
  return {};
}

Tensor activate(const Tensor& x, ActivationKind activation) {
  switch (activation) {
    case ActivationKind::Gelu: return at::gelu(x);
    case ActivationKind::GeluTanh: return at::gelu(x, "tanh");
    case ActivationKind::Relu: return at::relu(x);
    case ActivationKind::Silu: return at::silu(x);
  }
  TORCH_INTERNAL_ASSERT(false);
}

// `x` is the input of the activation.
Tensor activate_backward(const Tensor& grad, const Tensor& x, ActivationKind activation) {
  switch (activation) {
    case ActivationKind::Gelu: return at::gelu_backward(grad, x);
    case ActivationKind::GeluTanh: return at::gelu_backward(grad, x, "tanh");
    case ActivationKind::Relu: return at::threshold_backward(grad, x, 0);
    case ActivationKind::Silu: return at::silu_backward(grad, x);
  }
  TORCH_INTERNAL_ASSERT(false);
}

// A layer of an encoder whose weights may change and whose products are torch's:
//   h = norm1(x + dropout(attention(x) Woᵀ + bo))
//   out = norm2(h + dropout(f(h Wuᵀ + bu) Wdᵀ + bd))
//
// On a GPU, if Python and autograd call the parts of such a layer one by one, the GPU waits for the
// host: there are about forty launches for each layer and step. Here they follow one another in
// C++. The whole layer is one node, which adds up the gradients of h and of x within the products
// that compute them.
struct PostNormLayer {
  // The indices of the tensors that may have gradients. Each weight's bias is 6 places after it.
  enum { kX, kQuery, kKey, kValue, kOutput, kUp, kDown, kNorms = 13, kTensors = 17 };
  static constexpr int kBias = 6;

  std::array<Tensor, kTensors> tensors;  // undefined if there is none
  OptionalTensor mask, cu_seqlens;
  int64_t longest, heads;
  double scale;
  ActivationKind activation;
  std::array<double, 2> eps;
  std::array<double, 3> dropout_p;  // of the attention's weights, and before each norm
  std::array<OptionalTensor, 3> seeds;

  // Everything that the backward reads besides the arguments. Products and norms have one row for
  // each token; the attention's tensors have four dimensions.
  struct Values {
    Tensor query, key, value, attended, logsumexp, projected, mean1, rstd1, normed, up, activated,
        down, mean2, rstd2;
  };

  const Tensor& x() const { return tensors[kX]; }
  int64_t features() const { return x().size(2); }

  Tensor rows_of(const Tensor& t) const { return t.reshape({x().size(0) * x().size(1), -1}); }

  // Views rows as (B, H, L, E), or the reverse.
  Tensor heads_of(const Tensor& rows) const {
    return rows.view({x().size(0), x().size(1), heads, -1}).transpose(1, 2);
  }
  Tensor join_heads(const Tensor& t) const { return rows_of(t.transpose(1, 2)); }

  // Returns a transposed view of a matrix; t() would take three calls of the dispatcher.
  static Tensor transposed(const Tensor& t) {
    return t.as_strided({t.size(1), t.size(0)}, {t.stride(1), t.stride(0)}, t.storage_offset());
  }

  // at::linear would make several other calls before these.
  Tensor product(const Tensor& rows, int weight) const {
    const Tensor &bias = tensors[weight + kBias], w = transposed(tensors[weight]);
    return bias.defined() ? at::addmm(bias, rows, w) : at::mm(rows, w);
  }

  AttentionCall attention_call(const Tensor& query, const Tensor& key, const Tensor& value) const {
    AttentionCall call;
    call.query = query;
    call.key = key;
    call.value = value;
    call.mask = mask;
    call.cu_seqlens_q = call.cu_seqlens_k = cu_seqlens;
    call.max_seqlen_q = call.max_seqlen_k = longest;
    call.dropout_p = dropout_p[0];
    call.scale = scale;
    call.is_causal = call.enable_gqa = call.return_lse = false;
    call.seed = seeds[0];
    return call;
  }

  // `which`: 0 or 1.
  NormCall norm_call(const Tensor& rows, const Tensor& residual, int which) const {
    NormCall call;
    call.x = rows;
    call.residual = residual;
    call.weight = optional(tensors[kNorms + 2 * which]);
    call.bias = optional(tensors[kNorms + 2 * which + 1]);
    call.seed = seeds[1 + which];
    call.dropout_p = dropout_p[1 + which];
    call.eps = eps[which];
    call.rms_norm = call.prenorm = false;
    return call;
  }

  bool fits() const {
    const at::ScalarType dtype = x().scalar_type();
    if (x().dim() != 3 || x().numel() == 0 || !x().is_contiguous() || heads <= 0) return false;
    const auto fits_linear = [&](int weight, int64_t out, int64_t in) {
      const Tensor &w = tensors[weight], &b = tensors[weight + kBias];
      return w.dim() == 2 && w.size(0) == out && w.size(1) == in && w.scalar_type() == dtype &&
          (!b.defined() || (b.dim() == 1 && b.size(0) == out && b.scalar_type() == dtype));
    };
    if (tensors[kQuery].dim() != 2 || tensors[kUp].dim() != 2) return false;
    const int64_t N = features(), attended = tensors[kQuery].size(0), wide = tensors[kUp].size(0);
    if (attended % heads || !fits_linear(kQuery, attended, N) || !fits_linear(kKey, attended, N) ||
        !fits_linear(kValue, attended, N) || !fits_linear(kOutput, N, attended) ||
        !fits_linear(kUp, wide, N) || !fits_linear(kDown, N, wide))
      return false;
    for (int which : {0, 1})
      if (!norm_call(x(), x(), which).fits() || !is_probability(dropout_p[1 + which])) return false;
    const int64_t B = x().size(0), L = x().size(1);
    return is_probability(dropout_p[0]) && (!mask || mask_fits(*mask, dtype, {B, heads, L, L})) &&
        (!cu_seqlens ||
         (B == 1 && longest >= 0 && cu_seqlens->numel() > 0 &&
          integers_fit(*cu_seqlens, cu_seqlens->numel())));
  }

  // Computes the output without a graph. The caller has disabled autograd and autocast. Values that
  // no backward reads are released as soon as they have been used, unless `all_kept`.
  Tensor compute(Values& v, bool all_kept) const {
    const Tensor rows = rows_of(x());
    v.query = heads_of(product(rows, kQuery));
    v.key = heads_of(product(rows, kKey));
    v.value = heads_of(product(rows, kValue));
    std::tie(v.attended, v.logsumexp) = attention_call(v.query, v.key, v.value).run();
    v.projected = product(join_heads(v.attended), kOutput);
    std::tie(v.normed, std::ignore, v.mean1, v.rstd1) = norm_call(v.projected, rows, 0).run();
    if (!all_kept) v = Values{.normed = v.normed};
    v.up = product(v.normed, kUp);
    v.activated = activate(v.up, activation);
    if (!all_kept) v.up.reset();
    v.down = product(v.activated, kDown);
    Tensor out;
    std::tie(out, std::ignore, v.mean2, v.rstd2) = norm_call(v.down, v.normed, 1).run();
    return out.view(x().sizes());
  }

  // Computes the same with a graph, for derivatives of the backward.
  Tensor record() const {
    const Tensor rows = rows_of(x());
    const auto norm = [&](const Tensor& t, const Tensor& residual, int which) {
      NormCall call = norm_call(t, residual, which);
      return fast_path::run(call)[0];
    };
    const auto linear = [&](const Tensor& t, int weight) {
      return at::linear(t, tensors[weight], optional(tensors[weight + kBias]));
    };
    AttentionCall call = attention_call(
        heads_of(linear(rows, kQuery)), heads_of(linear(rows, kKey)),
        heads_of(linear(rows, kValue)));
    const Tensor attended = join_heads(fast_path::run(call)[0]);
    const Tensor normed = norm(linear(attended, kOutput), rows, 0);
    const Tensor activated = activate(linear(normed, kUp), activation);
    return norm(linear(activated, kDown), normed, 1).view(x().sizes());
  }
};

class PostNorm : public torch::autograd::Function<PostNorm> {
  using Layer = PostNormLayer;
  using Found = std::array<Tensor, Layer::kTensors>;  // gradients of the layer's tensors
  using Needed = std::array<bool, Layer::kTensors>;

 public:
  // `given` holds the layer's tensors that are defined.
  static variable_list forward(
      AutogradContext* context, at::TensorList /*given*/, const Layer& layer) {
    Layer::Values v;
    Tensor out;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      out = layer.compute(v, true);
    }
    variable_list saved(layer.tensors.begin(), layer.tensors.end());
    for (const Tensor& each :
         {v.query, v.key, v.value, v.attended, v.logsumexp, v.projected, v.mean1, v.rstd1, v.normed,
          v.up, v.activated, v.down, v.mean2, v.rstd2})
      saved.push_back(each);
    for (const OptionalTensor* each :
         {&layer.mask, &layer.cu_seqlens, &layer.seeds[0], &layer.seeds[1], &layer.seeds[2]})
      saved.push_back(or_undefined(*each));
    int64_t given = 0;
    for (int i = 0; i < Layer::kTensors; ++i) given |= int64_t(layer.tensors[i].defined()) << i;
    context->save_for_backward(std::move(saved));
    keep(
        *context, given, layer.longest, layer.heads, layer.scale,
        static_cast<int64_t>(layer.activation), layer.eps[0], layer.eps[1], layer.dropout_p[0],
        layer.dropout_p[1], layer.dropout_p[2], broadcast_dims(layer.mask));
    context->set_materialize_grads(false);
    return {out};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto options = kept(*context);
    const int64_t given = options[0].toInt();
    const Needed needed = needed_gradients<Layer::kTensors>(*context, given);
    Found found;
    if (grads[0].defined()) {
      const variable_list saved = context->get_saved_variables();
      Layer layer;
      Layer::Values v;
      read_saved(saved, options, layer, v);
      const bool plain = !at::GradMode::is_enabled() && no_mode_but_autocast_applies() &&
          all_plain(grads) && all_plain(saved);
      found = plain ? differentiate(layer, v, grads[0], needed)
                    : differentiate_recorded(layer, grads[0], needed);
    }
    variable_list results;  // one for each tensor that was given, and one for the layer
    for (int i = 0; i < Layer::kTensors; ++i)
      if (given >> i & 1) results.push_back(needed[i] ? found[i] : Tensor());
    results.emplace_back();
    return results;
  }

 private:
  static void read_saved(
      const variable_list& saved, c10::ArrayRef<c10::IValue> options, Layer& layer,
      Layer::Values& v) {
    const Tensor* next = saved.data();
    for (Tensor& each : layer.tensors) each = *next++;
    for (Tensor* each :
         {&v.query, &v.key, &v.value, &v.attended, &v.logsumexp, &v.projected, &v.mean1, &v.rstd1,
          &v.normed, &v.up, &v.activated, &v.down, &v.mean2, &v.rstd2})
      *each = *next++;
    for (OptionalTensor* each :
         {&layer.mask, &layer.cu_seqlens, &layer.seeds[0], &layer.seeds[1], &layer.seeds[2]})
      *each = optional(*next++);
    layer.longest = options[1].toInt();
    layer.heads = options[2].toInt();
    layer.scale = options[3].toDouble();
    layer.activation = static_cast<ActivationKind>(options[4].toInt());
    layer.eps = {options[5].toDouble(), options[6].toDouble()};
    layer.dropout_p = {options[7].toDouble(), options[8].toDouble(), options[9].toDouble()};
    TORCH_CHECK_VALUE(
        broadcast_dims(layer.mask) == options[10].toInt(),
        "attn_mask: expected the shape that it had in the forward; got ", layer.mask->sizes());
  }

  // Computes the gradients with kernels only. Products add their result to the gradient that flows
  // through the residual. So that gradient is rounded only once. No other code holds its tensor.
  static Found differentiate(
      const Layer& layer, const Layer::Values& v, const Tensor& grad_out, const Needed& needed) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
    Found found;
    const auto& t = layer.tensors;
    const auto find_weight = [&](int weight, const Tensor& grad, const Tensor& rows) {
      if (needed[weight]) found[weight] = at::mm(Layer::transposed(grad), rows);
      if (needed[weight + Layer::kBias]) found[weight + Layer::kBias] = grad.sum(0);
    };
    // Whether gradients are needed below each value of the forward, from the first to the last.
    const auto of_linear = [&](int weight) {
      return needed[weight] || needed[weight + Layer::kBias];
    };
    const bool below_attended = needed[Layer::kX] || of_linear(Layer::kQuery) ||
        of_linear(Layer::kKey) || of_linear(Layer::kValue);
    const bool below_projected = below_attended || of_linear(Layer::kOutput);
    const bool below_normed = below_projected || needed[Layer::kNorms] || needed[Layer::kNorms + 1];
    const bool below_up = below_normed || of_linear(Layer::kUp);
    const bool below_down = below_up || of_linear(Layer::kDown);

    const Tensor rows = layer.rows_of(layer.x());
    const auto [grad_down, grad_normed] = differentiate_norm(
        layer.norm_call(v.down, v.normed, 1), v.mean2, v.rstd2, layer.rows_of(grad_out),
        {below_down, below_normed, needed[Layer::kNorms + 2], needed[Layer::kNorms + 3], false},
        &found[Layer::kNorms + 2]);
    if (!below_down) return found;
    find_weight(Layer::kDown, grad_down, v.activated);
    if (!below_up) return found;
    const Tensor grad_up =
        activate_backward(at::mm(grad_down, t[Layer::kDown]), v.up, layer.activation);
    find_weight(Layer::kUp, grad_up, v.normed);
    if (!below_normed) return found;
    grad_normed.addmm_(grad_up, t[Layer::kUp]);

    const auto [grad_projected, grad_rows] = differentiate_norm(
        layer.norm_call(v.projected, rows, 0), v.mean1, v.rstd1, grad_normed,
        {below_projected, needed[Layer::kX], needed[Layer::kNorms], needed[Layer::kNorms + 1],
         false},
        &found[Layer::kNorms]);
    if (!below_projected) return found;
    find_weight(Layer::kOutput, grad_projected, layer.join_heads(v.attended));
    if (!below_attended) return found;
    const Tensor grad_attended = layer.heads_of(at::mm(grad_projected, t[Layer::kOutput]));
    const OptionalTensor absent;
    const AttentionCall call = layer.attention_call(v.query, v.key, v.value);
    const auto grads = run_kernel(
        attention_backward_op().of(rows), grad_attended, absent, call.query, call.key, call.value,
        call.mask, absent, absent, absent, absent, call.key_lengths, absent, call.cu_seqlens_q,
        call.cu_seqlens_k, call.seed, v.attended, v.logsumexp, c10::SymInt(call.longest_queries()),
        c10::SymInt(call.longest_keys()), call.scale, std::optional<double>(), Bound(), Bound(),
        false, call.dropout_p, std::array<bool, 7>{true, true, true});
    // Query, key and value side by side, (rows, 3 · attended features), which takes one launch
    // instead of three.
    const Tensor grad_heads = at::cat(
        {layer.join_heads(std::get<0>(grads)), layer.join_heads(std::get<1>(grads)),
         layer.join_heads(std::get<2>(grads))},
        1);
    const auto find_three = [&](int first, const auto& compute) {
      const bool together = needed[first] && needed[first + 1] && needed[first + 2];
      const Tensor all = together ? compute(grad_heads) : Tensor();
      const int64_t each = grad_heads.size(1) / 3;
      for (int i = 0; i < 3; ++i)
        if (needed[first + i])
          found[first + i] = together ? all.narrow(0, i * each, each)
                                      : compute(grad_heads.narrow(1, i * each, each));
    };
    find_three(
        Layer::kQuery, [&](const Tensor& grad) { return at::mm(Layer::transposed(grad), rows); });
    find_three(Layer::kQuery + Layer::kBias, [](const Tensor& grad) { return grad.sum(0); });
    if (needed[Layer::kX])
      grad_rows.addmm_(
          grad_heads, at::cat({t[Layer::kQuery], t[Layer::kKey], t[Layer::kValue]}, 0));
    if (needed[Layer::kX]) found[Layer::kX] = grad_rows.view(layer.x().sizes());
    return found;
  }

  // Returns the gradients of a norm's x and residual; stores those of its weight and its bias.
  static std::pair<Tensor, Tensor> differentiate_norm(
      const NormCall& call, const Tensor& mean, const Tensor& rstd, const Tensor& grad,
      std::array<bool, 5> needed, Tensor* of_vectors) {
    // x and residual have one gradient if nothing is dropped between them.
    const bool shared = !call.seed && (needed[0] || needed[1]);
    if (shared) {
      needed[0] = true;
      needed[1] = false;
    }
    auto [of_x, of_residual, of_weight, of_bias, of_x_bias] = run_kernel(
        norm_backward_op().of(call.x), grad, OptionalTensor(), call.x, call.residual, call.weight,
        call.bias, call.x_bias, call.seed, mean, rstd, call.dropout_p, call.eps, call.rms_norm,
        call.prenorm, call.sum_dtype(), needed);
    if (needed[2]) of_vectors[0] = of_weight;
    if (needed[3]) of_vectors[1] = of_bias;
    // Both may be the same tensor. The caller adds to the second after it has read the first.
    return {of_x, shared ? of_x : of_residual};
  }

  // Computes the gradients in a way that can itself be differentiated or batched: through the
  // gradients of the parts, which are computed once more.
  static Found differentiate_recorded(
      const Layer& layer, const Tensor& grad_out, const Needed& needed) {
    const bool create_graph = at::GradMode::is_enabled();
    Found found;
    const at::AutoGradMode recording(true);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
    // Uses aliases, so that a tensor that the layer holds twice, or from which x was computed, has
    // a separate gradient in each place, and so that its hooks do not run here.
    Layer aliased = layer;
    variable_list inputs;
    for (int i = 0; i < Layer::kTensors; ++i) {
      if (!needed[i]) continue;
      aliased.tensors[i] = layer.tensors[i].view_as(layer.tensors[i]);
      inputs.push_back(aliased.tensors[i]);
    }
    variable_list grads = torch::autograd::grad(
        {aliased.record()}, inputs, {grad_out}, /*retain_graph=*/true, create_graph,
        /*allow_unused=*/true);
    auto next = grads.begin();
    for (int i = 0; i < Layer::kTensors; ++i)
      if (needed[i]) found[i] = std::move(*next++);
    return found;
  }
};

Tensor run(const PostNormLayer& layer) {
  variable_list given;
  bool recorded = false;
  for (const Tensor& each : layer.tensors) {
    if (!each.defined()) continue;
    recorded = recorded || each.requires_grad();
    given.push_back(each);
  }
  if (recorded && at::GradMode::is_enabled())
    return PostNorm::apply(at::TensorList(given), layer)[0];
  const at::AutoDispatchBelowADInplaceOrView guard;
  PostNormLayer::Values values;
  return layer.compute(values, false);
}

// Draws the seeds of all dropouts in the layers at once.
void draw_seeds(std::vector<PostNormLayer>& layers, const Tensor& like) {
  int64_t count = 0;
  for (const PostNormLayer& layer : layers)
    for (double p : layer.dropout_p) count += p != 0;
  if (count == 0) return;
  using Limits = std::numeric_limits<int64_t>;
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor drawn =
      at::randint(Limits::min(), Limits::max(), {count}, like.options().dtype(at::kLong));
  int64_t next = 0;
  for (PostNormLayer& layer : layers)
    for (int i = 0; i < 3; ++i)
      if (layer.dropout_p[i] != 0) layer.seeds[i] = drawn.narrow(0, next++, 1);
}

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

// Runs a call whose arguments have been read. Some values, such as those of lengths, are checked
// only by the op, which throws one of four types of error. The checks in Python then report it.
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

// Reads a layer: 16 tensors or None, heads, scale, activation, eps of both norms.
bool read_post_norm_layer(const Tensor& x, PyObject* parts, PostNormLayer& layer) {
  TORCH_CHECK_TYPE(
      PyTuple_CheckExact(parts) && PyTuple_GET_SIZE(parts) == 6 &&
          PyTuple_CheckExact(PyTuple_GET_ITEM(parts, 0)) &&
          PyTuple_GET_SIZE(PyTuple_GET_ITEM(parts, 0)) == PostNormLayer::kTensors - 1,
      "layers: expected tuples (tensors, heads, scale, activation, eps, eps)");
  layer.tensors[PostNormLayer::kX] = x;
  for (int i = 1; i < PostNormLayer::kTensors; ++i) {
    PyObject* object = PyTuple_GET_ITEM(PyTuple_GET_ITEM(parts, 0), i - 1);
    const bool absent = object == Py_None && i > PostNormLayer::kDown;
    if (!absent && !read_beside(x, object, layer.tensors[i])) return false;
  }
  std::optional<c10::string_view> name;
  if (!read(PyTuple_GET_ITEM(parts, 1), layer.heads) ||
      !read(PyTuple_GET_ITEM(parts, 2), layer.scale) || !read(PyTuple_GET_ITEM(parts, 3), name) ||
      !read(PyTuple_GET_ITEM(parts, 4), layer.eps[0]) ||
      !read(PyTuple_GET_ITEM(parts, 5), layer.eps[1]))
    return false;
  const std::optional<ActivationKind> activation = activation_of(name);
  if (activation) layer.activation = *activation;
  return activation.has_value();
}

PyObject* post_norm_layers(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 6);
  Tensor x;
  OptionalTensor mask, cu_seqlens;
  int64_t longest;
  if (!no_mode_applies() || !read_anywhere(args[0], x) || !read_beside(x, args[1], mask) ||
      !read_beside(x, args[2], cu_seqlens) || !read(args[3], longest) || records(mask))
    Py_RETURN_NONE;
  TORCH_CHECK_TYPE(
      PyTuple_CheckExact(args[4]) && PyTuple_CheckExact(args[5]) &&
          PyTuple_GET_SIZE(args[5]) == 3 * PyTuple_GET_SIZE(args[4]),
      "dropout_p: expected a tuple of three for each layer");
  std::vector<PostNormLayer> layers(PyTuple_GET_SIZE(args[4]));
  for (size_t i = 0; i < layers.size(); ++i) {
    PostNormLayer& layer = layers[i];
    layer.mask = mask;
    layer.cu_seqlens = cu_seqlens;
    layer.longest = longest;
    for (int j = 0; j < 3; ++j)
      if (!read(PyTuple_GET_ITEM(args[5], 3 * i + j), layer.dropout_p[j])) Py_RETURN_NONE;
    // All inputs have the shape of the first.
    if (!read_post_norm_layer(x, PyTuple_GET_ITEM(args[4], i), layer) || !layer.fits())
      Py_RETURN_NONE;
  }
  return run_or_decline([&] {
    draw_seeds(layers, x);
    for (PostNormLayer& layer : layers) {
      layer.tensors[PostNormLayer::kX] = std::move(x);
      x = run(layer);
      layer.tensors = {};  // without gradients, a layer's input is freed after the layer
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

PyObject* embedded_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 3);
  const auto is_tuple = [&](PyObject* object) {
    return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == PyTuple_GET_SIZE(args[0]);
  };
  TORCH_CHECK_TYPE(
      is_tuple(args[0]) && is_tuple(args[1]) && is_tuple(args[2]) && PyTuple_GET_SIZE(args[0]) >= 2,
      "tables: expected two at least, and ids and the id of padding for each");
  if (!no_mode_but_autocast_applies()) Py_RETURN_NONE;
  std::vector<Tensor> ids(PyTuple_GET_SIZE(args[0])), tables(ids.size());
  std::vector<int64_t> paddings(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!read(PyTuple_GET_ITEM(args[2], i), paddings[i])) Py_RETURN_NONE;
    if (!read_anywhere(PyTuple_GET_ITEM(args[0], i), ids[i]) ||
        !read_beside(ids[i], PyTuple_GET_ITEM(args[1], i), tables[i]) ||
        ids[i].device() != ids[0].device() || tables[i].dim() != 2 ||
        tables[i].size(1) != tables[0].size(1) || !is_floating(tables[i].scalar_type()) ||
        tables[i].scalar_type() != tables[0].scalar_type() || ids[i].scalar_type() != at::kLong)
      Py_RETURN_NONE;
    const bool one_for_all = i > 0 && i + 1 < ids.size() && ids[i].numel() == 1;
    if (!one_for_all && ids[i].sizes() != ids[0].sizes()) Py_RETURN_NONE;
  }
  return run_or_decline([&] { return EmbeddedRows::apply(at::TensorList(tables), ids, paddings); });
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
// from memory. Several passes over all modules make these reads overlap.
PyObject* modules_as_planned(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 3);
  static PyObject* training = PyUnicode_InternFromString("training");
  static PyObject* hooks = PyUnicode_InternFromString("_forward_hooks");
  static PyObject* watching[] = {
      PyUnicode_InternFromString("_forward_pre_hooks"),
      PyUnicode_InternFromString("forward"),
      // These two matter if gradients are recorded.
      PyUnicode_InternFromString("_backward_hooks"),
      PyUnicode_InternFromString("_backward_pre_hooks"),
  };
  TORCH_CHECK_TYPE(PyTuple_CheckExact(args[0]), "modules: expected a tuple");
  PyObject* idle = args[1];
  TORCH_CHECK_TYPE(idle == Py_None || PyDict_Check(idle), "idle: expected a dictionary or None");
  bool trained;
  TORCH_CHECK_TYPE(read(args[2], trained), "trained: expected a bool");
  const size_t watched = trained ? 4 : 2;
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
    if (!trained && PyDict_GetItemWithError(e.own.get(), training) != Py_False) Py_RETURN_FALSE;
    if (!lacks(e.own.get(), hooks) &&
        !hooks_are_of(PyDict_GetItemWithError(e.own.get(), hooks), idle))
      Py_RETURN_FALSE;
    for (size_t i = 0; i < watched; ++i)
      if (!lacks(e.own.get(), watching[i])) Py_RETURN_FALSE;
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
      {"post_norm_layers", function(&post_norm_layers), METH_FASTCALL,
       "The result of layers one after another, of any weights, or None for any other call"},
      {"embed", function(&embed), METH_FASTCALL,
       "The norm of a sum of embeddings, without gradients, or None for a call that is not plain"},
      {"embedded_rows", function(&embedded_rows), METH_FASTCALL,
       "The sum of embeddings but the last, and the last, or None for a call that is not plain"},
      {"modules_as_planned", function(&modules_as_planned), METH_FASTCALL,
       "Whether modules, as tuples (siblings, name, module, class), have the name and class that "
       "they had, evaluate unless the third argument is true, and run nothing but their class's "
       "forward and hooks with the globals that come second"},
      {"values_as_planned", function(&values_as_planned), METH_FASTCALL,
       "Whether dictionaries or classes, as tuples (owner, key, value), have these very values"},
      {"plain_call", function(&plain_call), METH_FASTCALL,
       "Whether a call on these tensors may skip the checks in Python"},
      {}};
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw pybind11::error_already_set();
}

}  // namespace trifuse
