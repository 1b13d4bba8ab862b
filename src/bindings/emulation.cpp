// emulate(): a CUDA kernel on host arrays, checked and counted.
#include "emulation/emulation.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/interrupt.h"
#include "bindings/tensor.h"
#include "fastattn/fastattn.h"

namespace fastattn::bindings {
namespace {

nb::dict to_dict(const emulation::Counts& counts) {
  nb::dict entry;
  entry["global_read_bytes"] = counts.global_read_bytes;
  entry["global_write_bytes"] = counts.global_write_bytes;
  entry["global_read_sectors"] = counts.global_read_sectors;
  entry["global_write_sectors"] = counts.global_write_sectors;
  entry["global_read_requests"] = counts.global_read_requests;
  entry["global_write_requests"] = counts.global_write_requests;
  entry["shared_read_requests"] = counts.shared_read_requests;
  entry["shared_write_requests"] = counts.shared_write_requests;
  entry["shared_read_transactions"] = counts.shared_read_transactions;
  entry["shared_write_transactions"] = counts.shared_write_transactions;
  entry["shared_read_conflicts"] = counts.shared_read_conflicts;
  entry["shared_write_conflicts"] = counts.shared_write_conflicts;
  entry["exponentials"] = counts.exponentials;
  entry["barriers"] = counts.barriers;
  entry["warp_barriers"] = counts.warp_barriers;
  entry["shuffles"] = counts.shuffles;
  entry["votes"] = counts.votes;
  entry["mmas"] = counts.mmas;
  entry["atomics"] = counts.atomics;
  return entry;
}

nb::dict to_dict(const emulation::LaunchRecord& launch) {
  nb::dict entry;
  entry["kernel"] = launch.kernel;
  entry["blocks"] = launch.blocks;
  entry["threads"] = launch.threads;
  entry["dynamic_shared_bytes"] = launch.dynamic_shared_bytes;
  return entry;
}

nb::dict to_dict(const emulation::Finding& finding) {
  nb::dict entry;
  entry["kind"] = finding.kind;
  entry["message"] = finding.message;
  entry["file"] = finding.file;
  entry["line"] = finding.line;
  entry["block"] = finding.block;
  entry["thread"] = finding.thread;
  return entry;
}

nb::dict to_dict(const emulation::LineCounts& line) {
  nb::dict entry;
  entry["file"] = line.file;
  entry["line"] = line.line;
  entry["space"] = line.is_shared ? "shared" : "global";
  entry["access"] = line.is_write ? "write" : "read";
  entry["requests"] = line.requests;
  entry["transactions"] = line.transactions;
  entry["conflicts"] = line.conflicts;
  entry["bytes"] = line.bytes;
  return entry;
}

template <class T>
nb::list to_list(const std::vector<T>& entries) {
  nb::list list;
  for (const T& entry : entries) list.append(to_dict(entry));
  return list;
}

// The caller (fastattn.emulation) has checked dtypes and shapes. NumPy has no bfloat16: `is_bfloat16`
// says that what comes as float16 is that.
nb::dict emulate(std::string_view kernel, nb::handle q_array, nb::handle k_array,
                 nb::handle v_array, nb::handle out_array, nb::handle lse_array, float scale,
                 std::uint64_t seed, nb::handle causal, nb::handle window, bool is_bfloat16) {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor out;
  Tensor lse;
  lse.rank = kRank - 1;
  const auto read = [](Tensor& tensor, nb::handle array, const char* name) {
    tensor.read(array_type(array, name), array, name, nullptr, false, false);
  };
  read(q, q_array, "q");
  read(k, k_array, "k");
  read(v, v_array, "v");
  read(out, out_array, "out");
  read(lse, lse_array, "lse");
  const ForwardParams params{.q = q.data,
                             .k = k.data,
                             .v = v.data,
                             .out = out.data,
                             .lse = static_cast<float*>(lse.data),
                             .q_stride = q.strides(),
                             .k_stride = k.strides(),
                             .v_stride = v.strides(),
                             .out_stride = out.strides(),
                             .batch = static_cast<int>(q.shape[0]),
                             .heads_q = static_cast<int>(q.shape[1]),
                             .heads_kv = static_cast<int>(k.shape[1]),
                             .len_q = static_cast<int>(q.shape[2]),
                             .len_kv = static_cast<int>(k.shape[2]),
                             .head_dim = static_cast<int>(q.shape[3]),
                             .head_dim_v = static_cast<int>(v.shape[3]),
                             .scale = scale,
                             .dtype = is_bfloat16 ? DType::kBFloat16 : q.dtype,
                             .mask = to_mask(causal, window)};
  emulation::Report report;
  {
    const Interruptible interruptible;
    const nb::gil_scoped_release released;
    report = emulation::run_checked(params, kernel, seed);
  }
  nb::dict result;
  result["counts"] = to_dict(report.counts);
  result["launches"] = to_list(report.launches);
  result["findings"] = to_list(report.findings);
  result["lines"] = to_list(report.lines);
  return result;
}

}  // namespace

void bind_emulation(nb::module_& m) {
  using namespace nb::literals;
  m.def("emulate", &emulate, "kernel"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "scale"_a, "seed"_a,
        "causal"_a, "window"_a.none(), "is_bfloat16"_a,
        nb::sig("def emulate(kernel: str, q: typing.Any, k: typing.Any, v: typing.Any, "
                "out: typing.Any, lse: typing.Any, scale: float, seed: int, causal: typing.Any, "
                "window: typing.Any, is_bfloat16: bool) -> "
                "dict[str, typing.Any]"),
        "Runs the checked build of a CUDA kernel on NumPy arrays.");
}

}  // namespace fastattn::bindings
