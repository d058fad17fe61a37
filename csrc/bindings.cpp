// trifuse._C: information about the build, plain calls of operators (fast_path/), and hooks for
// tests and benchmarks. Operators are registered with torch's dispatcher in their own files.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "autograd.h"
#include "cpu/allocation.h"
#include "cpu/capability.h"
#include "cpu/kernels.h"
#ifdef TRIFUSE_SANITIZE
#include "cpu/planted.h"
#endif
#include "cpu/threads.h"
#include "fast_path/fast_path.h"

namespace {

using namespace trifuse;

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (Capability c : capabilities()) result.push_back(name(c));
  return result;
}

pybind11::dict build_info() {
  pybind11::dict info;
  std::vector<std::string> compiled;
#define TRIFUSE_ADD(set) compiled.push_back(#set);
  TRIFUSE_EACH_CAPABILITY(TRIFUSE_ADD)
#undef TRIFUSE_ADD
  info["capabilities"] = compiled;
#if defined(__clang__)
  info["compiler"] = __VERSION__;  // includes the compiler's name
#else
  info["compiler"] = "GCC " __VERSION__;
#endif
  info["torch"] = TORCH_VERSION;
  // The operators that have CUDA kernels, and the architectures that these were compiled for.
#if defined(TRIFUSE_CUDA_CODE)
  info["cuda"] =
      std::vector<std::string>{"attention", "dropout_add_layer_norm", "lstm", "gru", "rnn"};
  info["cuda_code"] = TRIFUSE_CUDA_CODE;
#else
  info["cuda"] = std::vector<std::string>{};
#endif
  return info;
}

double matrix_rate(const std::string& dtype, double seconds) {
  TORCH_CHECK_VALUE(
      dtype == "float32" || dtype == "bfloat16", "dtype: expected float32 or bfloat16; got ",
      dtype);
  const auto probe = kernels().probe;
  const int threads = at::get_num_threads();
  std::vector<double> rates(threads);
  pybind11::gil_scoped_release release;
  parallel_region(threads, [&](int64_t first, int64_t) {
    rates[first] = probe.matrix_rate(dtype == "bfloat16", seconds);
  });
  double sum = 0;
  for (double rate : rates) sum += rate;
  return sum;
}

// Throws in one thread of a crew while the others wait for it at a barrier.
void throw_in_crew(int64_t threads, int64_t thread) {
  Crew crew(threads);
  std::atomic<bool> went_on{false};
  try {
    crew.run(threads, [&](int64_t index) {
      const Team team = crew.all(index);
      team.wait();
      if (index == thread) throw std::runtime_error("thrown in thread " + std::to_string(index));
      team.wait();
      went_on = true;
    });
  } catch (...) {
    TORCH_CHECK(!went_on, "a thread went on without the one that had thrown");
    throw;
  }
}

template <void (*Probe::*function)(const float*, float*, int64_t)>
at::Tensor each(const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "x: expected float32; got ", x.scalar_type());
  const at::Tensor from = x.contiguous();
  at::Tensor to = at::empty_like(from);
  const auto run = kernels().probe.*function;
  run(from.const_data_ptr<float>(), to.mutable_data_ptr<float>(), from.numel());
  return to;
}

// Turns torch's errors into Python's. torch's own translator works only for modules that use the
// version of pybind11 that torch was built with.
void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(std::move(thrown));
  } catch (const c10::ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::register_local_exception_translator(&translate);
  m.doc() = "trifuse's compiled kernels: what was built, and hooks for tests and benchmarks";
  m.def("build_info", &build_info, "Build information");
  m.def(
      "cpu_capabilities", &names,
      "Instruction sets that this machine can run, least capable first");
  m.def("cpu_maker", &cpu_maker, "The CPU's maker: AMD, Intel or other");
  m.def("cpu_capability", [] { return name(capability()); }, "The instruction set in use");
  m.def(
      "set_cpu_capability", [](const std::string& wanted) { return name(set_capability(wanted)); },
      "Use another instruction set; returns the one before");
  m.def("has_matrix_unit", &has_matrix_unit, "Whether bfloat16 products can run on AMX here");
  m.def(
      "split_pairs", [](bool split) { return splits_pairs.exchange(split); },
      "Whether AVX512_BF16 multiplies a pair by two multiply-adds; returns the choice before");
  m.def(
      "use_matrix_unit", [](bool use) { matrix_unit_off = !use; },
      "Whether AMX_BF16 uses the unit, if there is one, or the software in its place");
  m.def(
      "matrix_rate", &matrix_rate, pybind11::arg("dtype"), pybind11::arg("seconds") = 0.2,
      "FLOP/s of all threads' matrix products on tiles in their L1 caches");
  m.def(
      "register_autograd", &register_autograd,
      "Run an op's companion in its place where a derivative is wanted");
  add_fast_paths(m, [](std::string_view wanted) { return name(capability()) == wanted; });
  m.def(
      "fail_allocations", &fail_allocations, pybind11::arg("first"), pybind11::arg("count") = 1,
      "Make allocations fail, for tests; 0 stops it");
  m.def(
      "counted_allocations", &counted_allocations,
      "Allocations since fail_allocations was last called with a non-zero `first`");
  m.def(
      "throw_in_crew", &throw_in_crew, pybind11::arg("threads"), pybind11::arg("thread"),
      pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Throw in one thread of a crew while the others wait for it");
  m.def("exp2", &each<&Probe::exp2>, "2^x as the kernels compute it");
  m.def("sigmoid", &each<&Probe::sigmoid>, "1 / (1 + e^-x) as the kernels compute it");
  m.def("tanh", &each<&Probe::tanh>, "tanh(x) as the kernels compute it");
#ifdef TRIFUSE_SANITIZE
  m.def("planted", &planted, "Commit an error that the sanitizer has to report");
#endif
}
