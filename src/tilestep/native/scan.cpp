// Looks at the tensors of an optimizer before a step: one pass in C++ in place of one Python call a tensor and question.
//
// A scanner remembers parameters and what their gradients were; `scan` says whether anything beside the gradients'
// addresses has changed, and writes those. Of a DTensor it looks at the part that lies on this rank. Everything it does
// not know is left to the Python path.

#include "tensors.h"

#include <c10/core/InferenceMode.h>
#include <structmember.h>

#include <algorithm>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "arrivals.h"

namespace {

// Bits, so that many answers make one. UNSURE stays in here: the answer needs Python, which only the thread that holds
// the interpreter may call.
enum Answer { SAME = 0, MOVED = 1, CHANGED = 2, UNSURE = 4, OTHER_STATE = 8 };

// A DTensor's parameter keeps its local part and the layout that its gradients have; both are null for a plain tensor.
struct Remembered {
  PyObject* param;
  PyObject* local;
  PyObject* layout;
  void* param_address;
  void* grad_address;
  uint64_t description, grad_description;
  bool has_grad;
};

// Where objects of a type keep what their attributes of these names give: read without a call, as fast as a field.
struct Slots {
  PyTypeObject* type = nullptr;
  Py_ssize_t local = 0, layout = 0;
};

// The spans of memory that steps write, by their first addresses; the ends are the largest up to each.
struct Written {
  std::vector<int64_t> starts, ends;
  bool overlaps(int64_t address, size_t bytes) const {
    const auto stop = address + static_cast<int64_t>(bytes);
    const auto before = std::lower_bound(starts.begin(), starts.end(), stop) - starts.begin();
    return before > 0 && ends[before - 1] > address;
  }
};

struct Scanner {
  static constexpr char NAME[] = "tilestep.Scanner";
  Slots slots;
  Written written;
  std::vector<Remembered> tensors;
  // Memory of the gradients that the last look has seen: borrowed by the look, owned until `release`.
  std::vector<c10::StorageImpl*> seen;
  std::vector<c10::Storage> held;
  ~Scanner() {
    for (auto& tensor : tensors) {
      Py_DECREF(tensor.param);
      Py_XDECREF(tensor.local);
      Py_XDECREF(tensor.layout);
    }
    Py_XDECREF(slots.type);
  }
};

bool is_plain(const Tensor& tensor) {
  // What a subclass holds its own way is not in the storage; a nested tensor has no sizes to ask for.
  const bool subclass = tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  return !subclass && !tensor.is_nested() && tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_complex() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

void* address_of(const Tensor& tensor) {
  // The storage's pointer, without materializing a copy-on-write tensor.
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  auto* base = static_cast<const char*>(storage.data());
  if (base == nullptr) return nullptr;
  return const_cast<char*>(base) + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

// Odd numbers without order.
constexpr uint64_t ODD[] = {
    0x91D93080F9B439FD, 0x3CEAAF308142C8EB, 0x627655DAA05F1119, 0x9DFB369BAB13DFAF,
    0x0FF9BB510944FE0D, 0x6301BBFCA0C5154F, 0x047A8387CDDE8D51, 0x6FCED11D2BD8A1E7,
    0xB7C1DCE27F7695F5, 0x3A124C647E02FF05, 0x5CBD0BA3A1A6BCDF, 0x66080F174C96D8E3,
    0x42F2DC05873F9BD1, 0xB120A366F0BBE9CF, 0xCE4CDA11B43C589B, 0x78B7D0AC84773CE1,
    0x48668D77E827062D, 0x2330FCF1562AE4B9, 0xE36BF9B3DDCB369D, 0xC1ACC9906424550B,
    0xF065A1C284CC4549, 0x9AD9B9A25E78454D, 0xF6A730B7B12E9EED, 0x993565976FBAF663,
    0xC5C2C2AF3977A655, 0x8DF08078A22EA181, 0x952C466E473A1797, 0xF3194A3B381E53E7,
    0xDAFA3A387F006745, 0xC498B6E73648245F, 0x675A2E199B58BA8D, 0xAB57F9854332C3DB,
    0x19F9CBEF0F69A4D1, 0xC1B87F1A7323691B, 0x75365E1458294A91, 0x2EB737282FEA875F,
};
constexpr size_t MOST_DIMS = (sizeof(ODD) / sizeof(ODD[0]) - 2) / 2;

// A tensor is unchanged if its address and this number are: type of its elements, device, dispatch keys (lazy negation
// and conjugation, zero tensors, subclasses), sizes, strides. `tensor_watch.py` says the same in Python. One number, since
// what is known of a tensor then fits into a line of the cache, and a look at thousands of them costs what it reads. Its
// products wait for no other. Two tensors that differ give the same number about once in 2^63.
uint64_t description_of(const Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const c10::Device device = tensor.device();
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  const auto kind = sizes.size() << 24 | static_cast<uint64_t>(tensor.scalar_type()) << 16 |
                    static_cast<uint64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index());
  uint64_t number = impl->key_set().raw_repr() * ODD[0] + kind * ODD[1];
  const size_t dims = std::min(sizes.size(), MOST_DIMS);
  for (size_t dim = 0; dim < dims; ++dim)
    number += static_cast<uint64_t>(sizes[dim]) * ODD[2 * dim + 2] + static_cast<uint64_t>(strides[dim]) * ODD[2 * dim + 3];
  for (size_t dim = dims; dim < sizes.size(); ++dim)
    for (const int64_t entry : {sizes[dim], strides[dim]}) number = (number ^ (number >> 32) ^ entry) * ODD[0];
  return number;
}

void prefetch_object(PyObject* object) {
  if (object != nullptr) __builtin_prefetch(object);
}

// All of a tensor but its storage; the object must be in the cache.
void prefetch_tensor(const c10::TensorImpl* impl) {
  const auto* bytes = reinterpret_cast<const char*>(impl);
  for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(bytes + line);
}

void prefetch_storage(const c10::TensorImpl* impl) {
  __builtin_prefetch(const_cast<c10::TensorImpl*>(impl)->unsafe_storage().unsafeGetStorageImpl());
}

// The place of a type's slot in its objects, or 0 where it keeps the attribute otherwise.
Py_ssize_t slot_of(PyTypeObject* type, PyObject* name) {
  PyObject* attribute = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name);
  if (attribute == nullptr) PyErr_Clear();
  Py_ssize_t offset = 0;
  if (attribute != nullptr && Py_TYPE(attribute) == &PyMemberDescr_Type) {
    const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(attribute)->d_member;
    if (member->type == T_OBJECT_EX) offset = member->offset;
  }
  Py_XDECREF(attribute);
  return offset;
}

// What a slot holds, borrowed; null where it is empty or the object is of another type.
PyObject* in_slot(const Slots& slots, PyObject* object, Py_ssize_t offset) {
  if (object == nullptr || Py_TYPE(object) != slots.type) return nullptr;
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

bool equal_attributes(PyObject* left, PyObject* right, const char* name) {
  PyObject* first = PyObject_GetAttrString(left, name);
  PyObject* second = first == nullptr ? nullptr : PyObject_GetAttrString(right, name);
  const int equal = second == nullptr ? 0 : PyObject_RichCompareBool(first, second, Py_EQ);
  Py_XDECREF(first);
  Py_XDECREF(second);
  if (equal < 0 || second == nullptr) PyErr_Clear();
  return equal == 1;
}

// A tensor's object, borrowed from it; null where it has none.
PyObject* object_of(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj(); }

// The local part of a DTensor's gradient: SAME, CHANGED where it does not lie as its parameter, UNSURE where its layout
// is another object and `may_ask` does not let Python compare them.
int local_gradient(const Slots& slots, Remembered& remembered, const Tensor& grad, bool may_ask, PyObject*& part) {
  PyObject* object = object_of(grad);
  part = in_slot(slots, object, slots.local);
  PyObject* layout = in_slot(slots, object, slots.layout);
  if (part == nullptr || layout == nullptr || !is_exact(part)) return CHANGED;
  if (layout == remembered.layout) return SAME;
  if (!may_ask) return UNSURE;
  if (!equal_attributes(layout, remembered.layout, "placements") || !equal_attributes(layout, remembered.layout, "mesh"))
    return CHANGED;
  Py_INCREF(layout);
  Py_SETREF(remembered.layout, layout);
  return SAME;
}

// What a parameter is from now on; false where it is none that this can look at.
bool remember_param(Slots& slots, PyObject* names, PyObject* object, Remembered& remembered) {
  if (!is_tensor(object)) return false;
  PyTypeObject* type = Py_TYPE(object);
  const Py_ssize_t local_slot = slot_of(type, PyTuple_GET_ITEM(names, 0));
  const Py_ssize_t layout_slot = slot_of(type, PyTuple_GET_ITEM(names, 1));
  if (local_slot != 0 && layout_slot != 0) {
    if (slots.type == nullptr) {
      Py_INCREF(type);
      slots = {type, local_slot, layout_slot};
    }
    PyObject* local = in_slot(slots, object, slots.local);
    PyObject* layout = in_slot(slots, object, slots.layout);
    if (local == nullptr || layout == nullptr || !is_exact(local)) return false;
    Py_INCREF(local);
    Py_INCREF(layout);
    remembered.local = local;
    remembered.layout = layout;
  }
  const Tensor& param = tensor_in(remembered.local == nullptr ? object : remembered.local);
  const Tensor& whole_grad = grad_of(tensor_in(object));
  // A write to an inference tensor counts no version, and is an error in threads that know of no inference mode.
  if (!is_plain(param) || param.is_inference() || tensor_in(object).is_inference()) return false;
  remembered.param_address = address_of(param);
  remembered.description = description_of(param);
  remembered.has_grad = whole_grad.defined();
  if (!remembered.has_grad) return true;
  PyObject* part = nullptr;
  if (remembered.local != nullptr && local_gradient(slots, remembered, whole_grad, true, part) != SAME) return false;
  const Tensor& grad = part == nullptr ? whole_grad : tensor_in(part);
  if (!is_plain(grad)) return false;
  remembered.grad_address = address_of(grad);
  remembered.grad_description = description_of(grad);
  return true;
}

// create(params, names, starts = 0, ends = 0, count = 0) -> scanner, or None where a parameter or gradient is not a plain strided
// tensor or a DTensor of such; names are what DTensors call their local part and their layout, the rest are the addresses
// and the length of the arrays of `Written`
PyObject* create(PyObject*, PyObject* args) {
  PyObject *list, *names;
  unsigned long long starts = 0, ends = 0;
  Py_ssize_t spans = 0;
  if (!PyArg_ParseTuple(args, "O!O!|KKn", &PyList_Type, &list, &PyTuple_Type, &names, &starts, &ends, &spans)) return nullptr;
  const auto *first = reinterpret_cast<const int64_t*>(starts), *last = reinterpret_cast<const int64_t*>(ends);
  auto* scanner = new Scanner;
  scanner->written = {{first, first + spans}, {last, last + spans}};
  const Py_ssize_t count = PyList_GET_SIZE(list);
  scanner->tensors.reserve(count);
  scanner->seen.resize(count);
  scanner->held.resize(count);
  for (Py_ssize_t index = 0; index < count; ++index) {
    PyObject* object = PyList_GET_ITEM(list, index);
    Py_INCREF(object);
    scanner->tensors.push_back(Remembered{object, nullptr, nullptr, nullptr, nullptr, 0, 0, false});
    if (!remember_param(scanner->slots, names, object, scanner->tensors.back())) {
      delete scanner;
      Py_RETURN_NONE;
    }
  }
  return capsule_of(scanner);
}

bool same_tensor(const Remembered& remembered, const Tensor& param, const Tensor& grad) {
  if (grad.defined() != remembered.has_grad || address_of(param) != remembered.param_address) return false;
  if (description_of(param) != remembered.description) return false;
  return !remembered.has_grad || (grad.has_storage() && description_of(grad) == remembered.grad_description);
}

// What a tensor and its gradient are by now; the gradient's address goes into the table, its memory into `seen`.
int look_at(const Written& written, Remembered& remembered, const Tensor& param, const Tensor& grad, int64_t& entry,
            c10::StorageImpl*& seen) {
  seen = nullptr;
  if (!same_tensor(remembered, param, grad)) return CHANGED;
  if (!remembered.has_grad) return SAME;
  void* address = address_of(grad);
  // An empty gradient may have no address; it is there all the same. One with elements and no address is not.
  if (address == nullptr && grad.numel() != 0) return CHANGED;
  seen = grad.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const bool moved = address != remembered.grad_address;
  remembered.grad_address = address;
  entry = param.numel() == 0 ? 1 : reinterpret_cast<int64_t>(address);
  if (!moved) return SAME;
  // One that shares its storage may lie in memory that the step writes.
  const bool shares = grad.unsafeGetTensorImpl()->unsafe_storage().use_count() > 1;
  return shares && written.overlaps(entry, grad.nbytes()) ? CHANGED : MOVED;
}

int look_at_part(Scanner& scanner, int64_t index, int64_t& entry, bool may_ask) {
  const Slots& slots = scanner.slots;
  const Written& written = scanner.written;
  Remembered& remembered = scanner.tensors[index];
  c10::StorageImpl*& seen = scanner.seen[index];
  const Tensor& whole = tensor_in(remembered.param);
  const Tensor& grad = grad_of(whole);
  if (remembered.local == nullptr) return look_at(written, remembered, whole, grad, entry, seen);
  if (in_slot(slots, remembered.param, slots.local) != remembered.local) return CHANGED;
  const Tensor& param = tensor_in(remembered.local);
  if (!grad.defined()) return look_at(written, remembered, param, grad, entry, seen);
  PyObject* part = nullptr;
  const int answer = local_gradient(slots, remembered, grad, may_ask, part);
  return answer == SAME ? look_at(written, remembered, param, tensor_in(part), entry, seen) : answer;
}

// What a look reads of a tensor is asked for in five stages, each of which needs what the one before has asked for.
template <int STAGE>
inline void prefetch_stage(const Remembered& remembered) {
  if constexpr (STAGE == 0) {
    prefetch_object(remembered.param);
    prefetch_object(remembered.local);
    return;
  }
  const c10::TensorImpl* whole = tensor_in(remembered.param).unsafeGetTensorImpl();
  const c10::TensorImpl* own = remembered.local == nullptr ? whole : tensor_in(remembered.local).unsafeGetTensorImpl();
  const auto* meta = reinterpret_cast<const char*>(whole->autograd_meta());
  if constexpr (STAGE == 1) {
    prefetch_tensor(own);
    if (own != whole) prefetch_tensor(whole);
  } else if constexpr (STAGE == 2) {
    prefetch_storage(own);
    __builtin_prefetch(meta);
    __builtin_prefetch(meta + 64);
  } else if (meta != nullptr && grad_of(whole).defined()) {
    const c10::TensorImpl* grad = grad_of(whole).unsafeGetTensorImpl();
    if constexpr (STAGE == 3) prefetch_tensor(grad);
    if constexpr (STAGE == 4)
      if (remembered.local == nullptr && grad->has_storage()) prefetch_storage(grad);
  }
}

// After a model has run nothing of these tensors is in a cache: each is asked for while others are looked at.
int look_between(Scanner& scanner, int64_t begin, int64_t end, int64_t* table, bool may_ask) {
  constexpr int64_t AHEAD = 8;
  const auto& tensors = scanner.tensors;
  const auto is_inside = [=](int64_t at) { return at >= begin && at < end; };
  int seen = SAME;
  for (int64_t index = begin; index < end + 5 * AHEAD; ++index) {
    if (is_inside(index)) prefetch_stage<0>(tensors[index]);
    if (is_inside(index - AHEAD)) prefetch_stage<1>(tensors[index - AHEAD]);
    if (is_inside(index - 2 * AHEAD)) prefetch_stage<2>(tensors[index - 2 * AHEAD]);
    if (is_inside(index - 3 * AHEAD)) prefetch_stage<3>(tensors[index - 3 * AHEAD]);
    if (is_inside(index - 4 * AHEAD)) prefetch_stage<4>(tensors[index - 4 * AHEAD]);
    const int64_t at = index - 5 * AHEAD;
    if (at < begin) continue;
    seen |= look_at_part(scanner, at, table[at], may_ask);
    if (seen & CHANGED) return seen;
  }
  return seen;
}

// Counts lie in the caches of the threads that have looked: each is asked for while others are counted.
constexpr size_t COUNTS_AHEAD = 16;

// Holds the gradients' memory that a look has seen. By the thread that holds the interpreter: counting a storage that has
// an object in Python counts that too.
void hold_seen(Scanner& scanner) {
  const auto& seen = scanner.seen;
  for (size_t index = 0; index < seen.size(); ++index) {
    if (index + COUNTS_AHEAD < seen.size()) __builtin_prefetch(seen[index + COUNTS_AHEAD], 1);
    if (seen[index] != nullptr)
      scanner.held[index] = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(seen[index]));
  }
}

void release_all(Scanner& scanner) {
  auto& held = scanner.held;
  for (size_t index = 0; index < held.size(); ++index) {
    if (index + COUNTS_AHEAD < held.size()) __builtin_prefetch(held[index + COUNTS_AHEAD].unsafeGetStorageImpl(), 1);
    // One by one: what is freed may run Python's code, and with it come here again.
    c10::Storage gone(std::move(held[index]));
  }
}

// What tensors were. `object` and `part` (a DTensor's local part) are null where they may be other objects at the next
// look. Otherwise what the object has is asked for anew at each look: a reference to that, even a weak one, would forbid
// `swap_tensors`.
struct Watched {
  PyObject* object;
  PyObject* part;
  PyTypeObject* type;
  void* address;
  uint64_t description;
};

struct Watch {
  static constexpr char NAME[] = "tilestep.Watch";
  Slots slots;
  std::vector<Watched> tensors;
  ~Watch() {
    for (auto& tensor : tensors) {
      Py_XDECREF(tensor.object);
      Py_XDECREF(tensor.part);
    }
    Py_XDECREF(slots.type);
  }
};

// watch(tensors, names = None) -> what `look` compares with, or None where a tensor is neither a plain strided one nor,
// with names (as for `create`), a DTensor of such. With names the tensors themselves are looked at from then on, without
// them lists of others.
PyObject* watch(PyObject*, PyObject* args) {
  PyObject *list, *names = Py_None;
  if (!PyArg_ParseTuple(args, "O!|O", &PyList_Type, &list, &names)) return nullptr;
  const bool fixed = PyTuple_Check(names);
  auto* watched = new Watch;
  PyObject* capsule = capsule_of(watched);
  watched->tensors.reserve(PyList_GET_SIZE(list));
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(list); ++index) {
    PyObject* object = PyList_GET_ITEM(list, index);
    PyObject* part = nullptr;
    Slots& slots = watched->slots;
    if (fixed && is_tensor(object) && !is_exact(object)) {
      PyTypeObject* type = Py_TYPE(object);
      const Py_ssize_t slot = type == slots.type ? slots.local : slot_of(type, PyTuple_GET_ITEM(names, 0));
      if (slot != 0 && slots.type == nullptr) {
        Py_INCREF(type);
        slots = {type, slot, 0};
      }
      if (slot != 0) part = in_slot(slots, object, slot);
    }
    PyObject* own = part == nullptr ? object : part;
    if (!is_tensor(own) || !is_plain(tensor_in(own))) {
      Py_DECREF(capsule);
      Py_RETURN_NONE;
    }
    const Tensor& tensor = tensor_in(own);
    Py_XINCREF(part);
    watched->tensors.push_back({fixed ? Py_NewRef(object) : nullptr, part, Py_TYPE(object), address_of(tensor), description_of(tensor)});
  }
  return capsule;
}

int look_at(const Watched& one, const Tensor& tensor) {
  if (!tensor.has_storage() || description_of(tensor) != one.description) return CHANGED;
  return address_of(tensor) == one.address ? SAME : MOVED;
}

PyObject* own_object(const Watched& one) { return one.part == nullptr ? one.object : one.part; }

bool is_unmoved(const Watch& watch, const Watched& one) {
  if (one.part != nullptr && in_slot(watch.slots, one.object, watch.slots.local) != one.part) return false;
  return look_at(one, tensor_in(own_object(one))) == SAME;
}

// Thousands of tensors, none of them in a cache after a model has run: each is asked for while others are looked at.
bool are_unmoved(const Watch* watch, int64_t begin, int64_t end) {
  if (begin == end) return true;
  constexpr int64_t AHEAD = 12;
  const auto& tensors = watch->tensors;
  for (int64_t index = begin; index < end + 3 * AHEAD; ++index) {
    if (index < end) {
      prefetch_object(tensors[index].object);
      prefetch_object(tensors[index].part);
    }
    if (index >= begin + AHEAD && index - AHEAD < end)
      prefetch_tensor(tensor_in(own_object(tensors[index - AHEAD])).unsafeGetTensorImpl());
    if (index >= begin + 2 * AHEAD && index - 2 * AHEAD < end)
      prefetch_storage(tensor_in(own_object(tensors[index - 2 * AHEAD])).unsafeGetTensorImpl());
    if (index >= begin + 3 * AHEAD && !is_unmoved(*watch, tensors[index - 3 * AHEAD])) return false;
  }
  return true;
}

// look(watch, tensors) -> SAME, MOVED or CHANGED; without tensors (None), of a watch with names, SAME or CHANGED
PyObject* look(PyObject*, PyObject* args) {
  PyObject *capsule, *list;
  if (!PyArg_ParseTuple(args, "OO", &capsule, &list)) return nullptr;
  auto* watched = held_by<Watch>(capsule);
  if (watched == nullptr) return nullptr;
  const auto& tensors = watched->tensors;
  const auto count = static_cast<int64_t>(tensors.size());
  if (!PyList_Check(list)) return PyLong_FromLong(are_unmoved(watched, 0, count) ? SAME : CHANGED);
  if (PyList_GET_SIZE(list) != count) return PyLong_FromLong(CHANGED);
  int answer = SAME;
  for (int64_t index = 0; index < count; ++index) {
    PyObject* object = PyList_GET_ITEM(list, index);
    if (Py_TYPE(object) != tensors[index].type) return PyLong_FromLong(CHANGED);
    answer |= look_at(tensors[index], tensor_in(object));
    if (answer & CHANGED) return PyLong_FromLong(CHANGED);
  }
  return PyLong_FromLong(answer);
}

// remember(watch, tensors): take the addresses of tensors that look() did not call CHANGED
PyObject* remember(PyObject*, PyObject* args) {
  PyObject *capsule, *list;
  if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyList_Type, &list)) return nullptr;
  auto* watched = held_by<Watch>(capsule);
  if (watched == nullptr) return nullptr;
  auto& tensors = watched->tensors;
  for (size_t index = 0; index < tensors.size() && static_cast<Py_ssize_t>(index) < PyList_GET_SIZE(list); ++index)
    tensors[index].address = address_of(tensor_in(PyList_GET_ITEM(list, index)));
  Py_RETURN_NONE;
}

// scan(scanner, address of int64[count], threads, states) -> SAME or MOVED (the addresses are written), CHANGED, or
// OTHER_STATE where a tensor of the watch `states` (None: not looked at) is not what it was. But for CHANGED the gradients' memory stays until
// `release`, whatever other threads do to the parameters' `grad` meanwhile.
PyObject* scan(PyObject*, PyObject* args) {
  PyObject *capsule, *states_capsule;
  unsigned long long table_address;
  int threads;
  if (!PyArg_ParseTuple(args, "OKiO", &capsule, &table_address, &threads, &states_capsule)) return nullptr;
  Scanner* scanner = held_by<Scanner>(capsule);
  const Watch* states = scanner == nullptr || states_capsule == Py_None ? nullptr : held_by<Watch>(states_capsule);
  if (PyErr_Occurred() != nullptr) return nullptr;
  auto* table = reinterpret_cast<int64_t*>(table_address);
  const auto count = static_cast<int64_t>(scanner->tensors.size());
  const auto state_count = states == nullptr ? 0 : static_cast<int64_t>(states->tensors.size());
  release_all(*scanner);
  int seen = threads > 1 ? SAME : UNSURE;
  bool same_states = true;
  if (threads > 1) {
    // Nothing of Python is called or counted: other threads may read while this one holds the interpreter.
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : seen) reduction(&& : same_states)
    for (int part = 0; part < threads; ++part) {
      seen |= look_between(*scanner, count * part / threads, count * (part + 1) / threads, table, false);
      same_states = are_unmoved(states, state_count * part / threads, state_count * (part + 1) / threads) && same_states;
    }
  } else {
    same_states = are_unmoved(states, 0, state_count);
  }
  if (seen & UNSURE) seen = (seen & MOVED) | look_between(*scanner, 0, count, table, true);
  if (seen & CHANGED) return PyLong_FromLong(CHANGED);
  hold_seen(*scanner);
  return PyLong_FromLong(same_states ? seen : OTHER_STATE);
}

// release(scanner): let go of the gradients' memory that the last look holds
PyObject* release(PyObject*, PyObject* capsule) {
  Scanner* scanner = held_by<Scanner>(capsule);
  if (scanner == nullptr) return nullptr;
  release_all(*scanner);
  Py_RETURN_NONE;
}

// same_list(left, right) -> whether two lists hold the same objects
PyObject* same_list(PyObject*, PyObject* args) {
  PyObject *left, *right;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &left, &PyList_Type, &right)) return nullptr;
  PyObject **first = PySequence_Fast_ITEMS(left), **second = PySequence_Fast_ITEMS(right);
  return PyBool_FromLong(std::equal(first, first + PyList_GET_SIZE(left), second, second + PyList_GET_SIZE(right)));
}

void bump_one(const Remembered& remembered) {
  if (!remembered.has_grad) return;
  tensor_in(remembered.param).unsafeGetTensorImpl()->bump_version();
  if (remembered.local != nullptr) tensor_in(remembered.local).unsafeGetTensorImpl()->bump_version();
}

// bump(written, threads = 1): every tensor of a list, or every parameter of a scanner that has a gradient, was written to
PyObject* bump(PyObject*, PyObject* args) {
  PyObject* written;
  int threads = 1;
  if (!PyArg_ParseTuple(args, "O|i", &written, &threads)) return nullptr;
  if (PyList_Check(written)) {
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(written); ++index) {
      PyObject* object = PyList_GET_ITEM(written, index);
      if (!is_tensor(object)) return PyErr_Format(PyExc_TypeError, "bump() takes tensors");
      const Tensor& tensor = tensor_in(object);
      if (!tensor.is_inference())
        tensor.unsafeGetTensorImpl()->bump_version();
      else if (!c10::InferenceMode::is_enabled())
        return PyErr_Format(PyExc_RuntimeError, "Inplace update to inference tensor outside InferenceMode is not allowed");
    }
    Py_RETURN_NONE;
  }
  Scanner* scanner = held_by<Scanner>(written);
  if (scanner == nullptr) return nullptr;
  const auto count = static_cast<int64_t>(scanner->tensors.size());
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t index = 0; index < count; ++index) bump_one(scanner->tensors[index]);
  Py_RETURN_NONE;
}

// survey(tensors) -> the sum of their versions, whether one has a gradient, and a byte each: whether it requires one
PyObject* survey(PyObject*, PyObject* list) {
  if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "survey() takes a list");
  unsigned long long versions = 0;
  bool has_gradient = false;
  // Kept for the thread that holds the interpreter: what is allocated after a backward has the allocator tidy up what
  // that has freed, and takes longer than all else that is done here.
  static std::vector<char> trains;
  static std::vector<const c10::TensorImpl*> tensors;
  static PyObject* kept = nullptr;
  trains.resize(PyList_GET_SIZE(list));
  tensors.resize(trains.size());
  // A model has run since the last look, and nothing of these is in a cache any more: fetched one after the other they
  // would take longer than all else, so kept stage asks for what the next one reads.
  for (size_t index = 0; index < trains.size(); ++index) __builtin_prefetch(PyList_GET_ITEM(list, index));
  for (size_t index = 0; index < trains.size(); ++index) {
    PyObject* object = PyList_GET_ITEM(list, index);
    if (!is_tensor(object)) return PyErr_Format(PyExc_TypeError, "survey() takes tensors");
    tensors[index] = tensor_in(object).unsafeGetTensorImpl();
    __builtin_prefetch(tensors[index]);
    __builtin_prefetch(reinterpret_cast<const char*>(tensors[index]) + 64);
    __builtin_prefetch(reinterpret_cast<const char*>(tensors[index]) + 128);
  }
  for (const auto* tensor : tensors) {
    __builtin_prefetch(tensor->autograd_meta());
    // A counter is a pointer to the number.
    __builtin_prefetch(*reinterpret_cast<void* const*>(&tensor->version_counter()));
  }
  for (size_t index = 0; index < trains.size(); ++index) {
    const Tensor& tensor = tensor_in(PyList_GET_ITEM(list, index));
    if (tensor.is_inference())
      return PyErr_Format(PyExc_TypeError, "survey() takes tensors that count their versions");
    versions += tensor.unsafeGetTensorImpl()->version_counter().current_version();
    has_gradient |= grad_of(tensor).defined();
    trains[index] = tensor.requires_grad();
  }
  const auto count = static_cast<Py_ssize_t>(trains.size());
  if (kept == nullptr || PyBytes_GET_SIZE(kept) != count || !std::equal(trains.begin(), trains.end(), PyBytes_AS_STRING(kept)))
    Py_XSETREF(kept, PyBytes_FromStringAndSize(trains.data(), count));
  // Its own before the tuple is made, which may collect garbage and with it come here again.
  Py_XINCREF(kept);
  return kept == nullptr ? nullptr : Py_BuildValue("KNN", versions, PyBool_FromLong(has_gradient), kept);
}

// take(params, types) -> the gradients that some tensors have, which have none from now on; or None where one of them is
// of another type
PyObject* take(PyObject*, PyObject* args) {
  PyObject *list, *types;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &list, &PyTuple_Type, &types)) return nullptr;
  PyObject **first = &PyTuple_GET_ITEM(types, 0), **last = first + PyTuple_GET_SIZE(types);
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(list); ++index)
    if (std::find(first, last, reinterpret_cast<PyObject*>(Py_TYPE(PyList_GET_ITEM(list, index)))) == last) Py_RETURN_NONE;
  PyObject* taken = PyList_New(0);
  for (Py_ssize_t index = 0; taken != nullptr && index < PyList_GET_SIZE(list); ++index) {
    Tensor& grad = mutable_grad_of(tensor_in(PyList_GET_ITEM(list, index)));
    if (!grad.defined()) continue;
    PyObject* object = THPVariable_Wrap(grad);
    if (object == nullptr || PyList_Append(taken, object) != 0) Py_CLEAR(taken);
    Py_XDECREF(object);
    // Its object lives in the list: nothing of Python's runs here.
    if (taken != nullptr) grad.reset();
  }
  return taken;
}

// memory_of(tensors, names) -> one tensor for each memory that they have, of DTensors their local parts; and whatever is
// not a plain tensor. names as for `create`
PyObject* memory_of(PyObject*, PyObject* args) {
  PyObject *list, *names;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &list, &PyTuple_Type, &names)) return nullptr;
  PyObject* parts = PyList_New(0);
  Slots slots;
  std::unordered_set<const void*> seen;
  for (Py_ssize_t index = 0; parts != nullptr && index < PyList_GET_SIZE(list); ++index) {
    PyObject* object = PyList_GET_ITEM(list, index);
    if (!is_exact(object) && Py_TYPE(object) != slots.type)
      slots = {Py_TYPE(object), slot_of(Py_TYPE(object), PyTuple_GET_ITEM(names, 0)), 0};
    PyObject* part = slots.local == 0 ? nullptr : in_slot(slots, object, slots.local);
    if (part == nullptr) part = object;
    if (is_exact(part) && tensor_in(part).has_storage()) {
      const auto& storage = tensor_in(part).unsafeGetTensorImpl()->unsafe_storage();
      if (!seen.insert(storage.unsafeGetStorageImpl()).second) continue;
    }
    if (PyList_Append(parts, part) != 0) Py_CLEAR(parts);
  }
  return parts;
}

PyMethodDef methods[] = {{"create", create, METH_VARARGS, nullptr},
                         {"scan", scan, METH_VARARGS, nullptr},
                         {"release", release, METH_O, nullptr},
                         {"same_list", same_list, METH_VARARGS, nullptr},
                         {"bump", bump, METH_VARARGS, nullptr},
                         {"watch", watch, METH_VARARGS, nullptr},
                         {"look", look, METH_VARARGS, nullptr},
                         {"remember", remember, METH_VARARGS, nullptr},
                         {"survey", survey, METH_O, nullptr},
                         {"take", take, METH_VARARGS, nullptr},
                         {"memory_of", memory_of, METH_VARARGS, nullptr},
                         {"new_pass", new_pass, METH_O, nullptr},
                         {"follow", follow, METH_VARARGS, nullptr},
                         {"know_stream", know_stream, METH_VARARGS, nullptr},
                         {"new_awaited", new_awaited, METH_O, nullptr},
                         {"await_places", await_places, METH_VARARGS, nullptr},
                         {"come", come, METH_VARARGS, nullptr},
                         {"left", left, METH_O, nullptr},
                         {"new_hook", new_hook, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tilestep_scan", nullptr, -1, methods,
                          nullptr,               nullptr,         nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_tilestep_scan() { return PyModule_Create(&definition); }
