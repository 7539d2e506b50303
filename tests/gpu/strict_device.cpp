// A device of host memory on which the operations of torch run, and which refuses what a GPU would not forgive:
// operands of the CPU beside its own, accesses to the same bytes from two streams that nothing puts in order, and memory
// that is freed while another stream than that on which it was made may use it (which torch's allocator gives away).
//
// A copy to the host that does not block is made when the host knows it to be over, and shows garbage before.
//
// An operation is over when the call returns. That it could be under way is a matter of record: each stream, and the
// host, has a clock of all streams (a vector clock), which events and waits join; an access that is not known to be
// behind the one before it, where either writes, raises.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_copy_from_and_resize.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int kDevices = 4;
constexpr int kStreams = 64;  // of all devices, the host last; further ones share the last
constexpr int kHost = kStreams - 1;
constexpr auto kType = c10::DeviceType::PrivateUse1;

using Clock = std::array<uint64_t, kStreams>;

struct Access {
  uintptr_t begin, end;
  int stream;
  uint64_t time;
  bool writes;
};

struct Block {
  int stream;  // on which it was made
  std::vector<int> recorded;  // further ones that it is known to be used on
};

struct Late {  // a copy to the host
  int stream;
  uint64_t time;
  at::Tensor value, to;  // both of the CPU
};

struct Order {
  std::mutex mutex;
  std::vector<Late> late;
  std::array<Clock, kStreams> clocks{};  // by stream, what is over before its next operation
  std::map<uintptr_t, std::vector<Access>> accesses;  // by beginning of the block of memory
  std::map<uintptr_t, Block> blocks;  // by beginning
  std::string freed;  // what was freed too early, raised by the next operation
  int made = kDevices;  // streams; the first of each device is its default
  uint64_t to_host = 0, to_device = 0;  // bytes that were copied
};

Order& order() {
  static auto* one = new Order();  // memory is freed while the process ends
  return *one;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<int, kDevices> current_streams{0, 1, 2, 3};
thread_local int silent = 0;  // inside of an operation that is noted already

void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; i++) into[i] = std::max(into[i], other[i]);
}

// The host knows that all of a clock is over; call with the lock held.
void host_knows(const Clock& clock) {
  auto& o = order();
  join(o.clocks[kHost], clock);
  std::vector<Late> rest;
  for (auto& copy : o.late) {
    if (copy.time > o.clocks[kHost][copy.stream]) {
      rest.push_back(copy);
    } else {
      copy.to.copy_(copy.value);
    }
  }
  o.late.swap(rest);
}

void host_waits_for(int stream) { host_knows(order().clocks[stream]); }

void note(const at::Tensor& tensor, bool writes, const std::string& what) {
  if (silent || !tensor.defined() || tensor.device().type() != kType || tensor.numel() == 0) return;
  auto& o = order();
  const int stream = current_streams[tensor.device().index()];
  uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  const uintptr_t end = begin + (last + 1) * tensor.itemsize();
  std::lock_guard<std::mutex> lock(o.mutex);
  if (!o.freed.empty()) {
    const auto told = std::exchange(o.freed, "");
    TORCH_CHECK(false, told);
  }
  auto block = o.blocks.upper_bound(begin);
  TORCH_CHECK(block != o.blocks.begin(), what, ": memory of no block");
  auto& found = o.accesses[std::prev(block)->first];
  auto& clock = o.clocks[stream];
  join(clock, o.clocks[kHost]);  // it is begun after all that the host knows to be over
  std::vector<Access> kept;
  for (const auto& a : found) {
    const bool over = a.time <= clock[a.stream];
    if (a.begin < end && begin < a.end && (writes || a.writes) && !over) {
      TORCH_CHECK(false, what, " on stream ", stream, " ", writes ? "writes" : "reads", " what stream ", a.stream,
                  a.writes ? " writes" : " reads", ", and nothing puts them in order");
    }
    const bool known = a.time <= o.clocks[kHost][a.stream];
    const bool covered = over && writes && begin <= a.begin && a.end <= end;
    const bool again = a.stream == stream && a.writes == writes && a.begin == begin && a.end == end;
    if (!known && !covered && !again) kept.push_back(a);
  }
  kept.push_back({begin, end, stream, ++clock[stream], writes});
  found.swap(kept);
}

struct Silent {
  Silent() { silent++; }
  ~Silent() { silent--; }
};

// -- memory -----------------------------------------------------------------------------------------------------

void release(void* memory) {
  auto& o = order();
  {
    std::lock_guard<std::mutex> lock(o.mutex);
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    const auto& block = o.blocks[begin];
    for (const auto& a : o.accesses[begin]) {
      const bool recorded = std::count(block.recorded.begin(), block.recorded.end(), a.stream) > 0;
      if (a.stream == block.stream || recorded || a.time <= o.clocks[kHost][a.stream]) continue;
      if (a.time > o.clocks[block.stream][a.stream])
        o.freed = "memory of stream " + std::to_string(block.stream) + " was freed while stream " +
                  std::to_string(a.stream) + " may use it: record_stream() says that it does";
    }
    o.blocks.erase(begin);
    o.accesses.erase(begin);
  }
  std::free(memory);
}

struct Blocks final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = std::aligned_alloc(64, (std::max<size_t>(size, 1) + 63) / 64 * 64);
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    o.blocks[reinterpret_cast<uintptr_t>(memory)] = {current_streams[current_device], {}};
    return {memory, memory, &release, c10::Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

Blocks blocks;

struct OnDevice {  // of new memory
  explicit OnDevice(std::optional<c10::Device> device) : before(current_device) {
    if (device && device->has_index()) current_device = device->index();
  }
  ~OnDevice() { current_device = before; }
  c10::DeviceIndex before;
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice there(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &blocks, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice there(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &blocks,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// A tensor of the CPU over the memory of another.
at::Tensor seen(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU)), nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  note(from, false, "a copy");
  note(to, true, "a copy");
  if (!silent && from.device().type() != to.device().type()) {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    (to.device().is_cpu() ? o.to_host : o.to_device) += from.nbytes();
  }
  if (!silent && non_blocking && to.device().is_cpu() && to.is_contiguous()) {
    std::memset(to.data_ptr(), 0xcb, to.nbytes());
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    const int stream = current_streams[from.device().index()];
    o.late.push_back({stream, o.clocks[stream][stream], seen(from).clone(), to});
    return to;
  }
  seen(to).copy_(seen(from));
  if (!silent && !non_blocking && from.device().type() != to.device().type()) {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    const auto& there = to.device().is_cpu() ? from : to;
    host_waits_for(current_streams[there.device().index()]);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  note(tensor, false, "item()");
  auto& o = order();
  {
    std::lock_guard<std::mutex> lock(o.mutex);
    o.to_host += tensor.nbytes();
    host_waits_for(current_streams[tensor.device().index()]);
  }
  return seen(tensor).item();
}

at::Tensor& set_from_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                             c10::SymIntArrayRef stride) {
  return at::native::set_storage_meta__symint(self, source, offset, size, stride);
}

// -- operations -------------------------------------------------------------------------------------------------

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& then) {
  if (value.isTensor()) {
    then(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& one : value.toTensorList()) then(one);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorList())
      if (one) then(*one);
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) each_tensor(one, then);
  }
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  for (size_t i = 0; i < count; i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    each_tensor((*stack)[first + i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      TORCH_CHECK(tensor.device().type() == kType || tensor.dim() == 0, name, " is given a tensor of the CPU of shape ",
                  tensor.sizes(), " beside those of a device");
      note(tensor, writes, name);
    });
  }
  {
    Silent inside;
    at::native::cpu_fallback(op, stack);
  }
  bool tells = false;  // the host something of the outcome
  const auto returns = schema.returns().size();
  for (size_t i = stack->size() - returns; i < stack->size(); i++) {
    const auto& value = (*stack)[i];
    if (!value.isTensor() && !value.isList()) tells = true;
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!schema.returns()[i - (stack->size() - returns)].alias_info()) note(tensor, true, name);
    });
  }
  if (tells && !silent) {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    host_waits_for(current_streams[current_device]);
  }
}

// Its schema does not say that it writes running means, which therefore stay on the CPU.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          const std::optional<at::Tensor>& mean,
                                                          const std::optional<at::Tensor>& variance, bool training,
                                                          double momentum, double eps) {
  if (!mean || !mean->defined()) return at::_native_batch_norm_legit(input, weight, bias, training, momentum, eps);
  at::Tensor means = *mean, variances = *variance;
  return at::_native_batch_norm_legit(input, weight, bias, means, variances, training, momentum, eps);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  const c10::impl::VirtualGuardImpl guard(kType);
  guard.recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_from_storage));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("record_stream", TORCH_FN(record_stream));
  // whose composition gives a mean the shape of what it is the mean of
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

// -- streams and events -----------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream stream(c10::Device device, int number) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device.has_index() ? device.index() : current_device), number);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams[device.has_index() ? device.index() : current_device]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device, device.has_index() ? device.index() : current_device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    return stream(device, std::min(o.made++, kHost - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    current_streams[next.device_index()] = static_cast<int>(next.id());
    return before;
  }

  void record(void** event, const c10::Stream& at, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    if (*event == nullptr) *event = new Clock();
    *static_cast<Clock*>(*event) = o.clocks[at.id()];
  }
  void block(void* event, const c10::Stream& at) const override {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    if (event != nullptr) join(o.clocks[at.id()], *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    if (event != nullptr) host_knows(*static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  bool queryStream(const c10::Stream& at) const override {
    synchronizeStream(at);
    return true;
  }
  void synchronizeStream(const c10::Stream& at) const override {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    host_waits_for(static_cast<int>(at.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    for (int i = 0; i < kStreams; i++) host_waits_for(i);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& at) const override {
    auto& o = order();
    std::lock_guard<std::mutex> lock(o.mutex);
    o.blocks[reinterpret_cast<uintptr_t>(memory.get())].recorded.push_back(static_cast<int>(at.id()));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto memory = blocks.allocate(size);
    std::memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(size);
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kType, &blocks);
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int device) { current_device = static_cast<c10::DeviceIndex>(device); });
  m.def("to_host", [] { return order().to_host; });
  m.def("to_device", [] { return order().to_device; });
}
