// Python bindings of the norms: addresses and sizes checked and turned into calls.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "arguments.h"
#include "norm.h"

namespace py = pybind11;
using namespace py::literals;

namespace hq {
namespace {

using namespace arguments;

// An array of units of 4 elements: fp32 or bf16, or 0 where there is none.
NormArray array_of(uintptr_t address, int dtype, const char* name) {
  HQ_REQUIRE(dtype == 0 || dtype == 1, std::string(name) + " has dtype " + text(dtype) + ", must be 0 (fp32) or 1 (bf16)");
  const auto as = static_cast<Dtype>(dtype);
  check_aligned(address, kNormUnit * bytes_of(as), name);
  return {pointer<void>(address), as};
}

int check_norm(int64_t rows, int64_t cols) {
  check_shape(rows, cols);
  HQ_REQUIRE(cols > 0 && cols % kNormUnit == 0 && cols <= kNormMostCols,
             "cols is " + text(cols) + ", must be a multiple of " + text(kNormUnit) + " up to " +
                 text(kNormMostCols));
  return static_cast<int>(cols);
}

// The other ranks' summands of an array, of which every element is read in whole units.
Summands summands_of(uintptr_t received, int ranks, int rank, const NormArray& own, const char* name) {
  HQ_REQUIRE(!received || (own.data && own.dtype == Dtype::bf16 && ranks > 1 && rank >= 0 && rank < ranks),
             std::string(name) + " has summands, which are bf16 of several ranks, got rank " + text(rank) + " of " +
                 text(ranks));
  check_aligned(received, kNormUnit * bytes_of(own.dtype), name);
  return {pointer<void>(received), ranks, rank};
}

// Arrays that get h, too.
Copies copies_of(const std::vector<uintptr_t>& to, uintptr_t h, int dtype) {
  HQ_REQUIRE(to.empty() || (h && to.size() <= static_cast<size_t>(kNormMostCopies)),
             "there are " + text(static_cast<int64_t>(to.size())) + " copies, must be of an h, and at most " + text(kNormMostCopies));
  Copies copies{};
  for (const uintptr_t each : to) {
    HQ_REQUIRE(each, "a copy is at address 0");
    copies.to[copies.count++] = array_of(each, dtype, "a copy").data;
  }
  return copies;
}

}  // namespace

void bind_norm(py::module_& m) {
  m.def("norm_forward_cuda", [](uintptr_t x, int dtype, uintptr_t branch, int branch_dtype, uintptr_t gain,
                                uintptr_t bias, float epsilon, int64_t rows, int64_t cols, uintptr_t sum, uintptr_t h,
                                int h_dtype, uintptr_t statistics, uintptr_t amax, uintptr_t column_amax, bool signs,
                                uintptr_t received, int ranks, int rank, const std::vector<uintptr_t>& copies,
                                uintptr_t stream) {
    const int width = check_norm(rows, cols);
    HQ_REQUIRE(rows == 0 || (x && gain && statistics && (sum || !branch)), "an array of the norm is at address 0");
    check_aligned(gain | bias, 16, "gain or bias");
    check_aligned(statistics, 4, "statistics");
    const NormArray added = array_of(branch, branch_dtype, "branch");
    const NormForward call{array_of(x, dtype, "x"), added, array_of(sum, dtype, "sum"), array_of(h, h_dtype, "h"),
                           summands_of(received, ranks, rank, added, "branch"), pointer<float>(gain), pointer<float>(bias),
                           pointer<float>(statistics), epsilon, rows, width, copies_of(copies, h, h_dtype)};
    HQ_REQUIRE(amax || !column_amax, "the amax of columns is found with that of h");
    if (!amax) return norm_forward_cuda(call, stream);
    check_aligned(amax | column_amax, 4, "an amax");
    HQ_REQUIRE(!received && copies.empty(), "amaxes are found where branch is whole, and h is written once");
    HQ_REQUIRE((h || rows == 0) && rows % kNormStrip == 0 && cols <= kNormMostMeasured && call.h.dtype == Dtype::bf16,
               "amaxes are found of bf16, of a multiple of " + text(kNormStrip) + " rows and at most " +
                   text(kNormMostMeasured) + " columns, got " + text(rows) + " x " + text(cols));
    norm_measured_cuda(call, {pointer<float>(amax), pointer<float>(column_amax), signs}, stream);
  }, "x"_a, "dtype"_a, "branch"_a, "branch_dtype"_a, "gain"_a, "bias"_a, "epsilon"_a, "rows"_a, "cols"_a, "sum"_a, "h"_a,
     "h_dtype"_a, "statistics"_a, "amax"_a = 0, "column_amax"_a = 0, "signs"_a = false, "received"_a = 0,
     "ranks"_a = 1, "rank"_a = 0, "copies"_a = std::vector<uintptr_t>(), "stream"_a = 0,
     "x + branch and its norm, by rows; bias 0: RMSNorm. branch, sum and h may be 0; amaxes are raised, or 0. received: "
     "other ranks' summands of branch, or 0. copies: arrays that get h, too.");
  m.def("quantize_normed_cuda", [](uintptr_t sum, uintptr_t gain, uintptr_t bias, uintptr_t statistics, int64_t rows,
                                   int64_t cols, const Direction* row, const Direction* column, bool dequantized,
                                   uintptr_t stream) {
    const int width = check_norm(rows, cols);
    make_call(sum, static_cast<int>(Dtype::bf16), rows, cols, cols, 1, row, column, dequantized);  // as quantize_cuda
    HQ_REQUIRE(rows == 0 || (gain && statistics), "gain or statistics are at address 0");
    check_aligned(sum | gain | bias, 16, "the least of sum, gain and bias");
    check_aligned(statistics, 4, "statistics");
    const Normed of{pointer<void>(sum), pointer<float>(gain), pointer<float>(bias), pointer<float>(statistics), rows,
                    width};
    return quantize_normed_cuda(of, row, column, dequantized, stream);
  }, "sum"_a, "gain"_a, "bias"_a, "statistics"_a, "rows"_a, "cols"_a, "row"_a.none(true), "column"_a.none(true),
     "dequantized"_a = false, "stream"_a = 0,
     "quantize_cuda of norm_forward_cuda's h, of sums in bf16, without making it; False where no kernel does that.");
  m.def("norm_backward_cuda", [](uintptr_t dh, int dh_dtype, uintptr_t sum, int dtype, uintptr_t dsum, uintptr_t gain,
                                 uintptr_t statistics, int64_t rows, int64_t cols, uintptr_t dx, uintptr_t dbranch,
                                 int branch_dtype, bool centred, uintptr_t partials, int blocks, uintptr_t dgain,
                                 uintptr_t received, int ranks, int rank, uintptr_t stream) {
    const int width = check_norm(rows, cols);
    HQ_REQUIRE(rows == 0 || (dh && sum && gain && statistics && dx), "an array of the norm's backward is at address 0");
    HQ_REQUIRE(dgain && blocks >= 0 && (blocks == 0) == (rows == 0) && (partials || blocks == 0),
               "blocks is " + text(blocks) + " for " + text(rows) + " rows, or dgain or partials are at address 0");
    check_aligned(gain, 16, "gain");
    check_aligned(statistics | partials | dgain, 4, "the least of statistics, partials and dgain");
    const NormArray of_h = array_of(dh, dh_dtype, "dh");
    norm_backward_cuda({of_h, array_of(sum, dtype, "sum"), array_of(dsum, dtype, "dsum"), array_of(dx, dtype, "dx"),
                            array_of(dbranch, branch_dtype, "dbranch"),
                            summands_of(received, ranks, rank, of_h, "dh"), pointer<float>(gain),
                            pointer<float>(statistics), pointer<float>(partials), pointer<float>(dgain), rows, width,
                            blocks, centred}, stream);
  }, "dh"_a, "dh_dtype"_a, "sum"_a, "dtype"_a, "dsum"_a, "gain"_a, "statistics"_a, "rows"_a, "cols"_a, "dx"_a,
     "dbranch"_a, "branch_dtype"_a, "centred"_a, "partials"_a, "blocks"_a, "dgain"_a, "received"_a = 0,
     "ranks"_a = 1, "rank"_a = 0, "stream"_a = 0,
     "Gradients of norm_forward_cuda; dsum and dbranch may be 0. centred: LayerNorm. received: other ranks' summands of "
     "dh, or 0.");
}

}  // namespace hq
