// The kernels and their launch. No header of torch's: nvcc compiles this file in seconds, and it serves any torch.
#include <algorithm>

#include "launch.h"
#include "merge_kernel.h"
#include "schedule.h"

namespace lora_stream::cuda {
namespace {

// Two blocks on a multiprocessor: one loads lora_A while the other one streams.
template <Operands kOperands, int kBaseBytes, Statistics kStatistics>
__global__ void __launch_bounds__(kThreads, 2) merge_kernel(const __grid_constant__ Table table) {
  merge<kOperands, kBaseBytes, kStatistics>(table);
}

using Kernel = void (*)(Table);

template <Operands kOperands, int kBaseBytes>
Kernel kernel_of(Statistics statistics) {
  switch (statistics) {
    case Statistics::kNone:
      return merge_kernel<kOperands, kBaseBytes, Statistics::kNone>;
    case Statistics::kRounding:
      return merge_kernel<kOperands, kBaseBytes, Statistics::kRounding>;
    case Statistics::kFidelity:
      return merge_kernel<kOperands, kBaseBytes, Statistics::kFidelity>;
  }
  return nullptr;
}

template <Operands kOperands>
Kernel kernel_of(int base_bytes, Statistics statistics) {
  return base_bytes == 4 ? kernel_of<kOperands, 4>(statistics) : kernel_of<kOperands, 2>(statistics);
}

Kernel kernel_of(const Launch& launch, Statistics statistics) {
  switch (launch.operands) {
    case Operands::kBFloat16:
      return kernel_of<Operands::kBFloat16>(launch.base_bytes, statistics);
    case Operands::kFloat16:
      return kernel_of<Operands::kFloat16>(launch.base_bytes, statistics);
    case Operands::kTwoPlanes:
      return kernel_of<Operands::kTwoPlanes>(launch.base_bytes, statistics);
    case Operands::kThreePlanes:
      return kernel_of<Operands::kThreePlanes>(launch.base_bytes, statistics);
  }
  return nullptr;
}

// The device, for as long as this lives. torch has a CUDA runtime of its own, which must find its device again.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device)
      error_ = cudaSetDevice(device);
    else
      before_ = -1;
  }
  ~OnDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  cudaError_t error() const { return error_; }

 private:
  int before_ = -1;
  cudaError_t error_;
};

cudaError_t launch_all(const std::vector<MergeArgs>& group, double* stats, bool fidelity, bool fast, int device,
                       cudaStream_t stream) {
  const Statistics statistics = stats == nullptr ? Statistics::kNone
                                : fidelity       ? Statistics::kFidelity
                                                 : Statistics::kRounding;
  const OnDevice on_device(device);
  if (on_device.error() != cudaSuccess) return on_device.error();
  int multiprocessors = 0, max_shared_bytes = 0, all_shared_bytes = 0;
  cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&all_shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  if (error != cudaSuccess) return error;

  for (const Launch& launch : schedule(group, stats, fast, max_shared_bytes, kItemsPerBlock * 2 * multiprocessors)) {
    const Kernel kernel = kernel_of(launch, statistics);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(launch.shared_bytes));
    // Shared memory for two blocks, and the rest for the cache, in which two warps each find the same rows of lora_B.
    const int64_t carveout = (2 * (launch.shared_bytes + 1024) * 100 + all_shared_bytes - 1) / all_shared_bytes;
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   static_cast<int>(std::min<int64_t>(100, carveout)));
    }
    int blocks = 0;
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, launch.shared_bytes);
    }
    if (error != cudaSuccess) return error;
    const int64_t grid = std::min<int64_t>(launch.table->num_items, int64_t{std::max(1, blocks)} * multiprocessors);
    kernel<<<static_cast<unsigned>(grid), kThreads, launch.shared_bytes, stream>>>(*launch.table);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Empty for success. An error is forgotten here, not to be found by whoever looks for one next.
std::string text_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  std::string text = std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    text += "; this build is for " + std::string(architectures()) +
            ": build it for this device with TORCH_CUDA_ARCH_LIST (8.0 or later)";
  }
  if (error == cudaErrorInsufficientDriver) {
    text += "; this build needs a driver for CUDA " + std::to_string(CUDART_VERSION / 1000) +
            ": update the driver or build with an older CUDA toolkit";
  }
  return text;
}

}  // namespace

std::string merge(const std::vector<MergeArgs>& group, double* stats, bool fidelity, bool fast, int device,
                  void* stream) {
  return text_of(launch_all(group, stats, fidelity, fast, device, static_cast<cudaStream_t>(stream)));
}

std::string pin(void* memory, std::size_t bytes, int device) {
  const OnDevice on_device(device);
  if (on_device.error() != cudaSuccess) return text_of(on_device.error());
  return text_of(cudaHostRegister(memory, bytes, cudaHostRegisterPortable));
}

void unpin(void* memory) {
  if (cudaHostUnregister(memory) != cudaSuccess) cudaGetLastError();
}

bool is_pinned(const void* begin, const void* end) {
  for (const void* address : {begin, static_cast<const void*>(static_cast<const char*>(end) - 1)}) {
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    if (attributes.type != cudaMemoryTypeHost || attributes.devicePointer != address) return false;
  }
  return true;
}

const char* architectures() { return LORA_STREAM_CUDA_ARCHITECTURES; }

}  // namespace lora_stream::cuda
