// Gradients as backward announces them, counted in C++: a call for each in Python takes longer than all else that is done.
//
// A hook goes to Python for what has to be done there: at the first gradient of a backward pass, at the last one that a
// bucket waits for, and for whatever comes unexpectedly or from another stream.

#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tensors.h"

namespace {

// The backward pass whose gradients can be counted, -1 for none, and the streams that Python knows to have written some.
struct Pass {
  int64_t number = -1;
  bool by_stream = false;
  std::vector<std::pair<c10::Device, c10::StreamId>> streams;
};

struct Awaited {
  static constexpr char NAME[] = "tilestep.Awaited";
  std::shared_ptr<Pass> pass;
  std::vector<char> places;
  size_t left = 0;
};

// What a hook holds: its bucket, its place there, and the Python function that it stands for.
struct Hook {
  static constexpr char NAME[] = "tilestep.Hook";
  PyObject* awaited_capsule;
  Awaited* awaited;
  Py_ssize_t place;
  PyObject* function;
  Hook(PyObject* capsule, Awaited* counted, Py_ssize_t own_place, PyObject* called)
      : awaited_capsule(Py_NewRef(capsule)), awaited(counted), place(own_place), function(Py_NewRef(called)) {}
  ~Hook() {
    Py_DECREF(awaited_capsule);
    Py_DECREF(function);
  }
};

// new_awaited(by_stream) -> what a bucket waits for, nothing so far; by_stream says whether Python has to know which
// streams write gradients. new_awaited(awaited): the same, of which the gradients are counted together with another's
PyObject* new_awaited(PyObject*, PyObject* like) {
  std::shared_ptr<Pass> pass;
  if (PyCapsule_CheckExact(like)) {
    auto* other = held_by<Awaited>(like);
    if (other == nullptr) return nullptr;
    pass = other->pass;
  } else {
    pass = std::make_shared<Pass>();
    pass->by_stream = PyObject_IsTrue(like) == 1;
  }
  auto* awaited = new Awaited;
  awaited->pass = pass;
  return capsule_of(awaited);
}

// follow(awaited, number): from now on count the gradients of this backward pass, -1 for those of none
PyObject* follow(PyObject*, PyObject* args) {
  PyObject* capsule;
  long long number;
  if (!PyArg_ParseTuple(args, "OL", &capsule, &number)) return nullptr;
  auto* awaited = held_by<Awaited>(capsule);
  if (awaited == nullptr) return nullptr;
  awaited->pass->number = number;
  awaited->pass->streams.clear();
  Py_RETURN_NONE;
}

std::pair<c10::Device, c10::StreamId> stream_of(const c10::Device& device) {
  return {device, c10::impl::VirtualGuardImpl(device.type()).getStream(device).id()};
}

// know_stream(awaited, tensor): Python knows that the current stream of the tensor's device writes gradients
PyObject* know_stream(PyObject*, PyObject* args) {
  PyObject *capsule, *object;
  if (!PyArg_ParseTuple(args, "OO", &capsule, &object)) return nullptr;
  auto* awaited = held_by<Awaited>(capsule);
  if (awaited == nullptr) return nullptr;
  if (!is_tensor(object)) return PyErr_Format(PyExc_TypeError, "know_stream() takes a tensor");
  const auto stream = stream_of(tensor_in(object).device());
  auto& streams = awaited->pass->streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  Py_RETURN_NONE;
}

// await_places(awaited, bytes): wait for the places that have a one
PyObject* await_places(PyObject*, PyObject* args) {
  PyObject* capsule;
  const char* bytes;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(args, "Oy#", &capsule, &bytes, &count)) return nullptr;
  auto* awaited = held_by<Awaited>(capsule);
  if (awaited == nullptr) return nullptr;
  awaited->places.assign(bytes, bytes + count);
  awaited->left = std::count(bytes, bytes + count, 1);
  Py_RETURN_NONE;
}

bool waits_for(const Awaited& awaited, Py_ssize_t place) {
  return place >= 0 && place < static_cast<Py_ssize_t>(awaited.places.size()) && awaited.places[place];
}

// come(awaited, place) -> how many are still awaited when this one has come; -1 for none
PyObject* come(PyObject*, PyObject* args) {
  PyObject* capsule;
  Py_ssize_t place;
  if (!PyArg_ParseTuple(args, "On", &capsule, &place)) return nullptr;
  auto* awaited = held_by<Awaited>(capsule);
  if (awaited == nullptr) return nullptr;
  if (waits_for(*awaited, place)) {
    awaited->places[place] = 0;
    --awaited->left;
  }
  return PyLong_FromSize_t(awaited->left);
}

bool is_counted(const Awaited& awaited, Py_ssize_t place, const Tensor& tensor) {
  const Pass& pass = *awaited.pass;
  if (pass.number == -1 || pass.number != torch::autograd::get_current_graph_task_id()) return false;
  if (awaited.left < 2 || !waits_for(awaited, place)) return false;
  if (!pass.by_stream) return true;
  const auto stream = stream_of(tensor.device());
  return std::find(pass.streams.begin(), pass.streams.end(), stream) != pass.streams.end();
}

PyObject* announced(PyObject* capsule, PyObject* object) {
  auto* hook = held_by<Hook>(capsule);
  if (hook == nullptr) return nullptr;
  if (is_tensor(object) && is_counted(*hook->awaited, hook->place, tensor_in(object))) {
    hook->awaited->places[hook->place] = 0;
    --hook->awaited->left;
    Py_RETURN_NONE;
  }
  return PyObject_CallOneArg(hook->function, object);
}

PyMethodDef announced_method = {"announced", announced, METH_O, nullptr};

// new_hook(awaited, place, function) -> what to call with a tensor when its gradient has come: counts it, or calls function
PyObject* new_hook(PyObject*, PyObject* args) {
  PyObject *awaited_capsule, *function;
  Py_ssize_t place;
  if (!PyArg_ParseTuple(args, "OnO", &awaited_capsule, &place, &function)) return nullptr;
  auto* awaited = held_by<Awaited>(awaited_capsule);
  if (awaited == nullptr) return nullptr;
  PyObject* capsule = capsule_of(new Hook(awaited_capsule, awaited, place, function));
  PyObject* made = PyCFunction_New(&announced_method, capsule);
  Py_DECREF(capsule);
  return made;
}

}  // namespace
