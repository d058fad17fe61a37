// A call may skip the code of modules only if the modules and values from which its arguments were
// made are still there. The functions in this file check that (pytorch_ext/nn/plans.py).
//
// Between two calls the weights of a model have passed through the caches, so everything checked
// here is read from memory. Several passes request all that the next pass reads, so that these
// reads overlap.

#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>
#include <vector>

#include "fast_path/plain.h"

namespace trifuse::fast_path {

// Returns a dictionary's value, or null if there is none.
inline PyObject* value_of(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (!value && PyErr_Occurred()) throw python_error();
  return value;
}

// Returns whether a dictionary has no entry for a key, or an empty one.
inline bool lacks(PyObject* dict, PyObject* key) {
  PyObject* value = value_of(dict, key);
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

// Requests what a lookup in a dictionary reads.
inline void prefetch_entries(PyObject* dict) {
  const auto* d = reinterpret_cast<const PyDictObject*>(dict);
  const auto* keys = reinterpret_cast<const char*>(d->ma_keys);
  const auto* values = reinterpret_cast<const char*>(d->ma_values);
  for (ptrdiff_t byte = 0; byte < 192; byte += 64) {
    __builtin_prefetch(keys + byte);
    if (values) __builtin_prefetch(values + byte);
  }
}

class Planned {
 public:
  Planned(PyObject* modules, PyObject* values) {
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(modules) && PyTuple_CheckExact(values),
        "modules, values: expected tuples");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(modules); ++i) {
      PyObject* entry = PyTuple_GET_ITEM(modules, i);
      TORCH_CHECK_TYPE(
          PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 4 &&
              PyDict_Check(PyTuple_GET_ITEM(entry, 0)),
          "modules: expected tuples (siblings, name, module, class)");
      const auto at = [&](int j) { return PyTuple_GET_ITEM(entry, j); };
      modules_.push_back({at(0), at(1), at(2), at(3), nullptr});
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); ++i) {
      PyObject* entry = PyTuple_GET_ITEM(values, i);
      TORCH_CHECK_TYPE(
          PyTuple_CheckExact(entry) && (PyTuple_GET_SIZE(entry) | 1) == 3,
          "values: expected tuples (dictionary or class, key, value), (dictionary, key) or "
          "(dictionary, size)");
      PyObject* owner = PyTuple_GET_ITEM(entry, 0);
      PyObject* key = PyTuple_GET_ITEM(entry, 1);
      const bool has_value = PyTuple_GET_SIZE(entry) == 3;
      TORCH_CHECK_TYPE(
          PyDict_Check(owner) || (PyType_Check(owner) && has_value),
          "values: expected a dictionary or a class");
      const Py_ssize_t size = PyLong_Check(key) ? PyLong_AsSsize_t(key) : -1;
      values_.push_back(
          {owner, key, has_value ? PyTuple_GET_ITEM(entry, 2) : nullptr, size,
           PyType_Check(owner) != 0});
    }
    held_[0] = THPObjectPtr::dup(modules);
    held_[1] = THPObjectPtr::dup(values);
  }

  bool values_hold() const {
    for (const Value& v : values_) __builtin_prefetch(v.owner);
    for (const Value& v : values_)
      if (!v.of_class) prefetch_entries(v.owner);
    for (const Value& v : values_) {
      if (v.of_class) {
        const THPObjectPtr found(PyObject_GetAttr(v.owner, v.key));
        if (!found && !PyErr_ExceptionMatches(PyExc_AttributeError)) throw python_error();
        PyErr_Clear();
        if (found.get() != v.value) return false;
      } else if (v.size >= 0) {
        if (PyDict_Size(v.owner) != v.size) return false;
      } else if (value_of(v.owner, v.key) != v.value) {
        return false;
      }
    }
    return true;
  }

  // Returns whether all modules have the name and class that they had, and run nothing but their
  // class's `forward`. `idle`: the globals of forward hooks that do nothing now, or None.
  // `trained`: the modules may train; and they must have no backward hooks.
  bool modules_hold(PyObject* idle, bool trained) {
    static PyObject* training = PyUnicode_InternFromString("training");
    static PyObject* hooks = PyUnicode_InternFromString("_forward_hooks");
    static PyObject* watching[] = {
        PyUnicode_InternFromString("_forward_pre_hooks"),
        PyUnicode_InternFromString("forward"),
        // These two matter if gradients are recorded.
        PyUnicode_InternFromString("_backward_hooks"),
        PyUnicode_InternFromString("_backward_pre_hooks"),
    };
    const int watched = trained ? 4 : 2;
    for (const Module& m : modules_) {
      __builtin_prefetch(m.siblings);
      __builtin_prefetch(m.module);
      // CPython keeps the pointer to the attributes before the object.
      __builtin_prefetch(reinterpret_cast<const char*>(m.module) - 32);
    }
    for (Module& m : modules_) {
      prefetch_entries(m.siblings);
      m.own = PyObject_GenericGetDict(m.module, nullptr);
      if (!m.own) throw python_error();
      Py_DECREF(m.own);  // the module keeps it
      __builtin_prefetch(m.own);
    }
    for (const Module& m : modules_) prefetch_entries(m.own);
    for (const Module& m : modules_) {
      for (PyObject* key : {hooks, watching[0]})
        if (PyObject* found = value_of(m.own, key)) __builtin_prefetch(found);
    }
    for (const Module& m : modules_) {
      PyObject* own = m.own;
      if (value_of(m.siblings, m.name) != m.module ||
          reinterpret_cast<PyObject*>(Py_TYPE(m.module)) != m.type)
        return false;
      if (!trained && value_of(own, training) != Py_False) return false;
      if (!lacks(own, hooks) && !hooks_are_of(value_of(own, hooks), idle)) return false;
      for (int i = 0; i < watched; ++i)
        if (!lacks(own, watching[i])) return false;
    }
    return true;
  }

 private:
  struct Module {
    PyObject *siblings, *name, *module, *type;
    PyObject* own;  // the module's attributes, during a call
  };
  struct Value {
    PyObject *owner, *key;
    PyObject* value;  // null: the owner must lack the key
    Py_ssize_t size;  // of a dictionary, checked instead of a key; or -1
    bool of_class;
  };
  std::vector<Module> modules_;
  std::vector<Value> values_;
  THPObjectPtr held_[2];  // keep the above alive
};

// Objects of C++ that Python holds in a capsule, named by their class.
template <class T>
PyObject* in_capsule(std::unique_ptr<T> object, const char* name) {
  PyObject* capsule = PyCapsule_New(object.get(), name, [](PyObject* held) {
    delete static_cast<T*>(PyCapsule_GetPointer(held, PyCapsule_GetName(held)));
  });
  if (!capsule) throw python_error();
  object.release();
  return capsule;
}

template <class T>
T& from_capsule(PyObject* capsule, const char* name) {
  void* object = PyCapsule_GetPointer(capsule, name);
  if (!object) throw python_error();
  return *static_cast<T*>(object);
}

constexpr const char* kPlanned = "trifuse.Planned";

inline PyObject* planned(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 2);
  return in_capsule(std::make_unique<Planned>(args[0], args[1]), kPlanned);
  END_HANDLE_TH_ERRORS
}

inline PyObject* modules_as_planned(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 3);
  PyObject* idle = args[1];
  TORCH_CHECK_TYPE(idle == Py_None || PyDict_Check(idle), "idle: expected a dictionary or None");
  bool trained;
  TORCH_CHECK_TYPE(read(args[2], trained), "trained: expected a bool");
  return PyBool_FromLong(from_capsule<Planned>(args[0], kPlanned).modules_hold(idle, trained));
  END_HANDLE_TH_ERRORS
}

inline PyObject* values_as_planned(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 1);
  return PyBool_FromLong(from_capsule<Planned>(args[0], kPlanned).values_hold());
  END_HANDLE_TH_ERRORS
}

}  // namespace trifuse::fast_path
