// Operands of a call in GPU memory.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "cpu/attention.h"

namespace fastattn::testing {

// A copy on the current device of an array's whole buffer.
class OnDevice {
 public:
  explicit OnDevice(const Array& array) : OnDevice(array.storage().data(), array.storage().size()) {
    origin_ = array.origin_bytes();
  }
  explicit OnDevice(const std::vector<float>& values)
      : OnDevice(values.data(), values.size() * sizeof(float)) {}
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  template <class T = void>
  [[nodiscard]] T* data() const {
    return reinterpret_cast<T*>(data_ + origin_);
  }
  void read(void* host) const { cudaMemcpy(host, data_, bytes_, cudaMemcpyDeviceToHost); }

 private:
  OnDevice(const void* host, std::size_t bytes) : bytes_(bytes) {
    if (cudaMalloc(&data_, std::max<std::size_t>(bytes, 1)) != cudaSuccess) {
      throw std::runtime_error("cudaMalloc");
    }
    cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice);
  }

  std::byte* data_ = nullptr;
  std::size_t bytes_;
  std::int64_t origin_ = 0;
};

// The operands of one call on the GPU; `out` is full of NaN until it ran.
struct DeviceCall {
  Output output;
  OnDevice q, k, v, out, lse;
  ForwardParams params;

  DeviceCall(const Array& q_host, const Array& k_host, const Array& v_host, float scale,
             Layout layout = Layout::kContiguous, const Mask& mask = {})
      : output(q_host, v_host, layout),
        q(q_host),
        k(k_host),
        v(v_host),
        out(output.out),
        lse(output.lse),
        params(params_of(q_host, k_host, v_host, output, scale, mask)) {
    params.q = q.data();
    params.k = k.data();
    params.v = v.data();
    params.out = out.data();
    params.lse = lse.data<float>();
  }

  const Output& fetch() {
    out.read(output.out.storage().data());
    lse.read(output.lse.data());
    EXPECT_EQ(output.out.count_stray_writes(), 0);
    return output;
  }
};

}  // namespace fastattn::testing
