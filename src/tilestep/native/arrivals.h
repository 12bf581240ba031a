// Counts gradients in backward in C++: a Python call for each would dominate the cost.
//
// A hook calls Python where it must: at the first gradient of a backward pass, at the last gradient of a bucket, and for
// gradients that are unexpected or come from another stream.

#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tensors.h"

namespace {

// The backward pass whose gradients are counted, -1 for none, and the streams that Python knows to write gradients.
struct Pass {
  static constexpr char NAME[] = "tilestep.Pass";
  int64_t number = -1;
  bool by_stream = false;
  std::vector<std::pair<c10::Device, c10::StreamId>> streams;
};

// A hook: the pass, the awaited gradients of its bucket (a bytearray with a 1 per place), its place there, and the Python
// function that it replaces.
struct Hook {
  static constexpr char NAME[] = "tilestep.Hook";
  PyObject *pass_capsule, *awaited, *function;
  Pass* pass;
  Py_ssize_t place;
  ~Hook() {
    Py_DECREF(pass_capsule);
    Py_DECREF(awaited);
    Py_DECREF(function);
  }
};

// new_pass(by_stream) -> a pass; by_stream: whether Python must know which streams write gradients
PyObject* new_pass(PyObject*, PyObject* by_stream) {
  auto* pass = new Pass;
  pass->by_stream = PyObject_IsTrue(by_stream) == 1;
  return capsule_of(pass);
}

std::pair<c10::Device, c10::StreamId> stream_of(const c10::Device& device) {
  return {device, c10::impl::VirtualGuardImpl(device.type()).getStream(device).id()};
}

// note(pass, number or tensor): count the gradients of this backward pass from now on, -1 for none; or note that Python
// knows that the current stream of the tensor's device writes gradients
PyObject* note(PyObject*, PyObject* args) {
  PyObject *capsule, *noted;
  if (!PyArg_ParseTuple(args, "OO", &capsule, &noted)) return nullptr;
  Pass* pass = held_by<Pass>(capsule);
  if (pass == nullptr) return nullptr;
  if (is_tensor(noted)) {
    const auto stream = stream_of(tensor_in(noted).device());
    if (std::find(pass->streams.begin(), pass->streams.end(), stream) == pass->streams.end()) pass->streams.push_back(stream);
    Py_RETURN_NONE;
  }
  const long long number = PyLong_AsLongLong(noted);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  pass->number = number;
  pass->streams.clear();
  Py_RETURN_NONE;
}

bool is_counted(const Hook& hook, const Tensor& tensor) {
  const Pass& pass = *hook.pass;
  if (pass.number == -1 || pass.number != torch::autograd::get_current_graph_task_id()) return false;
  const char* awaited = PyByteArray_AS_STRING(hook.awaited);
  const Py_ssize_t count = PyByteArray_GET_SIZE(hook.awaited);
  if (hook.place >= count || !awaited[hook.place] || std::count(awaited, awaited + count, 1) < 2) return false;
  if (!pass.by_stream) return true;
  const auto stream = stream_of(tensor.device());
  return std::find(pass.streams.begin(), pass.streams.end(), stream) != pass.streams.end();
}

PyObject* announced(PyObject* capsule, PyObject* object) {
  auto* hook = held_by<Hook>(capsule);
  if (hook == nullptr) return nullptr;
  if (is_tensor(object) && is_counted(*hook, tensor_in(object))) {
    PyByteArray_AS_STRING(hook->awaited)[hook->place] = 0;
    Py_RETURN_NONE;
  }
  return PyObject_CallOneArg(hook->function, object);
}

PyMethodDef announced_method = {"announced", announced, METH_O, nullptr};

// new_hook(pass, awaited, place, function) -> a hook to call with a tensor when its gradient is ready: clears its place in
// the bytearray, or calls the function
PyObject* new_hook(PyObject*, PyObject* args) {
  PyObject *pass_capsule, *awaited, *function;
  Py_ssize_t place;
  if (!PyArg_ParseTuple(args, "OYnO", &pass_capsule, &awaited, &place, &function)) return nullptr;
  Pass* pass = held_by<Pass>(pass_capsule);
  if (pass == nullptr) return nullptr;
  auto* hook = new Hook{Py_NewRef(pass_capsule), Py_NewRef(awaited), Py_NewRef(function), pass, place};
  PyObject* capsule = capsule_of(hook);
  PyObject* made = PyCFunction_New(&announced_method, capsule);
  Py_DECREF(capsule);
  return made;
}

}  // namespace
