// Bindings of the loss (csrc/loss.h).
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "loss.h"

namespace py = pybind11;
using namespace py::literals;

namespace hq {

using namespace arguments;

namespace {

// What every loss is given: logits [rows, vocabulary] and the targets of their rows.
void check_logits(uintptr_t logits, uintptr_t targets, int64_t rows, int64_t vocabulary) {
  check_shape(rows, vocabulary);
  HQ_REQUIRE(vocabulary % kLogitsOfLoad == 0 && vocabulary < int64_t{1} << 31,
             "the vocabulary has " + text(vocabulary) + " entries, must be a multiple of " + text(kLogitsOfLoad) +
                 " below 2^31");
  HQ_REQUIRE(rows * vocabulary == 0 || (logits && targets), "logits and targets are 0 only without elements");
  check_aligned(logits, 16, "logits");
  check_aligned(targets, 8, "targets");
}

// Where results of rows are read or written.
void check_rows(uintptr_t address, int64_t rows, int64_t bytes, const char* name) {
  HQ_REQUIRE(rows == 0 || address, std::string(name) + ": address 0 is taken only without rows");
  check_aligned(address, bytes, name);
}

}  // namespace

void bind_loss(py::module_& m) {
  m.def("cross_entropy_cuda", [](uintptr_t logits, uintptr_t targets, uintptr_t losses, int64_t rows,
                                 int64_t vocabulary, uintptr_t scale, bool gradient, uintptr_t amax, uintptr_t stream) {
    check_logits(logits, targets, rows, vocabulary);
    check_rows(losses, rows, 4, "losses");
    check_rows(scale, rows, 4, "the scale");
    check_aligned(amax, 4, "amax");
    cross_entropy_cuda({pointer<void>(logits), pointer<int64_t>(targets), pointer<float>(losses), rows, vocabulary,
                        pointer<float>(scale), gradient, pointer<float>(amax)}, stream);
  }, "logits"_a, "targets"_a, "losses"_a, "rows"_a, "vocabulary"_a, "scale"_a, "gradient"_a, "amax"_a = 0,
     "stream"_a = 0,
     "Losses of bf16 logits [rows, vocabulary], which the gradient replaces if wanted, on the current GPU.");
  m.def("loss_parts_cuda", [](uintptr_t logits, uintptr_t targets, uintptr_t parts, int64_t rows, int64_t vocabulary,
                              int64_t first, uintptr_t stream) {
    check_logits(logits, targets, rows, vocabulary);
    check_rows(parts, rows, 16, "parts");
    HQ_REQUIRE(first >= 0, "first is " + text(first) + ", must be >= 0");
    loss_parts_cuda({pointer<void>(logits), pointer<int64_t>(targets), pointer<LossPart>(parts), rows, vocabulary, first},
                    stream);
  }, "logits"_a, "targets"_a, "parts"_a, "rows"_a, "vocabulary"_a, "first"_a, "stream"_a = 0,
     "Of bf16 logits [rows, vocabulary] of a vocabulary's entries from `first` on: each row's largest logit, sum of\n"
     "exponentials and target, float32 [rows, 4], on the current GPU.");
  m.def("shared_cross_entropy_cuda", [](uintptr_t logits, uintptr_t targets, uintptr_t parts, uintptr_t losses,
                                        int64_t rows, int64_t vocabulary, int64_t first, int64_t ranks, uintptr_t scale,
                                        bool gradient, uintptr_t stream) {
    check_logits(logits, targets, rows, vocabulary);
    check_rows(parts, rows, 16, "parts");
    check_rows(losses, rows, 4, "losses");
    check_rows(scale, rows, 4, "the scale");
    HQ_REQUIRE(first >= 0 && ranks > 0, "first is " + text(first) + " and ranks is " + text(ranks) +
                                            ", must be >= 0 and > 0");
    shared_cross_entropy_cuda({pointer<void>(logits), pointer<int64_t>(targets), pointer<LossPart>(parts),
                               pointer<float>(losses), rows, vocabulary, first, ranks, pointer<float>(scale), gradient},
                              stream);
  }, "logits"_a, "targets"_a, "parts"_a, "losses"_a, "rows"_a, "vocabulary"_a, "first"_a, "ranks"_a, "scale"_a,
     "gradient"_a, "stream"_a = 0,
     "cross_entropy_cuda for logits of a vocabulary's entries from `first` on, with the parts [ranks, rows, 4] of all.");
  m.def("joint_cross_entropy_cuda", [](uintptr_t logits, uintptr_t targets, uintptr_t losses, uintptr_t boxes,
                                       uintptr_t state, int64_t rows, int64_t vocabulary, int64_t first, int64_t room,
                                       int ranks, int rank, uintptr_t scale, uintptr_t stream) {
    check_logits(logits, targets, rows, vocabulary);
    check_rows(losses, rows, 4, "losses");
    check_rows(scale, rows, 4, "the scale");
    HQ_REQUIRE(boxes && state, "boxes or state are at address 0");
    check_aligned(boxes, 8, "boxes");
    check_aligned(state, 4, "state");
    HQ_REQUIRE(ranks > 1 && ranks <= kMostRanks && rank >= 0 && rank < ranks,
               "rank is " + text(rank) + " of " + text(ranks) + ", must be one of 2 to " + text(kMostRanks));
    HQ_REQUIRE(first >= 0 && rows <= room, "first is " + text(first) + ", must be >= 0, and there are " + text(rows) +
                                               " rows in boxes for " + text(room));
    return joint_cross_entropy_cuda({pointer<void>(logits), pointer<int64_t>(targets), pointer<float>(losses),
                                     pointer<LossPart*>(boxes), pointer<unsigned>(state), rows, vocabulary, first, room,
                                     ranks, rank, pointer<float>(scale)}, stream);
  }, "logits"_a, "targets"_a, "losses"_a, "boxes"_a, "state"_a, "rows"_a, "vocabulary"_a, "first"_a, "room"_a, "ranks"_a,
     "rank"_a, "scale"_a, "stream"_a = 0,
     "shared_cross_entropy_cuda with the gradient, whose ranks' kernels run together and tell each other their parts, in\n"
     "boxes [2, ranks, room, 4] of each; False where rows do not fit into shared memory.");
  m.def("scale_values_cuda", [](uintptr_t values, int dtype, int64_t count, uintptr_t factor, uintptr_t stream) {
    HQ_REQUIRE(dtype == 0 || dtype == 1, "dtype of the values is " + text(dtype) + ", must be 0 (fp32) or 1 (bf16)");
    HQ_REQUIRE(count >= 0 && count < kMostElements, "count is " + text(count) + ", must be >= 0 and less than 2^59");
    HQ_REQUIRE(count == 0 || (values && factor), "values and factor are 0 only without elements");
    check_aligned(values, bytes_of(static_cast<Dtype>(dtype)), "values");
    check_aligned(factor, 4, "factor");
    scale_values_cuda({pointer<void>(values), static_cast<Dtype>(dtype), count, pointer<float>(factor)}, stream);
  }, "values"_a, "dtype"_a, "count"_a, "factor"_a, "stream"_a = 0,
     "values *= factor[0] in place, on the current GPU; nothing is touched where the factor is 1.");
}

}  // namespace hq
