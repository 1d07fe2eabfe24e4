// Lets autograd run over fake CUDA tensors in a build of torch without CUDA.
//
// The autograd engine asks for the current device and stream of a CUDA tensor, which such a build cannot answer. Here are
// a device guard that always answers with device 0 and its default stream, hooks that claim a GPU, and the two functions
// by which the engine looks for an accelerator. The last two replace torch's own, so this library is loaded before torch.
#include <optional>

#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

class OneDevice : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
 public:
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
};

}  // namespace

namespace at {

struct OneDeviceHooks : public CUDAHooksInterface {
  explicit OneDeviceHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, OneDeviceHooks)

namespace accelerator {

std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }

bool isAccelerator(c10::DeviceType type) { return type == c10::DeviceType::CUDA; }

}  // namespace accelerator
}  // namespace at

// Registers the guard; false if torch has one of its own.
extern "C" bool install_guard() {
  std::atomic<const c10::impl::DeviceGuardImplInterface*>& entry =
      c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  if (entry.load() != nullptr) return false;
  entry.store(new OneDevice());
  return at::detail::getCUDAHooks().hasCUDA();
}
