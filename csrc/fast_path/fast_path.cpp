// Calls of operators that skip the checks in Python, because they are plain and valid.
//
// Checks in Python take longer than the computation of a small call. A function in this file reads
// the caller's arguments. If they are plain (plain.h) and fit each other, it runs the op. Otherwise
// it returns None, and the operator's checks in Python report what is wrong or convert what the op
// does not take. So each message exists only once, in Python.
//
// With gradients most calls are one node, a torch::autograd::Function, whose backward runs ops. If
// that must itself be differentiated or batched, torch's dispatcher runs the rules that are
// registered for the ops (pytorch_ext/ops/_operator.py), as for any other call.

#include "fast_path/fast_path.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <optional>
#include <utility>
#include <vector>

#include "fast_path/activation_call.h"
#include "fast_path/attention_call.h"
#include "fast_path/dropout_add_layer_norm_call.h"
#include "fast_path/dropout_call.h"
#include "fast_path/embeddings_call.h"
#include "fast_path/encoder_layer_call.h"
#include "fast_path/encoder_model_call.h"
#include "fast_path/linear_call.h"
#include "fast_path/plans.h"
#include "fast_path/post_norm_layers.h"
#include "fast_path/recurrent_call.h"
#include "fast_path/rotary_call.h"
#include "fast_path/split_heads_call.h"

namespace trifuse {
namespace fast_path {
namespace {

PyObject* wrap(variable_list results) {
  if (results.size() == 1) return THPVariable_Wrap(std::move(results[0]));
  const auto count = static_cast<Py_ssize_t>(results.size());
  THPObjectPtr tuple(PyTuple_New(count));
  if (!tuple) throw python_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* each = THPVariable_Wrap(std::move(results[i]));
    if (!each) throw python_error();
    PyTuple_SET_ITEM(tuple.get(), i, each);
  }
  return tuple.release();
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
  call.complete_dims();
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
  check_count(count, 8);
  LinearCall call;
  int64_t unpacked_below, recorded_from;
  if (!no_mode_applies() || !read(args[0], call.x) || !read(args[1], call.weight) ||
      !read(args[2], call.bias) || !read(args[3], call.activation) || !read(args[4], call.up) ||
      !read(args[5], call.up_bias) || !read(args[6], unpacked_below) ||
      !read(args[7], recorded_from) || !call.fits_unpacked())
    Py_RETURN_NONE;
  if (call.records()) {
    if (!call.fits_recorded()) Py_RETURN_NONE;
    const bool by_product = call.rows() >= recorded_from;
    return run_or_decline([&] { return variable_list{call.run_recorded(by_product)}; });
  }
  if (call.rows() >= unpacked_below) Py_RETURN_NONE;
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
      !call.fits() || call.records())
    Py_RETURN_NONE;
  return run_or_decline([&] { return variable_list{call.run_packed()}; });
  END_HANDLE_TH_ERRORS
}

PyObject* encoder_layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 17);
  Tensor x;
  EncoderLayer layer;
  EncoderLayerInputs inputs;
  if (!no_mode_applies() || !read(args[0], x) || !read(args[1], inputs.attn_mask) ||
      !read(args[2], inputs.cu_seqlens) || !read(args[3], inputs.max_seqlen) ||
      !layer.read_layer(args + 4) || !read(args[8], inputs.key_cache) ||
      !read(args[9], inputs.value_cache) || !read(args[10], inputs.past) ||
      !read(args[11], inputs.cos) || !read(args[12], inputs.sin) ||
      !read(args[13], inputs.relative_bias) || !read(args[14], inputs.memory_key) ||
      !read(args[15], inputs.memory_value) || !read(args[16], inputs.memory_mask) ||
      records(
          x, inputs.attn_mask, inputs.key_cache, inputs.value_cache, inputs.cos, inputs.sin,
          inputs.relative_bias, inputs.memory_key, inputs.memory_value, inputs.memory_mask))
    Py_RETURN_NONE;
  return run_or_decline([&] { return variable_list{run(layer, x, inputs)}; });
  END_HANDLE_TH_ERRORS
}

PyObject* encoder_layers(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 5);
  Tensor x;
  EncoderLayerInputs inputs;
  if (!no_mode_applies() || !read(args[0], x) || !read(args[1], inputs.attn_mask) ||
      !read(args[2], inputs.cu_seqlens) || !read(args[3], inputs.max_seqlen) ||
      records(x, inputs.attn_mask))
    Py_RETURN_NONE;
  std::vector<EncoderLayer> layers;
  if (!read_layers(args[4], layers)) Py_RETURN_NONE;
  return run_or_decline([&] {
    for (const EncoderLayer& layer : layers) x = run(layer, x, inputs);
    return variable_list{x};
  });
  END_HANDLE_TH_ERRORS
}

PyObject* encoder_model(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 6);
  TORCH_CHECK_TYPE(
      args[1] == Py_None || PyDict_Check(args[1]), "idle: expected a dictionary or None");
  EncoderModelCall call;
  if (!no_mode_applies() || !call.read_inputs(args + 2) || !call.read_model(args[0], args[1]))
    Py_RETURN_NONE;
  return run_or_decline([&] { return call.run(); });
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
  if (!no_mode_applies() || !read_tuple<Tensor>(args[0], call.ids) || !call.read_parts(args + 1))
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

PyObject* activate(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 4);
  ActivationCall call;
  std::optional<c10::string_view> name;
  if (!no_mode_but_autocast_applies() || !read(args[0], call.x) || !read(args[1], call.up) ||
      !read(args[2], name) || !name || !read(args[3], call.first))
    Py_RETURN_NONE;
  call.activation = *name;
  if (!call.fits()) Py_RETURN_NONE;
  return run_or_decline([&] { return variable_list{run(call)}; });
  END_HANDLE_TH_ERRORS
}

PyObject* split_heads(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 4);
  SplitHeadsCall call;
  if (!no_mode_but_autocast_applies() || !read(args[0], call.x) || !read(args[1], call.count) ||
      !read(args[2], call.heads) || !read(args[3], call.batch_first) || !call.fits())
    Py_RETURN_NONE;
  return run_or_decline([&] { return run(call); });
  END_HANDLE_TH_ERRORS
}

PyObject* dropout(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2);
  DropoutCall call;
  if (!no_mode_but_autocast_applies() || !read(args[0], call.x) || !read(args[1], call.dropout_p) ||
      !call.fits())
    Py_RETURN_NONE;
  return run_or_decline([&] { return variable_list{run(call)}; });
  END_HANDLE_TH_ERRORS
}

PyObject* rotate(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 7);
  RotaryCall call;
  if (!no_mode_but_autocast_applies() || !read(args[0], call.x) || !read(args[1], call.cos) ||
      !read(args[2], call.sin) || !read(args[3], call.unsqueeze_dim) ||
      !read(args[4], call.in_float32) || !read(args[5], call.interleaved) ||
      !read(args[6], call.per_pair) || !call.fits())
    Py_RETURN_NONE;
  return run_or_decline([&] { return variable_list{call.run()}; });
  END_HANDLE_TH_ERRORS
}

PyObject* recurrent(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 7);
  RecurrentCall call;
  std::optional<c10::string_view> name;
  bool one_step;
  TORCH_CHECK_TYPE(PyTuple_Check(args[4]), "parameters: expected a tuple");
  if (!no_mode_applies() || !read(args[0], name) || !name || !read(args[1], call.input) ||
      !read(args[2], call.h0) || !read(args[3], call.c0) || !read(args[5], call.option) ||
      !read(args[6], one_step) || one_step != call.one_step())
    Py_RETURN_NONE;
  call.cell = *name == "lstm" ? Cell::Lstm : *name == "gru" ? Cell::Gru : Cell::Rnn;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[4]); ++i) {
    OptionalTensor each;
    if (!read(PyTuple_GET_ITEM(args[4], i), each)) Py_RETURN_NONE;
    call.parameters.push_back(or_undefined(each));
  }
  return run_or_decline([&] { return run(call); });
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

PyCFunction function(_PyCFunctionFast f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

}  // namespace
}  // namespace fast_path

void add_fast_paths(pybind11::module_& m, bool (*uses)(std::string_view)) {
  using namespace fast_path;
  EncoderModelCall::uses = uses;
  static PyMethodDef functions[] = {
      {"attention", function(&attention), METH_FASTCALL,
       "The results of a plain and valid call, or None for any other"},
      {"packed_attention", function(&packed_attention), METH_FASTCALL,
       "The result of a plain and valid call on packed sequences, or None for any other"},
      {"dropout_add_layer_norm", function(&dropout_add_layer_norm), METH_FASTCALL,
       "The results of a plain and valid call, or None for any other"},
      {"linear", function(&linear), METH_FASTCALL,
       "The result of a plain and valid call, or None for any other, or for one without gradients "
       "and with many rows"},
      {"linear_packed", function(&linear_packed), METH_FASTCALL,
       "The result of a plain and valid call without gradients, or None for any other"},
      {"encoder_layer", function(&encoder_layer), METH_FASTCALL,
       "The result of a plain and valid call without gradients, or None for any other"},
      {"encoder_layers", function(&encoder_layers), METH_FASTCALL,
       "The result of layers one after another, or None as encoder_layer"},
      {"encoder_model", function(&encoder_model), METH_FASTCALL,
       "The hidden states and the pooled output, or None for a call that is not plain"},
      {"post_norm_layers", function(&post_norm_layers), METH_FASTCALL,
       "The result of layers one after another, of any weights, or None for any other call"},
      {"embed", function(&embed), METH_FASTCALL,
       "The norm of a sum of embeddings, without gradients, or None for a call that is not plain"},
      {"embedded_rows", function(&embedded_rows), METH_FASTCALL,
       "The sum of all embeddings except the last, and the last, or None for a call that is not "
       "plain"},
      {"activate", function(&activate), METH_FASTCALL,
       "The result of a plain and valid call, or None for any other"},
      {"dropout", function(&dropout), METH_FASTCALL,
       "The result of a plain and valid call, or None for any other"},
      {"recurrent", function(&recurrent), METH_FASTCALL,
       "The output, h_n and of an LSTM c_n of a plain and valid call, or None for any other"},
      {"rotate", function(&rotate), METH_FASTCALL,
       "The result of a plain and valid call, or None for any other"},
      {"split_heads", function(&split_heads), METH_FASTCALL,
       "The heads of a plain and valid call, or None for any other"},
      {"planned", function(&planned), METH_FASTCALL,
       "What must hold before a call: modules, as tuples (siblings, name, module, class), and "
       "values, as tuples (dictionary or class, key, value), (dictionary, missing key) or "
       "(dictionary, its size)"},
      {"modules_as_planned", function(&modules_as_planned), METH_FASTCALL,
       "Whether the modules have the name and class that they had, evaluate unless the third "
       "argument is true, and run nothing but their class's forward and hooks with the globals "
       "that come second"},
      {"values_as_planned", function(&values_as_planned), METH_FASTCALL,
       "Whether the dictionaries and classes have these very values and sizes"},
      {"plain_call", function(&plain_call), METH_FASTCALL,
       "Whether a call on these tensors may skip the checks in Python"},
      {}};
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw pybind11::error_already_set();
  pybind11::list names;
  for (const char* name : kLayerOptions) names.append(name);
  m.attr("encoder_layer_options") = pybind11::tuple(names);
}

}  // namespace trifuse
