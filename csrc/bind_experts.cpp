// Bindings of what moves tokens to experts and back.
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "experts.h"

namespace py = pybind11;
using namespace py::literals;

#if defined(HQ_HAVE_CUDA)
namespace hq {
namespace {

using namespace arguments;

void check_rows(uintptr_t address, bool empty, const char* name) {
  HQ_REQUIRE(address != 0 || empty, std::string(name) + " is 0 but there are elements");
  check_aligned(address, 16, name);
}

Dtype fp32_or_bf16(int dtype) {
  HQ_REQUIRE(dtype == 0 || dtype == 1, "dtype is " + text(dtype) + ", must be 0 (fp32) or 1 (bf16)");
  return static_cast<Dtype>(dtype);
}

// What a call for tokens is given first.
#define HQ_CHOICE_PARAMETERS \
  uintptr_t places, int64_t tokens, int64_t choices, int64_t dim, uintptr_t starts, int64_t experts
#define HQ_CHOICE_VALUES places, tokens, choices, dim, starts, experts
#define HQ_CHOICE_ARGS "places"_a, "tokens"_a, "choices"_a, "dim"_a, "starts"_a, "experts"_a

bool is_empty(int64_t tokens, int64_t choices, int64_t dim) { return tokens == 0 || choices == 0 || dim == 0; }

Choices make_choices(HQ_CHOICE_PARAMETERS) {
  check_shape(tokens, dim);
  HQ_REQUIRE(choices >= 0 && choices < (1 << 20), "choices is " + text(choices) + ", must be >= 0 and less than 2^20");
  check_shape(tokens * choices, dim);
  HQ_REQUIRE(dim % 8 == 0, "dim is " + text(dim) + ", must be a multiple of 8");
  HQ_REQUIRE(places != 0 || is_empty(tokens, choices, dim), "places is 0 but there are choices");
  check_aligned(places | starts, 8, "the least of places and starts");
  HQ_REQUIRE(experts >= 0 && experts < (1 << 24), "experts is " + text(experts) + ", must be >= 0 and less than 2^24");
  HQ_REQUIRE((starts != 0) == (experts != 0), "starts are those of experts");
  return {pointer<int64_t>(places), tokens, static_cast<int>(choices), dim, pointer<int64_t>(starts),
          static_cast<int>(experts)};
}

Combined make_combined(HQ_CHOICE_PARAMETERS, uintptr_t rows, uintptr_t weights, uintptr_t added) {
  const bool empty = is_empty(tokens, choices, dim);
  const Choices made = make_choices(HQ_CHOICE_VALUES);
  check_rows(rows, empty, "rows");
  check_rows(added, true, "added");
  HQ_REQUIRE(weights != 0 || empty, "weights is 0 but there are choices");
  check_aligned(weights, 4, "weights");
  return {made, pointer<void>(rows), pointer<float>(weights), pointer<void>(added)};
}

#define HQ_ROUTED_PARAMETERS                                                                                  \
  int64_t tokens, int experts, int choices, uintptr_t logits, uintptr_t probabilities, uintptr_t chosen,      \
      uintptr_t weights, uintptr_t sums
#define HQ_ROUTED_VALUES tokens, experts, choices, logits, probabilities, chosen, weights, sums
#define HQ_ROUTED_ARGS \
  "tokens"_a, "experts"_a, "choices"_a, "logits"_a, "probabilities"_a, "chosen"_a, "weights"_a, "sums"_a

// logits or sums may be null: the way back does not read them.
Routed make_routed(HQ_ROUTED_PARAMETERS) {
  HQ_REQUIRE(experts >= 1 && experts <= kMostExperts,
             "experts is " + text(experts) + ", must be 1 to " + text(kMostExperts));
  HQ_REQUIRE(choices >= 1 && choices <= experts && choices <= kMostChoices,
             "choices is " + text(choices) + ", must be 1 to " + text(experts) + " and at most " + text(kMostChoices));
  check_shape(tokens, experts);
  HQ_REQUIRE(tokens == 0 || (probabilities && chosen && weights), "an array of tokens is at address 0");
  check_aligned(logits | probabilities | weights | sums, 4, "the least of logits, probabilities, weights and sums");
  check_aligned(chosen, 8, "chosen");
  return {tokens, experts, choices, pointer<float>(logits), pointer<float>(probabilities), pointer<int64_t>(chosen),
          pointer<float>(weights), pointer<float>(sums)};
}

void check_counts(uintptr_t counts) {
  HQ_REQUIRE(counts != 0, "counts is 0");
  check_aligned(counts, 8, "counts");
}

}  // namespace

void bind_experts(py::module_& m) {
  m.def("dispatch_rows_cuda", [](HQ_CHOICE_PARAMETERS, uintptr_t x, int dtype, uintptr_t rows, uintptr_t stream) {
    const Choices call = make_choices(HQ_CHOICE_VALUES);
    for (const uintptr_t address : {x, rows}) check_rows(address, is_empty(tokens, choices, dim), "the least of x and rows");
    dispatch_rows_cuda(call, pointer<void>(x), fp32_or_bf16(dtype), pointer<void>(rows), stream);
  }, HQ_CHOICE_ARGS, "x"_a, "dtype"_a, "rows"_a, "stream"_a = 0, "Each token of x to the places of its choices, in bf16.");
  m.def("sum_rows_cuda", [](HQ_CHOICE_PARAMETERS, uintptr_t rows, uintptr_t out, int dtype, uintptr_t stream) {
    const Choices call = make_choices(HQ_CHOICE_VALUES);
    for (const uintptr_t address : {rows, out})
      check_rows(address, is_empty(tokens, choices, dim), "the least of rows and out");
    sum_rows_cuda(call, pointer<void>(rows), pointer<void>(out), fp32_or_bf16(dtype), stream);
  }, HQ_CHOICE_ARGS, "rows"_a, "out"_a, "dtype"_a, "stream"_a = 0,
     "The sum of each token's rows, rounded to bf16; dtype: that of out.");
  m.def("combine_rows_cuda", [](HQ_CHOICE_PARAMETERS, uintptr_t rows, uintptr_t weights, uintptr_t added, uintptr_t y,
                                uintptr_t stream) {
    const Combined call = make_combined(HQ_CHOICE_VALUES, rows, weights, added);
    check_rows(y, is_empty(tokens, choices, dim), "y");
    combine_rows_cuda(call, pointer<float>(y), stream);
  }, HQ_CHOICE_ARGS, "rows"_a, "weights"_a, "added"_a, "y"_a, "stream"_a = 0,
     "The weighted sum of each token's rows, and of what is added, in fp32.");
  m.def("combine_rows_back_cuda", [](HQ_CHOICE_PARAMETERS, uintptr_t rows, uintptr_t weights, uintptr_t dy,
                                     uintptr_t drows, uintptr_t dweights, uintptr_t dadded, uintptr_t stream) {
    const Combined call = make_combined(HQ_CHOICE_VALUES, rows, weights, 0);
    for (const uintptr_t address : {dy, drows})
      check_rows(address, is_empty(tokens, choices, dim), "the least of dy and drows");
    HQ_REQUIRE(dweights != 0 || is_empty(tokens, choices, dim), "dweights is 0 but there are choices");
    check_rows(dadded, true, "dadded");
    check_aligned(dweights, 4, "dweights");
    combine_rows_back_cuda(call, pointer<float>(dy), pointer<void>(drows), pointer<float>(dweights),
                           pointer<void>(dadded), stream);
  }, HQ_CHOICE_ARGS, "rows"_a, "weights"_a, "dy"_a, "drows"_a, "dweights"_a, "dadded"_a = 0, "stream"_a = 0,
     "The gradients of rows, weights and added from dy in fp32.");
  m.def("place_choices_cuda", [](uintptr_t chosen, int64_t choices, int experts, uintptr_t counts, uintptr_t order,
                                 uintptr_t places, uintptr_t tokens, uintptr_t stream) {
    HQ_REQUIRE(choices >= 0 && choices < (int64_t{1} << 31), "choices is " + text(choices) + ", must be less than 2^31");
    HQ_REQUIRE(experts >= 1 && experts <= kMostExperts,
               "experts is " + text(experts) + ", must be 1 to " + text(kMostExperts));
    HQ_REQUIRE(choices == 0 || (chosen && counts && order && places), "an array of choices is at address 0");
    HQ_REQUIRE(tokens != 0, "tokens is 0");
    check_aligned(chosen | order | places | tokens, 8, "the least of chosen, order, places and tokens");
    check_aligned(counts, 4, "counts");
    place_choices_cuda({pointer<int64_t>(chosen), choices, experts, pointer<int>(counts), pointer<int64_t>(order),
                        pointer<int64_t>(places), pointer<int64_t>(tokens)}, stream);
  }, "chosen"_a, "choices"_a, "experts"_a, "counts"_a, "order"_a, "places"_a, "tokens"_a, "stream"_a = 0,
     "The choices by expert, where each of them is, and how many fell on each expert; counts: int32 scratch, one for each "
     "expert and 1024 choices.");
  m.def("route_cuda", [](HQ_ROUTED_PARAMETERS, uintptr_t stream) {
    const Routed call = make_routed(HQ_ROUTED_VALUES);
    HQ_REQUIRE(tokens == 0 || (logits && sums), "logits and sums are 0 only without tokens");
    route_cuda(call, stream);
  }, HQ_ROUTED_ARGS, "stream"_a = 0, "Softmax of logits, the largest of each token, their weights; sums is scratch.");
  m.def("balance_cuda", [](HQ_ROUTED_PARAMETERS, uintptr_t counts, uintptr_t balance, uintptr_t stream) {
    const Routed call = make_routed(HQ_ROUTED_VALUES);
    check_counts(counts);
    HQ_REQUIRE((tokens == 0 || sums) && balance, "sums and balance are not 0");
    check_aligned(balance, 4, "balance");
    balance_cuda(call, pointer<int64_t>(counts), pointer<float>(balance), stream);
  }, HQ_ROUTED_ARGS, "counts"_a, "balance"_a, "stream"_a = 0, "The balance of a routing, from what route_cuda added up.");
  m.def("route_back_cuda", [](HQ_ROUTED_PARAMETERS, uintptr_t counts, uintptr_t dweights, uintptr_t dbalance,
                              uintptr_t dlogits, uintptr_t stream) {
    const Routed call = make_routed(HQ_ROUTED_VALUES);
    check_counts(counts);
    HQ_REQUIRE(tokens == 0 || dlogits, "dlogits is 0 but there are tokens");
    check_aligned(dweights | dbalance | dlogits, 4, "the least of dweights, dbalance and dlogits");
    route_back_cuda(call, pointer<int64_t>(counts), pointer<float>(dweights), pointer<float>(dbalance),
                    pointer<float>(dlogits), stream);
  }, HQ_ROUTED_ARGS, "counts"_a, "dweights"_a, "dbalance"_a, "dlogits"_a, "stream"_a = 0,
     "The gradient of logits from those of weights and balance, either of which may be 0.");
}

}  // namespace hq
#endif
