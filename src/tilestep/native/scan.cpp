// Looks at the tensors of an optimizer before a step: one pass in C++ instead of Python calls per tensor.
//
// A table describes parameters, their gradients and states; `look` writes the addresses of gradients, and returns whether
// anything else has changed. For a DTensor it looks at the local part. Tensors of other types are left to `table.py`,
// which implements the same look in Python.

#include "tensors.h"

#include <c10/core/InferenceMode.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "arrivals.h"

namespace {

// Bits, so that results combine by `or`. UNSURE is internal: the result needs Python, which only the thread that holds the
// interpreter may call.
enum Answer { SAME = 0, MOVED = 1, CHANGED = 2, UNSURE = 4 };

// A remembered tensor; for a DTensor the local part, which must stay the same object. Each look reads the tensor from its
// Python object: a reference to the tensor, even a weak one, would forbid `swap_tensors`.
struct Known {
  PyObject *object = nullptr, *part = nullptr;
  void* address = nullptr;
  uint64_t description = 0;
  PyObject* own() const { return part == nullptr ? object : part; }
};

// A parameter and its gradient; the parameter is absent in a table of gradients. Gradients of a DTensor have a layout.
struct Row {
  Known param;
  PyObject* layout = nullptr;
  void* grad_address = nullptr;
  uint64_t grad_description = 0;
  bool has_grad = false;
};

// Offsets of the slots of a type's attributes: read without a call, as fast as a field.
struct Slots {
  PyTypeObject* type = nullptr;
  Py_ssize_t local = 0, layout = 0;
};

// The spans of memory that steps write, sorted by first address; each end is the largest so far.
struct Written {
  std::vector<int64_t> starts, ends;
  bool overlaps(int64_t address, size_t bytes) const {
    const auto stop = address + static_cast<int64_t>(bytes);
    const auto before = std::lower_bound(starts.begin(), starts.end(), stop) - starts.begin();
    return before > 0 && ends[before - 1] > address;
  }
};

struct Table {
  static constexpr char NAME[] = "tilestep.Table";
  Slots slots;
  Written written;
  std::vector<Row> rows;
  std::vector<Known> states;
  int threads = 1;  // of the last look
  bool own_grads = true;  // whether gradients are read from parameters, not from a list
  // Storages of the gradients of the last look: borrowed during the look, owned until `release`.
  std::vector<c10::StorageImpl*> seen;
  std::vector<c10::Storage> held;
  ~Table() {
    for (auto& row : rows) {
      Py_XDECREF(row.param.object);
      Py_XDECREF(row.param.part);
      Py_XDECREF(row.layout);
    }
    for (auto& state : states) {
      Py_XDECREF(state.object);
      Py_XDECREF(state.part);
    }
    Py_XDECREF(slots.type);
  }
};

bool is_plain(const Tensor& tensor) {
  // A subclass may store its values elsewhere; a nested tensor has no sizes.
  const bool subclass = tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  return !subclass && !tensor.is_nested() && tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

void* address_of(const Tensor& tensor) {
  // The storage's pointer, without materializing a copy-on-write tensor.
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  auto* base = static_cast<const char*>(storage.data());
  if (base == nullptr) return nullptr;
  return const_cast<char*>(base) + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

// Random odd numbers: those of splitmix64.
constexpr size_t MOST_DIMS = 17;
constexpr auto ODD = [] {
  std::array<uint64_t, 2 * MOST_DIMS + 2> numbers{};
  uint64_t state = 0;
  for (uint64_t& number : numbers) {
    uint64_t mixed = state += 0x9E3779B97F4A7C15;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    number = mixed ^ (mixed >> 31) | 1;
  }
  return numbers;
}();

// A tensor is unchanged if its address and this hash are equal: dtype, device, dispatch keys (lazy negation and
// conjugation, zero tensors, subclasses), sizes, strides. `table.py` compares the same in Python. A hash, since the record
// of a tensor then fits a cache line, and memory bandwidth bounds a look at thousands of tensors. Its products are
// independent. Different tensors have the same hash with a probability of about 2^-63.
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

// Prefetches some bytes of an object of C++. It is aligned to 16 bytes, so it may begin anywhere in a cache line.
void prefetch_bytes(const void* object, size_t first, size_t last) {
  const auto* bytes = static_cast<const char*>(object);
  for (size_t at = first; at < last; at += 64) __builtin_prefetch(bytes + at);
  __builtin_prefetch(bytes + last);
}

// A tensor in a Python object.
void prefetch_object(PyObject* object) {
  if (object != nullptr) __builtin_prefetch(&reinterpret_cast<THPVariable*>(object)->cdata);
}

// All of a tensor but its reference count, without its storage; its Python object must be in the cache.
void prefetch_tensor(const c10::TensorImpl* impl) { prefetch_bytes(impl, 16, sizeof(c10::TensorImpl) - 1); }

// The address of a storage and the flags that guard it.
void prefetch_storage(const c10::TensorImpl* impl) {
  prefetch_bytes(const_cast<c10::TensorImpl*>(impl)->unsafe_storage().unsafeGetStorageImpl(), 16, 63);
}

// The gradient of a tensor, which follows its name.
void prefetch_gradient(const c10::TensorImpl* impl) { prefetch_bytes(impl->autograd_meta(), 0, 47); }

// The offset of an attribute's slot in objects of a type, or 0 if the attribute is no slot.
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

// The borrowed value of a slot; null if it is empty or the object has another type.
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

// The borrowed Python object of a tensor; null if it has none.
PyObject* object_of(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj(); }

// The local part of a DTensor's gradient: SAME, CHANGED if its layout differs from the parameter's, UNSURE if its layout
// is another object and `may_ask` forbids a comparison in Python.
int local_gradient(const Slots& slots, Row& row, const Tensor& grad, bool may_ask, PyObject*& part) {
  PyObject* object = object_of(grad);
  part = in_slot(slots, object, slots.local);
  PyObject* layout = in_slot(slots, object, slots.layout);
  if (part == nullptr || layout == nullptr || !is_exact(part)) return CHANGED;
  if (layout == row.layout) return SAME;
  if (!may_ask) return UNSURE;
  if (!equal_attributes(layout, row.layout, "placements") || !equal_attributes(layout, row.layout, "mesh")) return CHANGED;
  Py_INCREF(layout);
  Py_SETREF(row.layout, layout);
  return SAME;
}

// The gradient of a row; null for none.
struct Gradient {
  int answer;
  const Tensor* tensor;
};

inline Gradient gradient_of(const Slots& slots, Row& row, PyObject* listed, bool may_ask) {
  if (listed == Py_None) return {SAME, nullptr};
  if (listed != nullptr) {
    if (!is_plain_object(listed)) {
      if (!may_ask) return {UNSURE, nullptr};
      if (!is_tensor(listed)) return {CHANGED, nullptr};
    }
    return {SAME, &tensor_in(listed)};
  }
  const Tensor& grad = grad_of(tensor_in(row.param.object));
  if (!grad.defined()) return {SAME, nullptr};
  if (row.param.part == nullptr) return {SAME, &grad};
  PyObject* part = nullptr;
  const int answer = local_gradient(slots, row, grad, may_ask, part);
  return {answer, answer == SAME ? &tensor_in(part) : nullptr};
}

// Remembers a tensor; false unless it is a plain strided tensor or a DTensor of one.
bool remember(Slots& slots, PyObject* names, PyObject* object, Known& known) {
  known.object = Py_NewRef(object);
  if (!is_plain_object(object)) {
    if (!is_tensor(object)) return false;
    PyTypeObject* type = Py_TYPE(object);
    if (slots.type == nullptr) {
      slots.local = slot_of(type, PyTuple_GET_ITEM(names, 0));
      slots.layout = slot_of(type, PyTuple_GET_ITEM(names, 1));
      if (slots.local == 0 || slots.layout == 0) return false;
      Py_INCREF(type);
      slots.type = type;
    }
    known.part = Py_XNewRef(in_slot(slots, object, slots.local));
    if (known.part == nullptr || !is_exact(known.part)) return false;
  }
  const Tensor& tensor = tensor_in(known.own());
  if (!is_plain(tensor)) return false;
  known.address = address_of(tensor);
  known.description = description_of(tensor);
  return true;
}

// As `remember`, for a parameter.
bool remember_param(Slots& slots, PyObject* names, PyObject* object, Row& row) {
  if (!remember(slots, names, object, row.param)) return false;
  if (row.param.part != nullptr) {
    row.layout = Py_XNewRef(in_slot(slots, object, slots.layout));
    if (row.layout == nullptr) return false;
  }
  // Inference tensors have no version counter, and writes raise in threads without inference mode.
  return !tensor_in(object).is_inference() && !tensor_in(row.param.own()).is_inference();
}

bool remember_gradient(const Slots& slots, Row& row, PyObject* listed) {
  const Gradient gradient = gradient_of(slots, row, listed, true);
  if (gradient.answer != SAME) return false;
  row.has_grad = gradient.tensor != nullptr;
  if (!row.has_grad) return true;
  if (!is_plain(*gradient.tensor)) return false;
  row.grad_address = address_of(*gradient.tensor);
  row.grad_description = description_of(*gradient.tensor);
  return true;
}

// create(params, states, names, gradients, starts = 0, ends = 0, spans = 0) -> table, or None if a tensor is neither a
// plain strided tensor nor a DTensor of one. Gradients are a list, and then a list in each look, or None: the gradients of
// the parameters. Parameters may be an empty list. `names` are the attributes of a DTensor's local part and layout; the
// rest are addresses and length of the arrays of `Written`.
PyObject* create(PyObject*, PyObject* args) {
  PyObject *params, *states, *names, *gradients;
  unsigned long long starts = 0, ends = 0;
  Py_ssize_t spans = 0;
  if (!PyArg_ParseTuple(args, "O!O!O!O|KKn", &PyList_Type, &params, &PyList_Type, &states, &PyTuple_Type, &names, &gradients,
                        &starts, &ends, &spans))
    return nullptr;
  const auto *first = reinterpret_cast<const int64_t*>(starts), *last = reinterpret_cast<const int64_t*>(ends);
  auto* table = new Table;
  PyObject* capsule = capsule_of(table);
  table->written = {{first, first + spans}, {last, last + spans}};
  table->own_grads = !PyList_Check(gradients);
  const Py_ssize_t count = PyList_GET_SIZE(table->own_grads ? params : gradients), state_count = PyList_GET_SIZE(states);
  const bool has_params = PyList_GET_SIZE(params) == count;
  table->rows.resize(count);
  table->states.resize(state_count);
  table->seen.resize(count);
  table->held.resize(count);
  bool fits = true;
  for (Py_ssize_t index = 0; fits && index < count; ++index) {
    Row& row = table->rows[index];
    fits = (!has_params || remember_param(table->slots, names, PyList_GET_ITEM(params, index), row)) &&
           remember_gradient(table->slots, row, table->own_grads ? nullptr : PyList_GET_ITEM(gradients, index));
  }
  for (Py_ssize_t index = 0; fits && index < state_count; ++index)
    fits = remember(table->slots, names, PyList_GET_ITEM(states, index), table->states[index]);
  if (fits) return capsule;
  Py_DECREF(capsule);
  Py_RETURN_NONE;
}

inline bool is_unmoved(const Slots& slots, const Known& known) {
  if (known.part != nullptr && in_slot(slots, known.object, slots.local) != known.part) return false;
  const Tensor& tensor = tensor_in(known.own());
  return tensor.has_storage() && address_of(tensor) == known.address && description_of(tensor) == known.description;
}

// Looks at the gradient of a row; writes a new address to `entry`, and the storage of a parameter's gradient to `seen`.
inline int look_at_gradient(Table& table, int64_t index, PyObject* listed, int64_t& entry, bool may_ask) {
  Row& row = table.rows[index];
  if (listed == nullptr) table.seen[index] = nullptr;
  const Gradient gradient = gradient_of(table.slots, row, listed, may_ask);
  if (gradient.answer != SAME) return gradient.answer;
  if ((gradient.tensor != nullptr) != row.has_grad) return CHANGED;
  if (!row.has_grad) return SAME;
  const Tensor& grad = *gradient.tensor;
  if (!grad.has_storage() || description_of(grad) != row.grad_description) return CHANGED;
  void* address = address_of(grad);
  const auto& storage = grad.unsafeGetTensorImpl()->unsafe_storage();
  if (listed == nullptr) table.seen[index] = storage.unsafeGetStorageImpl();
  if (address == row.grad_address) return SAME;
  // An empty gradient may have no address. A gradient with elements and no address does not count.
  const auto start = reinterpret_cast<int64_t>(address);
  if (address == nullptr && grad.numel() != 0) return CHANGED;
  // A gradient that shares its storage may overlap memory that the step writes.
  if (storage.use_count() > 1 && table.written.overlaps(start, grad.nbytes())) return CHANGED;
  entry = grad.numel() == 0 ? 1 : start;
  row.grad_address = address;
  return MOVED;
}

// After a model has run none of these tensors is in a cache: each is prefetched while others are looked at, in stages;
// each stage reads the data that the stage before has prefetched.
template <int STAGES, class Prefetch, class Visit>
int walk(int64_t begin, int64_t end, const Prefetch& prefetch, const Visit& visit) {
  // More would leave the first cache before they are read.
  constexpr int64_t AHEAD = 4;
  int seen = SAME;
  for (int64_t index = begin; begin < end && index < end + STAGES * AHEAD; ++index) {
#pragma GCC unroll 8
    for (int stage = 0; stage < STAGES; ++stage) {
      const int64_t at = index - stage * AHEAD;
      if (at >= begin && at < end) prefetch(at, stage);
    }
    const int64_t at = index - STAGES * AHEAD;
    if (at < begin) continue;
    seen |= visit(at);
    if (seen & CHANGED) return seen;
  }
  return seen;
}

const c10::TensorImpl* impl_of(PyObject* object) { return tensor_in(object).unsafeGetTensorImpl(); }

// The stages for a tensor with a known address: its object, its fields, its storage.
inline __attribute__((always_inline)) void prefetch_known(const Known& known, int stage) {
  if (stage == 0) {
    prefetch_object(known.object);
    prefetch_object(known.part);
  }
  if (stage == 1) prefetch_tensor(impl_of(known.own()));
  if (stage == 2) prefetch_storage(impl_of(known.own()));
}

// States, or parameters without their gradients: `known` returns one.
template <class Get>
int look_at_known(const Slots& slots, int64_t begin, int64_t end, const Get& known) {
  const auto prefetch = [&](int64_t at, int stage) __attribute__((always_inline)) { prefetch_known(known(at), stage); };
  return walk<3>(begin, end, prefetch, [&](int64_t at) { return is_unmoved(slots, known(at)) ? SAME : CHANGED; });
}

// Parameters and their own gradients.
int look_at_rows(Table& table, int64_t begin, int64_t end, int64_t* addresses, bool may_ask) {
  const auto& rows = table.rows;
  const auto prefetch = [&](int64_t at, int stage) __attribute__((always_inline)) {
    const Known& param = rows[at].param;
    prefetch_known(param, stage);
    if (stage == 0) return;
    const c10::TensorImpl* whole = impl_of(param.object);
    if (stage == 1 && param.part != nullptr) prefetch_tensor(whole);
    if (stage == 2) prefetch_gradient(whole);
    if (stage < 3 || !grad_of(whole).defined()) return;
    const c10::TensorImpl* grad = grad_of(whole).unsafeGetTensorImpl();
    if (stage == 3) prefetch_tensor(grad);
    if (stage == 4 && param.part == nullptr && grad->has_storage()) prefetch_storage(grad);
  };
  return walk<5>(begin, end, prefetch, [&](int64_t at) {
    if (!is_unmoved(table.slots, rows[at].param)) return static_cast<int>(CHANGED);
    return look_at_gradient(table, at, nullptr, addresses[at], may_ask);
  });
}

int look_at_list(Table& table, int64_t begin, int64_t end, PyObject* list, int64_t* addresses, bool may_ask) {
  int seen = SAME;
  for (int64_t at = begin; at < end && !(seen & CHANGED); ++at)
    seen |= look_at_gradient(table, at, PyList_GET_ITEM(list, at), addresses[at], may_ask);
  return seen;
}

// The part of a thread. `gradients` is a list, None, or False for no look at gradients.
int look_at_part(Table& table, PyObject* gradients, int64_t* addresses, int64_t number, int64_t parts, bool may_ask) {
  const auto count = static_cast<int64_t>(table.rows.size()), states = static_cast<int64_t>(table.states.size());
  const int64_t begin = count * number / parts, end = count * (number + 1) / parts;
  int seen = SAME;
  if (gradients == Py_None) {
    seen = look_at_rows(table, begin, end, addresses, may_ask);
  } else {
    if (count != 0 && table.rows[0].param.object != nullptr)
      seen = look_at_known(table.slots, begin, end, [&](int64_t at) -> const Known& { return table.rows[at].param; });
    if (!(seen & CHANGED) && gradients != Py_False) seen |= look_at_list(table, begin, end, gradients, addresses, may_ask);
  }
  if (seen & CHANGED) return seen;
  return seen | look_at_known(table.slots, states * number / parts, states * (number + 1) / parts,
                              [&](int64_t at) -> const Known& { return table.states[at]; });
}

// Reference counts are in the caches of the threads that looked: each is prefetched while others are counted.
constexpr size_t COUNTS_AHEAD = 16;

// Owns the storages of gradients of a look. In the thread that holds the interpreter: the reference count of a storage
// with a Python object counts that object too.
void hold_seen(Table& table) {
  const auto& seen = table.seen;
  for (size_t index = 0; index < seen.size(); ++index) {
    if (index + COUNTS_AHEAD < seen.size()) __builtin_prefetch(seen[index + COUNTS_AHEAD], 1);
    if (seen[index] != nullptr)
      table.held[index] = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(seen[index]));
  }
}

void release_all(Table& table) {
  auto& held = table.held;
  for (size_t index = 0; index < held.size(); ++index) {
    if (index + COUNTS_AHEAD < held.size()) __builtin_prefetch(held[index + COUNTS_AHEAD].unsafeGetStorageImpl(), 1);
    // One by one: a destructor may run Python code that calls this again.
    c10::Storage gone(std::move(held[index]));
  }
}

// look(table, address of int64[rows], gradients, threads) -> SAME or MOVED (the addresses are written), or CHANGED. Gradients
// are those of the parameters (None), a list, or not looked at (False). Unless the result is CHANGED, storages of the
// parameters' gradients are kept alive until `release`, whatever other threads do to `grad`.
PyObject* look(PyObject*, PyObject* args) {
  PyObject *capsule, *gradients;
  unsigned long long address;
  int threads;
  if (!PyArg_ParseTuple(args, "OKOi", &capsule, &address, &gradients, &threads)) return nullptr;
  Table* table = held_by<Table>(capsule);
  if (table == nullptr) return nullptr;
  const bool is_list = PyList_Check(gradients);
  if (gradients != Py_False && is_list == table->own_grads)
    return PyErr_Format(PyExc_TypeError, "look() takes a list if create() has");
  if (is_list && static_cast<size_t>(PyList_GET_SIZE(gradients)) != table->seen.size()) return PyLong_FromLong(CHANGED);
  auto* addresses = reinterpret_cast<int64_t*>(address);
  const bool holds = gradients == Py_None;
  if (holds) release_all(*table);
  table->threads = threads;
  int seen = threads > 1 ? SAME : UNSURE;
  if (threads > 1) {
    // No Python call or reference count: other threads may read while this thread holds the interpreter.
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : seen)
    for (int number = 0; number < threads; ++number) seen |= look_at_part(*table, gradients, addresses, number, threads, false);
  }
  if ((seen & UNSURE) && !(seen & CHANGED)) seen = (seen & MOVED) | look_at_part(*table, gradients, addresses, 0, 1, true);
  if (seen & CHANGED) return PyLong_FromLong(CHANGED);
  if (holds) hold_seen(*table);
  return PyLong_FromLong(seen);
}

// release(table): releases the storages of gradients that the last look owns
PyObject* release(PyObject*, PyObject* capsule) {
  Table* table = held_by<Table>(capsule);
  if (table == nullptr) return nullptr;
  release_all(*table);
  Py_RETURN_NONE;
}

// same_list(left, right) -> whether two lists hold the same objects
PyObject* same_list(PyObject*, PyObject* args) {
  PyObject *left, *right;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &left, &PyList_Type, &right)) return nullptr;
  PyObject **first = PySequence_Fast_ITEMS(left), **second = PySequence_Fast_ITEMS(right);
  return PyBool_FromLong(std::equal(first, first + PyList_GET_SIZE(left), second, second + PyList_GET_SIZE(right)));
}

void bump_one(const Row& row) {
  if (!row.has_grad) return;
  tensor_in(row.param.object).unsafeGetTensorImpl()->bump_version();
  if (row.param.part != nullptr) tensor_in(row.param.part).unsafeGetTensorImpl()->bump_version();
}

// bump(table or list): bumps the version of every parameter with a gradient, or of every tensor of the list
PyObject* bump(PyObject*, PyObject* written) {
  if (PyList_Check(written)) {
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(written); ++index) {
      PyObject* object = PyList_GET_ITEM(written, index);
      if (!is_tensor(object)) return PyErr_Format(PyExc_TypeError, "bump() takes tensors");
      if (!tensor_in(object).is_inference())
        tensor_in(object).unsafeGetTensorImpl()->bump_version();
      else if (!c10::InferenceMode::is_enabled())
        return PyErr_Format(PyExc_RuntimeError, "Inplace update to inference tensor outside InferenceMode is not allowed");
    }
    Py_RETURN_NONE;
  }
  Table* table = held_by<Table>(written);
  if (table == nullptr) return nullptr;
  const int threads = table->threads;
  const auto count = table->own_grads ? static_cast<int64_t>(table->seen.size()) : 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t index = 0; index < count; ++index) bump_one(table->rows[index]);
  Py_RETURN_NONE;
}

// survey(tensors) -> the sum of versions, whether any has a gradient, and a byte per tensor: whether it requires one
PyObject* survey(PyObject*, PyObject* list) {
  if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "survey() takes a list");
  unsigned long long versions = 0;
  bool has_gradient = false;
  // Static, for the thread that holds the interpreter: an allocation after a backward makes the allocator tidy up, which
  // takes longer than the rest of this function.
  static std::vector<char> trains;
  static std::vector<const c10::TensorImpl*> tensors;
  static PyObject* kept = nullptr;
  trains.resize(PyList_GET_SIZE(list));
  tensors.resize(trains.size());
  // A model has run since the last look, and none of these tensors is in a cache: each stage prefetches the data of the
  // next.
  for (size_t index = 0; index < trains.size(); ++index) prefetch_object(PyList_GET_ITEM(list, index));
  for (size_t index = 0; index < trains.size(); ++index) {
    PyObject* object = PyList_GET_ITEM(list, index);
    if (!is_tensor(object)) return PyErr_Format(PyExc_TypeError, "survey() takes tensors");
    tensors[index] = impl_of(object);
    prefetch_tensor(tensors[index]);
  }
  for (const auto* tensor : tensors) {
    prefetch_gradient(tensor);
    // A version counter is a pointer to the number.
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
  // Copied before the tuple is made, which may collect garbage and call this again.
  Py_XINCREF(kept);
  return kept == nullptr ? nullptr : Py_BuildValue("KNN", versions, PyBool_FromLong(has_gradient), kept);
}

// take(params, types) -> the gradients of tensors, which are removed from them; or None if a tensor has another type
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
    // The list owns its object: no Python code runs here.
    if (taken != nullptr) grad.reset();
  }
  return taken;
}

// memory_of(tensors, names) -> a tensor per storage, for DTensors of their local parts; and all that are no plain tensors.
// names as for `create`
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
                         {"look", look, METH_VARARGS, nullptr},
                         {"release", release, METH_O, nullptr},
                         {"same_list", same_list, METH_VARARGS, nullptr},
                         {"bump", bump, METH_O, nullptr},
                         {"survey", survey, METH_O, nullptr},
                         {"take", take, METH_VARARGS, nullptr},
                         {"memory_of", memory_of, METH_VARARGS, nullptr},
                         {"new_pass", new_pass, METH_O, nullptr},
                         {"note", note, METH_VARARGS, nullptr},
                         {"new_hook", new_hook, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tilestep_scan", nullptr, -1, methods,
                          nullptr,               nullptr,         nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_tilestep_scan() { return PyModule_Create(&definition); }
