// Functions that return whether the modules and values that a plan was made for are still as they
// were (pytorch_ext/nn/plans.py).

#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <vector>

#include "fast_path/plain.h"

namespace trifuse::fast_path {

// Returns whether a dictionary has no entry for a key, or an empty one.
inline bool lacks(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (!value && PyErr_Occurred()) throw python_error();
  return !value || (PyDict_Check(value) && PyDict_Size(value) == 0);
}

// Returns whether all hooks in a dictionary are functions with these globals.
inline bool hooks_are_of(PyObject* hooks, PyObject* globals) {
  PyObject *name, *hook;
  Py_ssize_t position = 0;
  while (PyDict_Next(hooks, &position, &name, &hook))
    if (!PyFunction_Check(hook) || PyFunction_GET_GLOBALS(hook) != globals) return false;
  return true;
}

// Between two calls the weights of a model have passed through the caches, so each module is read
// from memory. Several passes over all modules make these reads overlap.
inline PyObject* modules_as_planned(PyObject*, PyObject* const* args, Py_ssize_t count) {
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

inline PyObject* values_as_planned(PyObject*, PyObject* const* args, Py_ssize_t count) {
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

}  // namespace trifuse::fast_path
