// Dispatch of ops to their derivatives, which are written in Python.
//
// An op that is registered here runs its kernel if the call needs no derivative, neither a gradient
// by autograd nor a tangent in forward mode. Otherwise its companion runs, an op with the same
// schema whose kernel is in Python (pytorch_ext/ops/_op.py). The decision is made here, so that a
// call without gradients does not enter Python.

#include "autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <unordered_map>

namespace trifuse {
namespace {

// Companions by the op's name. Written while trifuse is imported, and only read afterwards.
std::unordered_map<c10::OperatorName, c10::OperatorHandle>& companions() {
  static auto* map = new std::unordered_map<c10::OperatorName, c10::OperatorHandle>;
  return *map;
}

bool wants_derivative(const c10::IValue& value, bool gradients) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    return t.defined() && ((gradients && t.requires_grad()) || t._fw_grad(0).defined());
  }
  if (value.isList())
    for (const c10::IValue& each : value.toListRef())
      if (wants_derivative(each, gradients)) return true;
  return false;
}

void differentiate(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const bool gradients = c10::GradMode::is_enabled();
  for (const c10::IValue& value : torch::jit::last(*stack, count))
    if (wants_derivative(value, gradients)) {
      companions().at(op.operator_name()).callBoxed(stack);
      return;
    }
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

}  // namespace

void register_autograd(const std::string& op, const std::string& companion) {
  const auto handle = [](const std::string& full) {
    const size_t dot = full.find('.');
    return c10::Dispatcher::singleton().findSchemaOrThrow(
        ("trifuse::" + full.substr(0, dot)).c_str(),
        dot == std::string::npos ? "" : full.substr(dot + 1).c_str());
  };
  companions().emplace(handle(op).operator_name(), handle(companion));
  static auto* library = new torch::Library(
      torch::Library::IMPL, "trifuse", c10::DispatchKey::Autograd, __FILE__, __LINE__);
  library->impl(op.c_str(), torch::CppFunction::makeFromBoxedFunction<&differentiate>());
}

}  // namespace trifuse
