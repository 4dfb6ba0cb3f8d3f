// A pretended CUDA device on a machine without one: its memory lies on the host, every operator runs on the CPU, and each
// moment at which the host would wait for a card is counted. It is loaded before torch looks for devices, into a build of torch
// that has none; what it stands in for is told apart from the CPU by torch itself (types of devices, autograd's queues,
// operands on two devices). It says nothing about speed.
#include <ATen/ATen.h>
#include <torch/library.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <map>
#include <mutex>
#include <set>

namespace {
constexpr auto KIND = c10::DeviceType::CUDA;
const at::Device CARD(KIND, 0);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* at = n ? std::malloc(n) : nullptr;
    return {at, at, &gone, CARD};
  }
  static void gone(void* at) { std::free(at); }
  c10::DeleterFnPtr raw_deleter() const override { return &gone; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return CARD; }
  c10::Device getDevice() const override { return CARD; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, CARD); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, CARD); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

std::mutex held;
std::map<std::string, int64_t> seen;   // operator -> calls
void counted(const std::string& what) { std::lock_guard<std::mutex> _(held); ++seen[what]; }
void waits(const std::string& what) { counted("waits: " + what); }

at::Tensor on_host(const at::Tensor& x) {
  auto options = x.options().device(at::kCPU).requires_grad(false);
  if (x.numel() == 0) return at::empty_strided(x.sizes(), x.strides(), options);
  return at::from_blob(x.mutable_data_ptr(), x.sizes(), x.strides(), [](void*) {}, options);
}

at::Tensor on_card_empty(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}

at::Tensor on_card(const at::Tensor& host) {
  auto made = host.is_non_overlapping_and_dense()
      ? on_card_empty(host.sizes(), host.strides(), host.scalar_type())
      : at::Tensor(at::detail::empty_generic(host.sizes(), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), host.scalar_type(), std::nullopt));
  if (host.numel()) on_host(made).copy_(host);
  return made;
}

at::Tensor empty_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                        std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::Tensor(at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format));
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return on_card_empty(size, stride, c10::dtype_or_default(dtype));
}

at::Tensor host_of(const at::Tensor& x) { return x.is_cuda() ? on_host(x) : x; }

at::Tensor copy_(at::Tensor& to, const at::Tensor& from, bool) {
  if (to.is_cuda() && !from.is_cuda()) counted("to the card");
  if (!to.is_cuda() && from.is_cuda()) waits("copy to the host");
  host_of(to).copy_(host_of(from));
  return to;
}
at::Tensor& copy_in(at::Tensor& to, const at::Tensor& from, bool non_blocking) { copy_(to, from, non_blocking); return to; }
at::Scalar scalar_of(const at::Tensor& x) {
  waits("a number");
  return on_host(x).item();
}
const at::Tensor& resize_(const at::Tensor& x, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = x.unsafeGetTensorImpl();
  int64_t n = 1; for (auto s : size) n *= s;
  size_t bytes = (n + x.storage_offset()) * x.itemsize();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() < bytes) {
    auto fresh = memory.allocate(bytes);
    if (storage->nbytes()) std::memcpy(fresh.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return x;
}
at::Tensor& set_storage(at::Tensor& x, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return x;
}
at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& y) { return set_storage(x, y.storage(), y.storage_offset(), y.sizes(), y.strides()); }
at::Tensor& set_nothing(at::Tensor& x) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t{}, 0, memory.allocate(0), &memory, true));
  x.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  return x;
}
at::Tensor as_strided(const at::Tensor& x, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(x, size, stride, offset);
}
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) { return 0; }

const std::set<std::string> SHAPED_BY_VALUES = {"aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
  "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave", "aten::_linalg_eigh", "aten::is_nonzero"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name();
  counted(name);
  const auto n = schema.arguments().size();
  const auto begin = stack->size() - n;
  std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  torch::jit::Stack host;
  std::vector<at::Tensor> cards, hosts;  // pairs
  bool bools = false, on_cpu = false;
  auto taken = [&](const at::Tensor& x) -> at::Tensor {
    if (!x.defined()) return x;
    if (x.is_cuda()) {
      auto h = on_host(x);
      cards.push_back(x); hosts.push_back(h);
      return h;
    }
    if (x.dim() > 0) { on_cpu = true; }
    return x;
  };
  for (auto& value : given) {
    if (value.isTensor()) host.emplace_back(taken(value.toTensor()));
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorList()) list.push_back(taken(x));
      host.emplace_back(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& x : value.toOptionalTensorList()) {
        if (x.has_value() && x->defined() && (x->scalar_type() == at::kBool || x->scalar_type() == at::kByte)) bools = true;
        list.push_back(x.has_value() ? std::optional<at::Tensor>(taken(*x)) : std::nullopt);
      }
      host.emplace_back(list);
    } else if (value.isDevice()) host.emplace_back(at::Device(at::kCPU));
    else host.push_back(value);
  }
  TORCH_CHECK(!on_cpu || cards.empty(), name, ": Expected all tensors to be on the same device, but found at least two, cuda:0 and cpu");
  if (SHAPED_BY_VALUES.count(name)) waits(name);
  if (bools) waits(name + " by booleans");
  op.callBoxed(&host);
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (hosts[i].sizes() == cards[i].sizes()) continue;
    resize_(cards[i], hosts[i].sizes(), std::nullopt);
    on_host(cards[i]).copy_(hosts[i]);
  }
  stack->erase(stack->begin() + begin, stack->end());
  auto returned = [&](const at::Tensor& x) -> at::Tensor {
    if (!x.defined()) return x;
    for (size_t i = 0; i < hosts.size(); ++i) if (hosts[i].is_same(x)) return cards[i];
    for (size_t i = 0; i < hosts.size(); ++i) {
      if (!x.numel() || !hosts[i].numel()) continue;
      if (x.storage().data() == hosts[i].storage().data() && x.scalar_type() == cards[i].scalar_type())  // a view
        return at::native::as_strided_tensorimpl(cards[i], x.sizes(), x.strides(), cards[i].storage_offset() + x.storage_offset());
    }
    return on_card(x);
  };
  for (auto& value : host) {
    if (value.isTensor()) stack->emplace_back(returned(value.toTensor()));
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorList()) list.push_back(returned(x));
      stack->emplace_back(list);
    } else stack->push_back(value);
  }
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const override { static auto own = at::detail::createCPUGenerator(1); return own; }
  bool isPinnedPtr(const void*) const override { return false; }
};
}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("copy_", copy_in);
  m.impl("_local_scalar_dense", scalar_of);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY(card, m) {
  m.def("counts() -> Dict(str, int)", [] {
    std::lock_guard<std::mutex> _(held);
    c10::Dict<std::string, int64_t> told;
    for (const auto& [name, n] : seen) told.insert(name, n);
    return told;
  });
  m.def("clear() -> ()", [] { std::lock_guard<std::mutex> _(held); seen.clear(); });
}

__attribute__((constructor)) void put_in() { c10::SetAllocator(KIND, &memory, 10); }
