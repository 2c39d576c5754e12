// A CUDA device that doesn't exist, for the CPU build of torch.
//
// torch asks a backend three things besides kernels: a device GUARD (devices, streams, events),
// hooks (is there a device, generators), and which attention a device runs. The CPU build has none
// of them for CUDA; here they are answered without hardware. Nothing computes: every tensor on the
// device has to be a FakeTensor. Load this before `import torch`, which caches the hooks it finds.

#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>
#include <vector>

namespace {

using namespace c10;

DeviceIndex device_count = 1;
thread_local DeviceIndex current_device = 0;

DeviceIndex exchange(DeviceIndex device) {
  const DeviceIndex before = current_device;
  if (device >= 0) {
    current_device = device;
  }
  return before;
}

// Work is never queued, so that every stream is empty and every event has happened.
struct SimulatedDeviceGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  DeviceIndex deviceCount() const noexcept override {
    return device_count;
  }
  Device getDevice() const override {
    return Device(DeviceType::CUDA, current_device);
  }
  Device exchangeDevice(Device device) const override {
    return Device(DeviceType::CUDA, exchange(device.index()));
  }
  void setDevice(Device device) const override {
    exchange(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    exchange(device.index());
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, device, 1);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return Stream(Stream::UNSAFE, device, 1);
  }
  Stream exchangeStream(Stream stream) const override {
    return Stream(Stream::DEFAULT, stream.device());
  }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = this_as_event();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override {
    return 1.0;  // ms; a clock divides by it
  }

 private:
  void* this_as_event() const {  // an event is any pointer that isn't null
    return const_cast<SimulatedDeviceGuard*>(this);
  }
};

// Remembers its seed and draws nothing: numbers on the device don't exist.
struct SimulatedGenerator final : GeneratorImpl {
  explicit SimulatedGenerator(DeviceIndex device)
      : GeneratorImpl(Device(DeviceType::CUDA, device), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    return seed_;
  }
  void set_state(const TensorImpl&) override {}
  intrusive_ptr<TensorImpl> get_state() const override {
    return at::empty({16}, at::TensorOptions().dtype(at::kByte)).unsafeReleaseIntrusivePtr();
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new SimulatedGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = default_rng_seed_val;
  uint64_t offset_ = 0;
};

// Ordinary memory that remembers having been asked for as pinned: a copy from it doesn't block.
struct PinnedMemory final : Allocator {
  DataPtr allocate(size_t count) override {
    void* data = c10::alloc_cpu(count);
    const std::lock_guard<std::mutex> lock(mutex_);
    sizes_[data] = count;
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool holds(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = sizes_.upper_bound(data);
    return next != sizes_.begin() && data < static_cast<const char*>((--next)->first) + next->second;
  }
  static PinnedMemory& instance() {
    static auto* memory = new PinnedMemory();  // never ends: tensors may outlive static objects
    return *memory;
  }

 private:
  static void release(void* data) {
    {
      const std::lock_guard<std::mutex> lock(instance().mutex_);
      instance().sizes_.erase(data);
    }
    c10::free_cpu(data);
  }
  std::mutex mutex_;
  std::map<const void*, size_t> sizes_;
};

// torch looks the hooks up by the name of their class.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex device) const override {
    return device >= 0 && device < device_count;
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedMemory::instance().holds(data);
  }
  Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedMemory::instance();
  }
  int getNumGPUs() const override {
    return device_count;
  }
  DeviceIndex deviceCount() const override {
    return device_count;
  }
  DeviceIndex current_device() const override {
    return ::current_device;
  }
  DeviceIndex getCurrentDevice() const override {
    return ::current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    exchange(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return exchange(device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchange(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<SimulatedGenerator>(device < 0 ? ::current_device : device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    static std::vector<at::Generator> defaults = [] {
      std::vector<at::Generator> made;
      for (DeviceIndex index = 0; index < device_count; ++index) {
        made.push_back(at::make_generator<SimulatedGenerator>(index));
      }
      return made;
    }();
    return defaults.at(device < 0 ? ::current_device : device);
  }
};

// What the CUDA build chooses where nothing is switched off: FlashAttention for half formats without
// a mask, memory-efficient attention for the rest, plain products for float64.
int64_t attention_choice(
    const at::Tensor& query,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool) {
  constexpr int64_t plain = 0, flash = 1, efficient = 2;
  const auto format = query.scalar_type();
  if (format == at::kDouble) {
    return plain;
  }
  const bool half = format == at::kHalf || format == at::kBFloat16;
  const bool masked = mask.has_value() && mask->defined();
  return half && !masked && query.sym_size(-1).expect_int() <= 256 ? flash : efficient;
}

}  // namespace

// So many devices there are from now on; before torch asks for the first time.
extern "C" void simulated_devices(int count) {
  device_count = static_cast<DeviceIndex>(count);
}

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}
static impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new SimulatedDeviceGuard());
