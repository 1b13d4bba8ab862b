#include "fastattn/fastattn.h"

namespace fastattn {

// Defined here, not in the header, so that one library owns the type and it can be caught across
// shared-library boundaries.
ArgumentError::ArgumentError(Kind kind, const std::string& message)
    : std::invalid_argument(message), kind_(kind) {}

CudaError::CudaError(const std::string& message) : std::runtime_error(message) {}

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "unknown";
}

std::string_view to_string(Backend backend) { return backend == Backend::kCpu ? "cpu" : "cuda"; }

}  // namespace fastattn
