// JAX calls the kernels through XLA's FFI: handlers that XLA finds by name and
// platform. Python asks xla_target() first, while JAX traces, so that a call
// which no kernel takes fails there with the error types of the package. What
// only a handler can find comes back as XLA's own error.
#include "bindings/xla_ffi.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fastattn/fastattn.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace fastattn::bindings {
namespace {

using Dims = std::span<const std::int64_t>;
using Kind = ArgumentError::Kind;

// XLA records a handler that has the command-buffer trait into a CUDA graph,
// and what it records so must not allocate. Kernels with scratch memory of
// their own go by a second name, without the trait.
constexpr const char* kTarget = "fastattn_forward";
constexpr const char* kScratchTarget = "fastattn_forward_scratch";

std::string shape_text(Dims dims) {
  std::string text;
  for (const std::int64_t size : dims) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

[[noreturn]] void wrong_shape(const char* name, Dims dims, const std::string& what) {
  throw ArgumentError(Kind::kValue,
                      std::string(name) + ": got shape " + shape_text(dims) + ", " + what);
}

// XLA's buffers are dense and row-major. What vmap puts before the four dimensions
// [batch, heads, length, head_dim] is folded into the batch.
struct Operand {
  const char* name;
  Dims dims;
  int batch, heads, length, head_dim;

  Operand(const char* operand_name, Dims shape) : name(operand_name), dims(shape) {
    constexpr std::int64_t kLargest = std::numeric_limits<int>::max();
    if (dims.size() < 4) wrong_shape(name, dims, "takes (batch, heads, length, head_dim)");
    std::int64_t folded = 1;
    for (std::size_t i = 0; i < dims.size(); ++i) {
      const bool in_batch = i + 3 < dims.size();
      if (in_batch && dims[i] <= kLargest) folded *= dims[i];
      if (dims[i] > kLargest || folded > kLargest) {
        wrong_shape(name, dims, "takes sizes up to " + std::to_string(kLargest));
      }
    }
    const Dims inner = dims.last(3);
    batch = static_cast<int>(folded);
    heads = static_cast<int>(inner[0]);
    length = static_cast<int>(inner[1]);
    head_dim = static_cast<int>(inner[2]);
  }

  void same(const char* what, int size, const Operand& other, int wanted) const {
    if (size == wanted) return;
    wrong_shape(name, dims,
                std::string(what) + " " + std::to_string(size) + " is not the " +
                    std::to_string(wanted) + " of " + other.name + " " + shape_text(other.dims));
  }
};

Strides dense_strides(std::int64_t heads, std::int64_t length, std::int64_t head_dim) {
  return {.batch = heads * length * head_dim, .head = length * head_dim, .row = head_dim};
}

// The call but for its pointers.
ForwardParams describe(Dims q_dims, Dims k_dims, Dims v_dims) {
  const Operand q("q", q_dims);
  const Operand k("k", k_dims);
  const Operand v("v", v_dims);
  k.same("batch size", k.batch, q, q.batch);
  v.same("batch size", v.batch, q, q.batch);
  k.same("head_dim", k.head_dim, q, q.head_dim);
  v.same("head count", v.heads, k, k.heads);
  v.same("length", v.length, k, k.length);
  return {.q = nullptr,
          .k = nullptr,
          .v = nullptr,
          .out = nullptr,
          .q_stride = dense_strides(q.heads, q.length, q.head_dim),
          .k_stride = dense_strides(k.heads, k.length, k.head_dim),
          .v_stride = dense_strides(v.heads, v.length, v.head_dim),
          .out_stride = dense_strides(q.heads, q.length, v.head_dim),
          .batch = q.batch,
          .heads_q = q.heads,
          .heads_kv = k.heads,
          .len_q = q.length,
          .len_kv = k.length,
          .head_dim = q.head_dim,
          .head_dim_v = v.head_dim,
          .scale = 1.0F};
}

// --- what Python asks while JAX traces
// ------------------------------------------------------------

DType dtype_named(std::string_view name) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (to_string(dtype) == name) return dtype;
  }
  throw ArgumentError(Kind::kType,
                      "q: got dtype " + std::string(name) + ", takes float32, float16 or bfloat16");
}

// The FFI target and the scale of a call, or an ArgumentError where no kernel
// takes it.
std::pair<const char*, float> xla_target(const std::vector<std::int64_t>& q_shape,
                                         const std::vector<std::int64_t>& k_shape,
                                         const std::vector<std::int64_t>& v_shape,
                                         std::string_view dtype, std::string_view kernel,
                                         bool causal, std::pair<int, int> window,
                                         std::optional<float> scale, bool cuda, int device) {
  ForwardParams params = describe(q_shape, k_shape, v_shape);
  params.dtype = dtype_named(dtype);
  params.mask = {.causal = causal, .window_left = window.first, .window_right = window.second};
  if (scale) {
    params.scale = *scale;
  } else if (params.head_dim > 0) {
    params.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(params.head_dim)));
  }
  // There are no buffers yet; the check only looks whether the pointers are
  // null.
  std::byte placeholder{};
  params.q = params.k = params.v = params.out = &placeholder;
  const Target target{.backend = cuda ? Backend::kCuda : Backend::kCpu, .device = device};
  const Kernel& chosen = choose_kernel(params, target, kernel);
  const bool scratch = chosen.plan != nullptr && chosen.plan(params).workspace_bytes > 0;
  return {scratch ? kScratchTarget : kTarget, params.scale};
}

// --- what XLA calls
// -------------------------------------------------------------------------------

std::optional<DType> dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kFloat32;
    case ffi::DataType::F16:
      return DType::kFloat16;
    case ffi::DataType::BF16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

Dims dims_of(const ffi::AnyBuffer& buffer) {
  const ffi::AnyBuffer::Dimensions dims = buffer.dimensions();
  return {dims.begin(), dims.size()};
}

void check_result(bool fits, const char* name, const ffi::AnyBuffer& buffer) {
  if (!fits) wrong_shape(name, dims_of(buffer), "not the shape or dtype that goes with q and v");
}

void run(const Target& target, const ffi::AnyBuffer& q, const ffi::AnyBuffer& k,
         const ffi::AnyBuffer& v, const ffi::AnyBuffer& out, const ffi::AnyBuffer* lse,
         std::string_view kernel, const Mask& mask, float scale) {
  ForwardParams params = describe(dims_of(q), dims_of(k), dims_of(v));
  const std::optional<DType> dtype = dtype_of(q.element_type());
  if (!dtype || k.element_type() != q.element_type() || v.element_type() != q.element_type()) {
    throw ArgumentError(Kind::kType, "q, k and v: take one dtype of float32, float16, bfloat16");
  }
  const std::int64_t rows = std::int64_t{params.batch} * params.heads_q * params.len_q;
  check_result(out.element_type() == q.element_type() &&
                   static_cast<std::int64_t>(out.element_count()) == rows * params.head_dim_v,
               "out", out);
  params.q = q.untyped_data();
  params.k = k.untyped_data();
  params.v = v.untyped_data();
  params.out = out.untyped_data();
  if (lse != nullptr) {
    check_result(lse->element_type() == ffi::DataType::F32 &&
                     static_cast<std::int64_t>(lse->element_count()) == rows,
                 "lse", *lse);
    params.lse = lse->typed_data<float>();
  }
  params.scale = scale;
  params.dtype = *dtype;
  params.mask = mask;
  forward(params, target, kernel);
}

// Exceptions must not cross XLA's C interface.
template <typename Call>
ffi::Error to_error(const Call& call) noexcept {
  try {
    call();
    return ffi::Error::Success();
  } catch (const ArgumentError& error) {
    return {error.kind() == Kind::kUnsupported ? ffi::ErrorCode::kUnimplemented
                                               : ffi::ErrorCode::kInvalidArgument,
            error.what()};
  } catch (const std::bad_alloc& error) {
    return {ffi::ErrorCode::kResourceExhausted, error.what()};
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

ffi::Error run_cpu(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::Result<ffi::AnyBuffer> out, std::optional<ffi::Result<ffi::AnyBuffer>> lse,
                   std::string_view kernel, bool causal, std::int32_t window_left,
                   std::int32_t window_right, float scale) {
  return to_error([&] {
    run({.backend = Backend::kCpu}, q, k, v, *out, lse ? &**lse : nullptr, kernel,
        {.causal = causal, .window_left = window_left, .window_right = window_right}, scale);
  });
}

// XLA has made the device of its stream current.
ffi::Error run_cuda(void* stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::Result<ffi::AnyBuffer> out, std::optional<ffi::Result<ffi::AnyBuffer>> lse,
                    std::string_view kernel, bool causal, std::int32_t window_left,
                    std::int32_t window_right, float scale) {
  return to_error([&] {
    run({.backend = Backend::kCuda, .device = -1, .stream = stream}, q, k, v, *out,
        lse ? &**lse : nullptr, kernel,
        {.causal = causal, .window_left = window_left, .window_right = window_right}, scale);
  });
}

template <typename Binding>
auto bind_call(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // q [..., B, Hq, M, D]
      .template Arg<ffi::AnyBuffer>()          // k [..., B, Hkv, N, D]
      .template Arg<ffi::AnyBuffer>()          // v [..., B, Hkv, N, Dv]
      .template Ret<ffi::AnyBuffer>()          // out [..., B, Hq, M, Dv]
      .template OptionalRet<ffi::AnyBuffer>()  // lse [..., B, Hq, M]
      .template Attr<std::string_view>("kernel")
      .template Attr<bool>("causal")
      .template Attr<std::int32_t>("window_left")
      .template Attr<std::int32_t>("window_right")
      .template Attr<float>("scale");
}

auto bind_cuda() { return bind_call(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()); }

XLA_FFI_DEFINE_HANDLER(kCpuHandler, run_cpu, bind_call(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kCudaHandler, run_cuda, bind_cuda(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kCudaScratchHandler, run_cuda, bind_cuda());

nb::list xla_targets() {
  nb::list targets;
  const auto add = [&](const char* name, const char* platform, XLA_FFI_Handler* handler) {
    targets.append(nb::make_tuple(name, platform, nb::capsule(reinterpret_cast<void*>(handler))));
  };
  // A name is chosen while tracing, for the platform that JAX then names as its
  // default; the call may still be compiled for the CPU, so both names exist
  // there.
  add(kTarget, "cpu", kCpuHandler);
  add(kScratchTarget, "cpu", kCpuHandler);
  add(kTarget, "CUDA", kCudaHandler);
  add(kScratchTarget, "CUDA", kCudaScratchHandler);
  return targets;
}

}  // namespace

void bind_xla_ffi(nb::module_& m) {
  m.def("xla_targets", &xla_targets, nb::sig("def xla_targets() -> list[tuple[str, str, object]]"),
        "The handlers to register with XLA: (name, platform, capsule).");
  m.def("xla_target", &xla_target, nb::arg("q_shape"), nb::arg("k_shape"), nb::arg("v_shape"),
        nb::arg("dtype"), nb::arg("kernel"), nb::arg("causal"), nb::arg("window"),
        nb::arg("scale").none(), nb::arg("cuda"), nb::arg("device"),
        "The handler's name and the scale for a call of these shapes; raises "
        "where no kernel "
        "takes it. device: CUDA ordinal, or -1 for the current one.");
}

}  // namespace fastattn::bindings
