// What exists: kernels, launch plans, the build, the machine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <string_view>

#include "bindings/bindings.h"
#include "fastattn/fastattn.h"

namespace fastattn::bindings {
namespace {

namespace nb = nanobind;
using Kind = ArgumentError::Kind;

nb::list kernel_list(bool emulated) {
  nb::list list;
  for (const Kernel* kernel : emulated ? emulated_kernels() : kernels()) {
    const Capabilities& takes = kernel->capabilities;
    nb::list dtypes;
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      if (takes.takes(dtype)) dtypes.append(to_string(dtype));
    }
    nb::dict entry;
    entry["name"] = kernel->name;
    entry["title"] = kernel->title;
    entry["arithmetic"] = kernel->arithmetic;
    entry["backend"] = to_string(kernel->backend);
    entry["dtypes"] = nb::tuple(dtypes);
    entry["head_dim_min"] = takes.head_dim_min;
    entry["head_dim_max"] = takes.head_dim_max;
    entry["head_dim_v_differs"] = takes.head_dim_v_differs;
    entry["lengths_differ"] = takes.lengths_differ;
    entry["grouped_heads"] = takes.grouped_heads;
    entry["causal"] = takes.causal;
    entry["window"] = takes.window;
    entry["min_compute_capability"] = takes.min_compute_capability;
    entry["redirect"] = kernel->redirect.empty() ? nb::none() : nb::cast(kernel->redirect);
    list.append(entry);
  }
  return list;
}

nb::dict plan(std::string_view name, int batch, int heads_q, int heads_kv, int len_q, int len_kv,
              int head_dim) {
  const Kernel* kernel = find_kernel(name);
  if (kernel == nullptr) {
    throw ArgumentError(Kind::kValue, "kernel: unknown kernel '" + std::string(name) + "'");
  }
  const Capabilities& takes = kernel->capabilities;
  if (kernel->plan == nullptr) {
    throw ArgumentError(Kind::kUnsupported,
                        "kernel '" + std::string(name) + "' is no CUDA kernel: it has no plan");
  }
  if (head_dim < takes.head_dim_min || head_dim > takes.head_dim_max) {
    throw ArgumentError(
        Kind::kUnsupported,
        "kernel '" + std::string(name) + "' does not take head_dim " + std::to_string(head_dim));
  }
  const auto contiguous = [head_dim](std::int64_t heads, std::int64_t length) {
    return Strides{.batch = heads * length * head_dim, .head = length * head_dim, .row = head_dim};
  };
  const ForwardParams params{.q = nullptr,
                             .k = nullptr,
                             .v = nullptr,
                             .out = nullptr,
                             .q_stride = contiguous(heads_q, len_q),
                             .k_stride = contiguous(heads_kv, len_kv),
                             .v_stride = contiguous(heads_kv, len_kv),
                             .out_stride = contiguous(heads_q, len_q),
                             .batch = batch,
                             .heads_q = heads_q,
                             .heads_kv = heads_kv,
                             .len_q = len_q,
                             .len_kv = len_kv,
                             .head_dim = head_dim,
                             .head_dim_v = head_dim,
                             .scale = 1.0F};
  const LaunchPlan launch = kernel->plan(params);
  nb::dict result;
  result["blocks"] = launch.blocks;
  result["threads"] = launch.threads;
  result["dynamic_shared_bytes"] = launch.dynamic_shared_bytes;
  result["workspace_bytes"] = launch.workspace_bytes;
  return result;
}

nb::dict build() {
  const BuildInfo info = build_info();
  nb::dict result;
  result["version"] = info.version;
  result["cuda"] = info.cuda;
  result["cuda_toolkit"] = info.cuda_toolkit;
  result["cuda_archs"] = info.cuda_archs;
  result["threading"] = info.threading;
  result["cpu_instruction_set"] = info.cpu_instruction_set;
  return result;
}

nb::list devices() {
  nb::list list;
  for (const DeviceInfo& device : cuda_devices()) {
    nb::dict entry;
    entry["ordinal"] = device.ordinal;
    entry["name"] = device.name;
    entry["compute_capability"] = device.compute_capability;
    entry["multiprocessors"] = device.multiprocessors;
    entry["shared_bytes_per_block"] = device.shared_bytes_per_block;
    entry["memory_bytes"] = device.memory_bytes;
    list.append(entry);
  }
  return list;
}

}  // namespace

void bind_info(nb::module_& m) {
  using namespace nb::literals;
  m.def("kernels", &kernel_list, "emulated"_a = false,
        nb::sig("def kernels(emulated: bool = False) -> list[dict[str, typing.Any]]"),
        "Every kernel of this build: the fields of fastattn.KernelInfo.");
  m.def("plan", &plan, "kernel"_a, "batch"_a, "heads_q"_a, "heads_kv"_a, "len_q"_a, "len_kv"_a,
        "head_dim"_a,
        nb::sig("def plan(kernel: str, batch: int, heads_q: int, heads_kv: int, len_q: int, "
                "len_kv: int, head_dim: int) -> dict[str, int]"),
        "How a CUDA kernel would be launched for contiguous float32 arrays: blocks, threads,\n"
        "dynamic_shared_bytes, workspace_bytes. Needs no GPU.");
  m.def("build_info", &build, nb::sig("def build_info() -> dict[str, typing.Any]"));
  m.def("cuda_devices", &devices, nb::sig("def cuda_devices() -> list[dict[str, typing.Any]]"),
        "Empty where there is no GPU, no driver or no CUDA backend. Creates no CUDA context.");
  m.def("cuda_driver_version", &cuda_driver_version,
        "The CUDA version that the driver supports, 13000 is 13.0; 0 without a driver.");
  m.def("cpu_threads", &cpu_threads, "Threads that the CPU kernel uses.");
}

}  // namespace fastattn::bindings
