// Python bindings: what stands under which name; arguments.h checks what is given. No loop and no arithmetic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <vector>

#include "arguments.h"
#include "numerics.h"
#include "offsets.h"
#include "quantize.h"

namespace py = pybind11;
using namespace py::literals;

namespace hq {
void bind_activation(py::module_& m);
void bind_adam(py::module_& m);
void bind_embedding(py::module_& m);
void bind_loss(py::module_& m);
void bind_norm(py::module_& m);
void bind_product(py::module_& m);
void bind_experts(py::module_& m);
void bind_rope(py::module_& m);
void bind_expert_rows(py::module_& m);
void bind_sum_parts(py::module_& m);
}

namespace {

using namespace hq::arguments;

#define HQ_CALL_ARGS                                                                                               \
  "data"_a, "dtype"_a, "rows"_a, "cols"_a, "row_stride"_a, "col_stride"_a, "row"_a.none(true),                     \
      "column"_a.none(true), "dequantized"_a = false
#define HQ_MEMBER_ARGS "offsets"_a = 0, "members"_a = 0

py::dict build_info() {
  py::dict info("version"_a = HQ_VERSION, "compiler"_a = HQ_CXX_COMPILER, "cxx_flags"_a = HQ_CXX_FLAGS,
                "isas"_a = HQ_ISAS, "isa"_a = hq::best_isa(), "openmp"_a = _OPENMP, "cuda"_a = false);
#if defined(HQ_HAVE_CUDA)
  info["cuda"] = true;
  info["cuda_compiler"] = HQ_CUDA_COMPILER;
  info["cuda_flags"] = HQ_CUDA_FLAGS;
  info["cuda_archs"] = HQ_CUDA_ARCHS;
#endif
  return info;
}

#define HQ_DECODE_ARGS                                                                                       \
  "spec"_a, "rows"_a, "cols"_a, "codes"_a, "scales"_a, "global_"_a, "exact"_a, "out"_a, "out_dtype"_a

hq::Decoding decoding_of(bool exact) { return exact ? hq::Decoding::exact : hq::Decoding::value; }

// offsets: the rows of X belong to many matrices (members), whose arrays are packed: one member's after the other's.
void bind_cpu(py::module_& m) {
  m.def("quantize_cpu", [](HQ_CALL_PARAMETERS, int threads, const std::string& isa, HQ_MEMBER_PARAMETERS) {
    const hq::Call call = make_call(HQ_CALL_VALUES, offsets != 0);
    const auto group = make_group(rows, cols, offsets, members);
    check_cpu(threads, isa);
    py::gil_scoped_release release;
    if (group) return hq::quantize_grouped_cpu(call, *group, threads, isa.c_str());
    hq::quantize_cpu(call, threads, isa.c_str());
  }, HQ_CALL_ARGS, "threads"_a = 1, "isa"_a = "", HQ_MEMBER_ARGS,
     "Quantize X [rows, cols] along its rows and its columns; what is not 0 in the directions is written.");
  m.def("find_amax_cpu", [](HQ_CALL_PARAMETERS, int threads, const std::string& isa, HQ_MEMBER_PARAMETERS) {
    const hq::Call call = make_call(HQ_CALL_VALUES, offsets != 0);
    const auto group = make_group(rows, cols, offsets, members);
    check_cpu(threads, isa);
    py::gil_scoped_release release;
    if (group) return hq::find_amax_grouped_cpu(call, *group, threads, isa.c_str());
    hq::find_amax_cpu(call, threads, isa.c_str());
  }, HQ_CALL_ARGS, "threads"_a = 1, "isa"_a = "", HQ_MEMBER_ARGS,
     "found = max(found, amax) of each direction, in place; members have one each.");
  m.def("offsets_cpu", [](uintptr_t splits, bool wide, int64_t count, const std::vector<int64_t>& divisors,
                          const std::vector<int64_t>& strides, uintptr_t out) {
    const hq::Rules rules = make_rules(divisors, strides);
    hq::offsets_cpu(make_splits(splits, wide, count), rules, make_offsets(rules, out));
  }, "splits"_a, "wide"_a, "count"_a, "divisors"_a, "strides"_a, "out"_a,
     "out[r, i] = strides[r] * the sum of ceil(splits[j] / divisors[r]) for j < i; wide: int64, else int32.");
  m.def("dequantize_cpu", [](HQ_DECODE_PARAMETERS, int threads, bool columns, HQ_MEMBER_PARAMETERS) {
    const hq::Encoded encoded = make_encoded(HQ_DECODE_VALUES, columns, offsets != 0);
    const auto group = make_group(rows, cols, offsets, members);
    check_threads(threads);
    const auto dtype = static_cast<hq::Dtype>(out_dtype);
    py::gil_scoped_release release;
    if (group)
      return hq::dequantize_grouped_cpu({encoded, columns, *group}, decoding_of(exact), pointer<void>(out), dtype, threads);
    hq::dequantize_cpu(encoded, decoding_of(exact), pointer<void>(out), dtype, threads);
  }, HQ_DECODE_ARGS, "threads"_a = 1, "columns"_a = false, HQ_MEMBER_ARGS,
     "An operand's values, or (exact) its codes times block scales. Members, of X [rows, cols] or (columns) of X.T, are "
     "decoded to the places of X's elements.");
}

#if defined(HQ_HAVE_CUDA)
void bind_cuda(py::module_& m) {
  m.def("quantize_cuda", [](HQ_CALL_PARAMETERS, uintptr_t stream, HQ_MEMBER_PARAMETERS) {
    const hq::Call call = make_call(HQ_CALL_VALUES, offsets != 0);
    if (const auto group = make_group(rows, cols, offsets, members)) hq::quantize_grouped_cuda(call, *group, stream);
    else hq::quantize_cuda(call, stream);
  }, HQ_CALL_ARGS, "stream"_a = 0, HQ_MEMBER_ARGS,
     "quantize_cpu on the current GPU, where the offsets are, enqueued on a stream (cudaStream_t as an integer).");
  m.def("find_amax_cuda", [](HQ_CALL_PARAMETERS, uintptr_t stream, HQ_MEMBER_PARAMETERS) {
    const hq::Call call = make_call(HQ_CALL_VALUES, offsets != 0);
    if (const auto group = make_group(rows, cols, offsets, members)) hq::find_amax_grouped_cuda(call, *group, stream);
    else hq::find_amax_cuda(call, stream);
  }, HQ_CALL_ARGS, "stream"_a = 0, HQ_MEMBER_ARGS, "find_amax_cpu on the current GPU, where the offsets are.");
  m.def("offsets_cuda", [](uintptr_t splits, bool wide, int64_t count, const std::vector<int64_t>& divisors,
                           const std::vector<int64_t>& strides, uintptr_t out, uintptr_t overflow, uintptr_t stream) {
    const hq::Rules rules = make_rules(divisors, strides);
    check_aligned(overflow, 4, "overflow");
    hq::offsets_cuda(make_splits(splits, wide, count), rules, make_offsets(rules, out), pointer<int>(overflow), stream);
  }, "splits"_a, "wide"_a, "count"_a, "divisors"_a, "strides"_a, "out"_a, "overflow"_a = 0, "stream"_a = 0,
     "offsets_cpu on the current GPU; overflow: an int32 set to 1 where an offset does not fit.");
  m.def("dequantize_cuda", [](HQ_DECODE_PARAMETERS, uintptr_t stream, bool columns, HQ_MEMBER_PARAMETERS,
                              int64_t pitch) {
    const hq::Encoded encoded = make_encoded(HQ_DECODE_VALUES, columns, offsets != 0);
    const auto dtype = static_cast<hq::Dtype>(out_dtype);
    if (const auto group = make_group(rows, cols, offsets, members))
      hq::dequantize_grouped_cuda({encoded, columns, *group}, decoding_of(exact), pointer<void>(out), dtype, stream);
    else
      hq::dequantize_cuda(encoded, decoding_of(exact), pointer<void>(out), pitch ? pitch : cols, dtype, stream);
  }, HQ_DECODE_ARGS, "stream"_a = 0, "columns"_a = false, HQ_MEMBER_ARGS, "pitch"_a = 0,
     "dequantize_cpu on the current GPU, where the offsets are. pitch: elements of out from one row of one matrix to the "
     "next; 0: cols.");
  m.def("scale_product_cuda", [](uintptr_t product, int dtype, float before, uintptr_t factor, int64_t rows,
                                 int64_t cols, int row_step, int col_step, uintptr_t out, int out_dtype,
                                 uintptr_t stream) {
    hq::scale_product_cuda(
        make_product(product, dtype, before, factor, rows, cols, row_step, col_step, out, out_dtype), pointer<void>(out),
        static_cast<hq::Dtype>(out_dtype), stream);
  }, "product"_a, "dtype"_a, "before"_a, "factor"_a, "rows"_a, "cols"_a, "row_step"_a, "col_step"_a, "out"_a,
     "out_dtype"_a, "stream"_a = 0,
     "A GEMM's fp32 or bf16 product times a number, then times a factor, one or per row or per column; rounded to the "
     "output's dtype.");
  m.def("cuda_device_count", &hq::cuda_device_count, "Visible GPUs; 0 without a driver.");
}
#endif

// One operation over n values, for tests.
void bind_elements(py::module_& m) {
  m.def("cast_elements", [](const std::string& element, uintptr_t src_ptr, uintptr_t dst_ptr, int64_t n) {
    check_arrays(n, src_ptr, 4, dst_ptr, 1);
    hq::encode_elements(lookup(kElements, "element", element), pointer<float>(src_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "element"_a, "src_ptr"_a, "dst_ptr"_a, "n"_a, "fp32 values to codes, one byte each.");
  m.def("decode_elements", [](const std::string& element, uintptr_t src_ptr, uintptr_t dst_ptr, int64_t n) {
    check_arrays(n, src_ptr, 1, dst_ptr, 4);
    hq::decode_elements(lookup(kElements, "element", element), pointer<uint8_t>(src_ptr), pointer<float>(dst_ptr), n);
  }, "element"_a, "src_ptr"_a, "dst_ptr"_a, "n"_a, "Codes, one byte each, to fp32 values.");
  m.def("e8m0_up", [](uintptr_t src_ptr, uintptr_t dst_ptr, int64_t n) {
    check_arrays(n, src_ptr, 4, dst_ptr, 1);
    hq::e8m0_up_elements(pointer<float>(src_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "src_ptr"_a, "dst_ptr"_a, "n"_a, "Non-negative fp32 values to E8M0 codes, rounded up.");
  m.def("e8m0_scale", [](const std::string& rounding, const std::string& element, uintptr_t amax_ptr, uintptr_t dst_ptr,
                         int64_t n) {
    check_arrays(n, amax_ptr, 4, dst_ptr, 1);
    hq::e8m0_elements(lookup(kRoundings, "rounding", rounding), lookup(kElements, "element", element),
                      pointer<float>(amax_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "rounding"_a, "element"_a, "amax_ptr"_a, "dst_ptr"_a, "n"_a, "Block amaxes to the E8M0 codes of their scales.");
  m.def("stochastic_e2m1", [](uintptr_t src_ptr, uintptr_t bytes_ptr, uintptr_t dst_ptr, int64_t n) {
    check_arrays(n, src_ptr, 4, dst_ptr, 1);
    check_arrays(n, bytes_ptr, 1, dst_ptr, 1);
    hq::stochastic_e2m1_elements(pointer<float>(src_ptr), pointer<uint8_t>(bytes_ptr), pointer<uint8_t>(dst_ptr), n);
  }, "src_ptr"_a, "bytes_ptr"_a, "dst_ptr"_a, "n"_a, "fp32 values and one random byte each to E2M1 codes.");
  m.def("philox", [](uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t counter[4] = {c0, c1, c2, c3};
    hq::philox(key0, key1, counter);
    return std::array<uint32_t, 4>{counter[0], counter[1], counter[2], counter[3]};
  }, "key0"_a, "key1"_a, "c0"_a, "c1"_a, "c2"_a, "c3"_a, "Philox4x32-10.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled quantizers of hqsweep: pointers, shapes and strides in elements; see hqsweep.ops for tensors.";
  m.def("build_info", &build_info, "Version, compiler, flags and instruction sets of this build, as a dict.");
  py::class_<hq::Spec>(m, "Spec", "A format as the loops know it; made once, used in many calls.")
      .def(py::init(&make_spec), py::kw_only(), "family"_a, "element"_a, "tile_rows"_a, "tile_cols"_a, "pow2"_a = false,
           "amax_epsilon"_a = 0.0f, "scale_rounding"_a = "up", "row_scaled"_a = false, "rht"_a = 0,
           "rht_sign"_a = true, "sr"_a = false, "four_over_six"_a = "none", "e4m3_max"_a = 448.0f,
           "fast_error"_a = false, "eden"_a = false);
  py::class_<hq::Direction>(m, "Direction", "What is made of a matrix in one direction, and the addresses it goes to.")
      .def(py::init(&make_direction), "spec"_a, "key0"_a = 0, "key1"_a = 0, "step"_a = 0, "amax"_a = 0, "found"_a = 0,
           "codes"_a = 0, "scales"_a = 0, "global_"_a = 0, "exact"_a = 0, "exact_dtype"_a = 0, "sums"_a = 0,
           "row_errors"_a = 0, "keys"_a = 0, "by_rows"_a = false, "step_at"_a = 0, "first_segment"_a = 0,
           "segments_across"_a = 0, "seen"_a = 0);
  bind_cpu(m);
#if defined(HQ_HAVE_CUDA)
  bind_cuda(m);
  hq::bind_activation(m);
  hq::bind_adam(m);
  hq::bind_embedding(m);
  hq::bind_loss(m);
  hq::bind_norm(m);
  hq::bind_product(m);
  hq::bind_experts(m);
  hq::bind_rope(m);
  hq::bind_expert_rows(m);
  hq::bind_sum_parts(m);
#endif
  bind_elements(m);
}
