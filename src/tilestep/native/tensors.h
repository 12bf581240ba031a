// Python's tensors in C++, by torch's smallest headers: the header of THPVariable includes all operators, which takes a
// compiler five times as long as the rest.
//
// TILESTEP_HELD is the type that a tensor's object holds according to that header; build.py reads it there. If it is not
// defined, torch has another layout, and its header is included.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <ATen/core/TensorBase.h>
#include <torch/csrc/Export.h>

#ifdef TILESTEP_HELD
#include <c10/util/MaybeOwned.h>

struct THPVariable {
  PyObject_HEAD
  TILESTEP_HELD cdata;
};

TORCH_PYTHON_API extern PyObject* THPVariableClass;
TORCH_PYTHON_API extern PyObject* ParameterClass;
TORCH_PYTHON_API PyObject* THPVariable_Wrap(const at::TensorBase& var);

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}
#else
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#endif

namespace {

using Tensor = at::TensorBase;

#ifdef TILESTEP_HELD
inline const Tensor& held(const Tensor& cdata) { return cdata; }
inline const Tensor& held(const c10::MaybeOwned<Tensor>& cdata) { return *cdata; }
inline const Tensor& tensor_in(PyObject* object) { return held(reinterpret_cast<THPVariable*>(object)->cdata); }
#else
inline const Tensor& tensor_in(PyObject* object) { return THPVariable_Unpack(object); }
#endif

inline bool is_exact(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass; }

inline bool is_plain_object(PyObject* object) {
  return is_exact(object) || reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass;
}

inline bool is_tensor(PyObject* object) {
  if (is_plain_object(object)) return true;
  const int answer = PyObject_IsInstance(object, THPVariableClass);
  if (answer < 0) PyErr_Clear();
  return answer == 1;
}

// A Python capsule of a C++ object, under the name of the object's type.
template <typename Held>
Held* held_by(PyObject* capsule) {
  return static_cast<Held*>(PyCapsule_GetPointer(capsule, Held::NAME));
}

template <typename Held>
PyObject* capsule_of(Held* held) {
  return PyCapsule_New(held, Held::NAME, [](PyObject* capsule) { delete held_by<Held>(capsule); });
}

// A Tensor is a TensorBase with more functions; it need not be complete here.
inline const Tensor& grad_of(const c10::TensorImpl* impl) { return reinterpret_cast<const Tensor&>(impl->grad()); }
inline const Tensor& grad_of(const Tensor& tensor) { return grad_of(tensor.unsafeGetTensorImpl()); }
inline Tensor& mutable_grad_of(const Tensor& tensor) {
  return reinterpret_cast<Tensor&>(tensor.unsafeGetTensorImpl()->mutable_grad());
}

}  // namespace
